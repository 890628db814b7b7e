"""Calls of tasks in a test's transaction, which stays usable if a task fails in the database."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from ..runtime.worker.task_call import CoroutineCall, ThreadCall

R = TypeVar("R")

# PostgreSQL's PQTRANS_INERROR.
IN_ERROR = 3

_Held = list[tuple[Any, Any]]


class ThreadCallInTest(ThreadCall):
    """A call on a thread, after a savepoint of the test's transaction."""

    def run(self, function: Callable[[], R]) -> R:
        held = _take()
        try:
            return super().run(function)
        finally:
            _leave(held)


class CoroutineCallInTest(CoroutineCall):
    """A call on an event loop, after a savepoint of the test's transaction."""

    async def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        held = await sync_to_async(_take)()
        try:
            return await super().run(function)
        finally:
            await sync_to_async(_leave)(held)


def _take() -> _Held:
    """Set a savepoint on each connection that is in the transaction of a ``TestCase`` alone."""
    opened: Sequence[Any] = connections.all(initialized_only=True)
    return [
        (connection, connection.savepoint())
        for connection in opened
        if (blocks := connection.atomic_blocks) and all(each._from_testcase for each in blocks)
    ]


def _leave(held: _Held) -> None:
    """Roll back to the savepoints of transactions that are broken, and release the others."""
    for connection, savepoint in held:
        if connection.connection is None or connection.closed_in_transaction:
            continue
        if connection.needs_rollback or _is_in_error(connection):
            connection.needs_rollback = False
            connection.savepoint_rollback(savepoint)
        connection.savepoint_commit(savepoint)


def _is_in_error(connection: Any) -> bool:
    return bool(
        connection.vendor == "postgresql"
        and connection.connection.info.transaction_status == IN_ERROR
    )
