from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .identifier import IdentifierField
from .pausing import Pausable, PausableQuerySet


class TaskStateQuerySet(PausableQuerySet["TaskState"]):
    """Tasks: pause and resume."""


class TaskState(Pausable):
    """A task by its path, and whether its jobs may be claimed."""

    name = IdentifierField(_("task"), max_length=255, primary_key=True)

    objects = TaskStateQuerySet.as_manager()

    class Meta:
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        # The permission to view jobs covers it.
        default_permissions = ()
        permissions = [("enqueue_taskstate", "Can enqueue jobs of any task by hand")]

    def __str__(self) -> str:
        return str(self.name)

    @classmethod
    def check_name(cls, name: object) -> None:
        if not isinstance(name, str) or "." not in name or "\0" in name or len(name) > 255:
            raise ValueError(
                f"{name!r} is not a task. "
                "Give its path, such as 'shop.tasks.confirm': its module_path."
            )
