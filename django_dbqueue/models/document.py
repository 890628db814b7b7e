"""JSON columns that stay readable, whatever a row inserted by hand contains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    JSONField = models.JSONField[Any, Any]
else:
    JSONField = models.JSONField


class Unreadable:
    """Placeholder for a document that cannot be decoded.

    Iterating over it raises ValueError with the reason.
    """

    def __init__(self, error: Exception) -> None:
        self._why = f"It is JSON that Python cannot decode: {error}"

    def __repr__(self) -> str:
        return f"<{self._why}>"

    def _refuse(self) -> NoReturn:
        raise ValueError(self._why)

    __iter__ = keys = _refuse


class DocumentField(JSONField):
    """A JSONField whose value is ``Unreadable`` if Python cannot decode it.

    An example is a number of 5,000 digits. Other jobs of the lane and the admin page are still
    read.
    """

    def from_db_value(
        self, value: str | None, expression: models.Expression, connection: BaseDatabaseWrapper
    ) -> object:
        # Most values are one of these two, and a claim reads six documents a job.
        if value is None:
            return None
        if value == "{}":
            return {}
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError) as error:
            return Unreadable(error)


def decoded(text: str) -> object:
    """Decode a document that a cursor has read, and not a model."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(error)
