"""Text that identifies a key, a queue or a task.

Two values are equal only if they are equal in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage
from django.db import models
from django.db.models.functions import Collate
from django.db.models.lookups import IContains

if TYPE_CHECKING:
    CharField = models.CharField[Any, Any]
else:
    CharField = models.CharField


class IdentifierField(CharField):
    """A CharField that every database compares and sorts byte for byte, as Python does.

    MySQL and MariaDB compare text without regard to case, accents and trailing spaces by default,
    and PostgreSQL sorts by language. There the column has a binary collation, whatever the
    database's default is. An index then serves prefixes, too.
    """

    def db_parameters(self, connection: Any) -> dict[str, str | None]:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = binary_collation(connection)
        elif connection.vendor == "postgresql":
            parameters["collation"] = "C"
        return parameters

    def check(self, **kwargs: object) -> list[CheckMessage]:
        """Check the field, without mysql.W003.

        W003 is about the 767 bytes of old row formats. In all supported row formats, a unique
        index holds 3,072 bytes.
        """
        return [message for message in super().check(**kwargs) if message.id != "mysql.W003"]


def binary_collation(connection: Any) -> str:
    """Return the collation of MySQL or MariaDB in which only equal texts are equal."""
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


@IdentifierField.register_lookup
class ContainsInAnyCase(IContains):
    """A lookup without regard to case, as in the lists of the admin.

    MySQL and MariaDB have no operator for it: they compare by the collation.
    """

    def as_mysql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        text = Collate(self.lhs, "utf8mb4_general_ci")
        return IContains(text, self.rhs).as_sql(compiler, connection)
