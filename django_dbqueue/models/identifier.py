"""Text that identifies: a key, a queue, a task. Two values are the same only if Python takes them for the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage
from django.db import models

if TYPE_CHECKING:
    CharField = models.CharField[Any, Any]
else:
    CharField = models.CharField


class IdentifierField(CharField):
    """A CharField that every database compares byte for byte.

    MySQL and MariaDB compare text without regard to case, accents and trailing spaces by default: there the column has a binary
    collation without padding, whatever the default of the database is.
    """

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        return parameters

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """W003 is about the 767 bytes of old row formats: a unique index holds 3,072 bytes in all that are supported."""
        return [message for message in super().check(**kwargs) if message.id != "mysql.W003"]
