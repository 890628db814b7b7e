"""Django's database backend for the tables of ``InMemoryBackend``."""

from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):
    """SQLite in memory, usable where pytest-django refuses databases.

    pytest-django replaces ``ensure_connection()`` of the base class, and not this one.
    """

    def ensure_connection(self) -> None:
        if self.connection is None:
            with self.wrap_database_errors:
                self.connect()

    def __del__(self) -> None:
        """Close the connection of a thread that has ended."""
        if self.connection is not None:
            self.connection.close()
