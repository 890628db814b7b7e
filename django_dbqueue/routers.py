"""Database router that puts the queue's tables in the databases that its backends name.

Setting: ``DATABASE_ROUTERS = ["django_dbqueue.routers.QueueRouter"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .compat import task_backends
from .core.chosen_backend import chosen_backend

if TYPE_CHECKING:
    from django.db.models import Model

LABEL = "dbqueue"


class QueueRouter:
    """Router that keeps jobs in the ``database`` of each backend's OPTIONS.

    Their tables stay out of all other databases. Code that names no backend reads and writes the
    database of the first backend; the admin, that of the backend that its user has chosen.
    """

    def _databases(self) -> list[str]:
        named = [
            params.get("OPTIONS", {}).get("database") for params in task_backends.settings.values()
        ]
        return [database for database in named if database]

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        """Return the database for the queue's models.

        It is that of the instance, of the backend that was chosen in the admin, or the first named.
        Return None for models of other apps, and if no backend names a database. Writes follow the
        same rule.
        """
        if model._meta.app_label != LABEL:
            return None
        databases = self._databases()
        instance = hints.get("instance")
        chosen = task_backends.settings.get(chosen_backend.get() or "", {}).get("OPTIONS", {})
        return (
            (instance and instance._state.db)
            or chosen.get("database")
            or (databases[0] if databases else None)
        )

    db_for_write = db_for_read

    def allow_relation(self, one: Model, other: Model, **hints: object) -> bool | None:
        """Return True if two rows of the queue are in one database; None for other apps."""
        labels = {one._meta.app_label, other._meta.app_label}
        return one._state.db == other._state.db if labels == {LABEL} else None

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool | None:
        """Return True if a database has the queue's tables, None for other apps.

        Return None too if no backend names a database.
        """
        databases = self._databases()
        return db in databases if app_label == LABEL and databases else None
