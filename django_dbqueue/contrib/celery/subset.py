"""The refusal of what is not served, and the options that need nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ...core.documentation import reference

# Options for which nothing needs to be done, with their accepted values.
NEED_NOTHING: dict[str, tuple[object, ...]] = {
    "ignore_result": (True, False),
    "store_errors_even_if_ignored": (True, False),
    "track_started": (True, False),
    "reject_on_worker_lost": (True, None),
    "retry": (True, False),
    "serializer": ("json", None),
}
REMEDIES = {
    "base": "Write a decorator of your function, or a receiver of the signal task_finished.",
    "exchange": "Give queue=.",
    "headers": "Use @task, and task.using(metadata=...).",
    "link": "Use chain().",
    "link_error": "Use a receiver of the signal task_finished, or a batch with on_finish.",
    "on_failure": "Use a receiver of the signal task_finished.",
    "on_success": "Use chain(), or a receiver of the signal task_finished.",
    "reject_on_worker_lost": "For a task that must not run twice, give acks_late=False.",
    "routing_key": "Give queue=.",
    "serializer": "Arguments are JSON: pass a primary key or text.",
    "task_id": "The queue makes the id. For one job at a time, use @task(key=...).",
    "throw": "Enqueue another job, or call retry() last.",
}


def refuse(where: str, name: str, value: object, remedy: str = "") -> NoReturn:
    remedy = remedy or REMEDIES.get(name, "Leave it out, or use @task of django_dbqueue.")
    raise TypeError(
        f"{where}: {name}={value!r} is not served by django_dbqueue.contrib.celery. {remedy} "
        f"See {reference('from_celery', 'refused')}."
    )


class Subset:
    """Base of the classes that have a part of the attributes of Celery's."""

    __slots__ = ()

    if not TYPE_CHECKING:  # A type checker then finds such an attribute itself.

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__} of django_dbqueue.contrib.celery has no {name!r}. "
                f"See {reference('from_celery', 'refused')}."
            )
