"""Text that identifies a key, a queue or a task.

Two values are equal only if they are equal in Python.
"""

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

    MySQL and MariaDB compare text without regard to case, accents and trailing spaces by default.
    There the column has a binary collation without padding, whatever the database's default is.
    """

    def db_parameters(self, connection: Any) -> dict[str, str | None]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = (
                "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
            )
        return parameters

    def check(self, **kwargs: object) -> list[CheckMessage]:
        """Check the field, without mysql.W003.

        W003 is about the 767 bytes of old row formats. In all supported row formats, a unique
        index holds 3,072 bytes.
        """
        return [message for message in super().check(**kwargs) if message.id != "mysql.W003"]
