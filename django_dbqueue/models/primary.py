"""The base of this package's querysets, whatever replicas the project's database routers read from."""

from __future__ import annotations

from typing import TypeVar

from django.db import models, router

M = TypeVar("M", bound=models.Model)


class PrimaryQuerySet(models.QuerySet[M]):
    """Reads where it writes: a replica lags behind, and has no locks."""

    @property
    def db(self) -> str:
        return self._db or router.db_for_write(self.model, **self._hints)  # type: ignore[attr-defined]
