"""MariaDB: the server in BENCH_URL. Its user must be able to create databases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from . import Server, given_url

FACTS = ["version", "innodb_flush_log_at_trx_commit", "innodb_buffer_pool_size", "log_bin"]


@contextmanager
def server(settings: Sequence[str]) -> Iterator[Server]:
    if settings or not (url := given_url("mysql")):
        raise SystemExit(
            "Set BENCH_URL=mysql://user:password@host:3306 to a MariaDB server, and configure that "
            "server instead of using --set."
        )
    yield MariaDB(url)


class MariaDB(Server):
    name = "MariaDB"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._admin = self.connect("")

    def close(self) -> None:
        super().close()
        self._admin.close()

    def _make(self, database: str, template: str) -> str:
        self._rows(f"CREATE DATABASE {database} CHARACTER SET utf8mb4")
        if template:
            self._copy(template, database)
        return f"{self._url}/{database}"

    def _drop(self, database: str) -> None:
        self._rows(f"DROP DATABASE IF EXISTS {database}")

    def connect(self, database: str) -> Any:
        import MySQLdb

        parts = urlsplit(self._url)
        login = {
            "host": parts.hostname,
            "port": parts.port or 3306,
            "user": parts.username,
            "password": parts.password or "",
        }
        return MySQLdb.connect(**login, database=database, autocommit=True)

    def settle(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW TABLES")
            for (table,) in cursor.fetchall():
                cursor.execute(f"ANALYZE TABLE {table}")
                cursor.fetchall()

    def facts(self) -> dict[str, Any]:
        return {name: self._rows(f"SELECT @@{name}")[0][0] for name in FACTS}

    def _copy(self, template: str, database: str) -> None:
        self._rows(f"USE {database}")
        self._rows("SET foreign_key_checks = 0")
        for (table,) in self._rows(f"SHOW TABLES FROM {template}"):
            self._rows(self._rows(f"SHOW CREATE TABLE {template}.{table}")[0][1])
            self._rows(f"INSERT INTO {table} SELECT * FROM {template}.{table}")

    def _rows(self, statement: str) -> Any:
        with self._admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
