"""JSON that anybody may have written, also with what Python cannot decode."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models

if TYPE_CHECKING:
    JSONField = models.JSONField[Any, Any]
else:
    JSONField = models.JSONField


class Unreadable:
    """Stands for a stored document, and raises ValueError, which says why, as soon as it is used as a list or a dictionary."""

    def __init__(self, error: Exception) -> None:
        self._why = f"It is JSON that Python cannot decode: {error}"

    def __repr__(self) -> str:
        return f"<{self._why}>"

    def _refuse(self) -> NoReturn:
        raise ValueError(self._why)

    __iter__ = keys = _refuse


class DocumentField(JSONField):
    """A JSONField whose rows can always be read: one number of 5,000 digits must not stop a lane, or an admin page."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError) as error:
            return Unreadable(error)


def decoded(text: str) -> Any:
    """A document that no model has read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(error)
