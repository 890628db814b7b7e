"""JSON columns that stay readable, whatever a row inserted by hand contains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models
from django.db.models import lookups
from django.db.models.fields.json import JSONExact

if TYPE_CHECKING:
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

    On MySQL it is text that the database checks, as on MariaDB: in a column of the type JSON, an
    integer of over 64 bits would become a float.
    """

    def db_type(self, connection: Any) -> str | None:
        return "longtext" if _is_mysql(connection) else super().db_type(connection)

    def db_check(self, connection: Any) -> str | None:
        if not _is_mysql(connection):
            return super().db_check(connection)
        return f"JSON_VALID({connection.ops.quote_name(self.column)})"

    def from_db_value(
        self, value: str | None, expression: models.Expression, connection: Any
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


@DocumentField.register_lookup
class DocumentExact(JSONExact):
    """Compares two documents, and not text with a document."""

    def process_lhs(self, compiler: Any, connection: Any, lhs: Any = None) -> tuple[str, Any]:
        sql, params = super().process_lhs(compiler, connection, lhs)
        return (f"JSON_EXTRACT({sql}, '$')" if _is_mysql(connection) else sql), params

    def process_rhs(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        if connection.vendor != "mysql" or self.rhs_is_direct_value():
            return super().process_rhs(compiler, connection)
        # Not Django's own, which takes each value within a subquery for a document.
        sql, params = lookups.Exact.process_rhs(self, compiler, connection)
        return (f"JSON_EXTRACT({sql}, '$')" if _is_mysql(connection) else sql), params


def _is_mysql(connection: Any) -> bool:
    return connection.vendor == "mysql" and not connection.mysql_is_mariadb


def decoded(text: str) -> object:
    """Decode a document that a cursor has read, and not a model."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(error)
