"""No queue, the limit of PostgreSQL with Python: a loop claims 100 rows, calls, and settles."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from inspect import iscoroutinefunction
from typing import Any

import psycopg

from . import System, Unsupported, fork

TABLES = """
CREATE TABLE job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, task text, args jsonb,
    state text DEFAULT 'ready', finished_at timestamptz);
CREATE INDEX job_ready ON job (id) WHERE state = 'ready';
"""
CLAIM = """
UPDATE job SET state = 'running' WHERE id = ANY(ARRAY(
    SELECT id FROM job WHERE state = 'ready' ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED))
RETURNING id, task, args
"""
SETTLE = "UPDATE job SET state = 'successful', finished_at = now() WHERE id = ANY(%s)"
INSERT = "INSERT INTO job (task, args) VALUES (%s, %s)"


class Adapter(System):
    ended = "SELECT count(*) FROM job WHERE state = 'successful'"

    def __init__(self) -> None:
        self._connection: Any = None

    def task(self, function: Callable[..., Any]) -> Any:
        if iscoroutinefunction(function):
            raise Unsupported("This loop runs no coroutines.")
        return function

    def prepare(self) -> None:
        super().prepare()
        self._connected().execute(TABLES)

    def enqueue(self, task: Any, *args: Any) -> None:
        self._connected().execute(INSERT, [task.__name__, json.dumps(args)])

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        with (
            self._connected().cursor() as cursor,
            cursor.copy("COPY job (task, args) FROM STDIN") as copy,
        ):
            for call in calls:
                copy.write_row((task.__name__, json.dumps(call)))

    def work(self, processes: int, threads: int) -> None:
        from ..project import tasks

        fork(processes)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        connection = self._connected()
        while True:
            rows = connection.execute(CLAIM).fetchall()
            for _, task, args in rows:
                getattr(tasks, task)(*args)
            if rows:
                connection.execute(SETTLE, [[row[0] for row in rows]])
            else:
                time.sleep(0.01)

    def _connected(self) -> Any:
        self._connection = self._connection or psycopg.connect(
            os.environ["DATABASE_URL"], autocommit=True
        )
        return self._connection
