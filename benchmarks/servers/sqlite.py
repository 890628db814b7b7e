"""SQLite: files in a folder that is removed afterwards."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import Server


@contextmanager
def server(settings: Sequence[str]) -> Iterator[Server]:
    if settings:
        raise SystemExit(
            "SQLite takes no settings: it runs with those of the documentation. Leave --set out."
        )
    with tempfile.TemporaryDirectory(prefix="dbqueue-bench-") as folder:
        yield SQLite(Path(folder))


class SQLite(Server):
    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _make(self, database: str, template: str) -> str:
        if template:
            shutil.copy(self._file(template), self._file(database))
        return f"sqlite:///{self._file(database)}"

    def _drop(self, database: str) -> None:
        for file in self._folder.glob(f"{database}.sqlite3*"):
            file.unlink()

    def connect(self, database: str) -> Any:
        return sqlite3.connect(self._file(database), isolation_level=None, timeout=20)

    def settle(self, connection: Any) -> None:
        connection.execute("ANALYZE")

    def facts(self) -> dict[str, Any]:
        return {"version": sqlite3.sqlite_version}

    def _file(self, database: str) -> Path:
        return self._folder / f"{database}.sqlite3"
