"""Base of this package's querysets: reads go to the primary, even if routers use replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from django.db import connections, models, router

from ..core.transactions import writing
from .locking import lock_keys

M = TypeVar("M", bound=models.Model)

# Maximum number of rows changed in one transaction.
PART = 1000


class PrimaryQuerySet(models.QuerySet[M]):
    """Read from the database that writes go to: a replica lags behind, and has no locks."""

    @property
    def db(self) -> str:
        return self._db or router.db_for_write(self.model, **self._hints)  # type: ignore[attr-defined]

    def upsert(self, rows: Iterable[M], *, key: Sequence[str], fields: Sequence[str]) -> None:
        """Insert rows; where a row with the same ``key`` exists, set its ``fields``."""
        # MySQL has no conflict target: there, any unique index identifies the row.
        unique = None if connections[self.db].vendor == "mysql" else key
        self.bulk_create(
            list(rows), update_conflicts=True, unique_fields=unique, update_fields=fields
        )

    def update_in_parts(self, **changes: object) -> int:
        """Update the rows that match now, in transactions of up to a thousand rows.

        Like ``update()``, but no transaction waits for a row while it holds another one. So none
        is part of a deadlock, and no row is locked for long.
        """
        ids = sorted(self.order_by().values_list("pk", flat=True))
        changed = 0
        for start in range(0, len(ids), PART):
            part = ids[start : start + PART]
            with writing(self.db, savepoint=False):
                free = lock_keys(self, part)
                changed += (
                    self.model._base_manager.using(self.db).filter(pk__in=free).update(**changes)
                )
            if held := set(part).difference(free):
                for pk in self.filter(pk__in=held).values_list("pk", flat=True):
                    changed += self.filter(pk=pk).update(**changes)
        return changed
