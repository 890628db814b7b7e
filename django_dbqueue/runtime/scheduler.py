"""Scheduler: the step of the dispatcher that enqueues recurring tasks."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import InterfaceError, OperationalError

from ..backend import DatabaseBackend
from ..core.internal_errors import report
from ..core.safe_log import logger
from ..core.transactions import is_conflict
from ..engine.recurring import (
    delete_undeclared,
    enqueue_due,
    replan_ahead,
    save_problem,
    synchronise,
)
from ..engine.retention import prune_recurring_executions
from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import RecurringTask
from ..recurrence.declare import declared
from ..recurrence.target import enqueue, resolve
from .connections import answers, discard_lost


class Scheduler:
    """A scheduler. Any number may run concurrently.

    One scheduler holds a row at a time, and each time of a row has one execution.
    """

    # Seconds between two scans while tasks wait that are not its own or cannot be enqueued here.
    SCAN = 2.0
    # Seconds for which a row that cannot be enqueued here is left to other dispatchers.
    ASIDE = 10.0
    # Seconds after which a late task that is unknown here is marked as a problem, if no dispatcher
    # has enqueued it.
    LATE = 60.0
    # Seconds between two declarations that this code still exists; see synchronise().
    DECLARE = 30.0
    # Seconds for which tasks that the code no longer declares are kept, and between scans for them.
    KEEP, FORGET = 86_400.0, 3600.0
    # Retention of executions, in seconds: far longer than a dispatcher can be late.
    KEEP_EXECUTIONS = 7 * 86_400.0
    BATCH = 100

    def __init__(self, backend: DatabaseBackend) -> None:
        self._backend, self._tasks = backend, RecurringTask.objects.using(backend.database)
        self._definitions: list[str] = []
        # Rows that are left to other dispatchers, and until when; the last message about each task.
        self._aside: dict[int, float] = {}
        self._said: dict[str, str] = {}
        self._is_new = True
        self._scan_at = self._known_at = self._declare_at = 0.0
        self._forget_at = time.monotonic() + self.FORGET

    def turn(self, waiting: bool) -> float:
        """Enqueue due tasks. Returns the seconds until the next known time.

        Scans the database only at that time, or if tasks were seen ``waiting``. Raises
        DatabaseError for transient errors, such as a lost connection.
        """
        now = time.monotonic()
        if now >= self._declare_at:
            self.declare()
            self._declare_at = now + self.DECLARE
        if now >= self._forget_at:
            delete_undeclared(self._backend.database, self.KEEP)
            self._forget_at = now + self.FORGET
        if now >= self._known_at or (waiting and now >= self._scan_at):
            self._scan_at = now + self.SCAN
            self._known_at = now + self._enqueue_due(now)
        return max(0.0, self._known_at - time.monotonic())

    def replan(self) -> None:
        """Replan tasks whose next time is later than possible, and scan for due ones next turn."""
        replan_ahead(self._backend.database)
        self._known_at = 0.0

    def prune(self, limit: int) -> int:
        """Delete old executions. Returns the number; more may remain if it equals the limit."""
        return prune_recurring_executions(self._backend.database, self.KEEP_EXECUTIONS, limit)

    def _enqueue_due(self, now: float) -> float:
        self._aside = {pk: until for pk, until in self._aside.items() if until > now}
        rows = list(
            self._tasks.of(self._definitions).upcoming().exclude(pk__in=self._aside)[: self.BATCH]
        )
        waits = [wait for row in rows if (wait := _wait(row)) > 0]
        done = [self._enqueue(row, now) for row in rows if _wait(row) <= 0]
        return 0.0 if any(done) else min(waits, default=float("inf"))

    def _enqueue(self, row: RecurringTask, now: float) -> bool:
        """Enqueue one task. Its errors do not affect the other tasks.

        Raises DatabaseError for conflicts, and while the queue's own database is unavailable.
        """
        try:
            times = enqueue_due(self._tasks.of(self._definitions), row, self._write)
        except Exception as error:
            if isinstance(error, OperationalError | InterfaceError):
                # A key function or a receiver may query any database.
                discard_lost()
                if is_conflict(error) or not answers(self._backend.database):
                    raise
            self._aside[row.pk] = now + self.ASIDE
            self._report(row, error)
            return False
        self._said.pop(row.name, None)
        if times == [] and row.next_run_at:
            logger.warning(
                "scheduler: %s was due at %s; this run is too late and is skipped.",
                row,
                row.next_run_at,
            )
        elif times == [] and not row.is_from_code:
            self._check(row)
        return times is not None

    def _write(self, row: RecurringTask, wait: timedelta) -> UUID:
        return enqueue(row, wait, self._backend.alias)

    def _check(self, row: RecurringTask) -> None:
        """Store now what would be wrong at the next time: it may be a month away."""
        try:
            resolve(row, self._backend.database, self._backend.alias)
        except (InvalidSchedule, InvalidTaskPath) as error:
            save_problem(self._backend.database, row, str(error))

    def declare(self) -> None:
        """Write rows for the tasks that this code declares for this backend, and renew them."""
        mine = {}
        for one in (*declared().values(), *self._backend.recurring):
            try:
                if one.resolved().backend == self._backend.alias:
                    mine[one.name] = one.values()
            except InvalidSchedule as error:
                said = f"scheduler: {error} It does not run."
                self._say(logging.ERROR, f"declared {one.name}", said)
        for name in synchronise(self._backend.database, mine, takes_over=self._is_new):
            self._say(
                logging.ERROR,
                f"declared {name}",
                f"scheduler: {name!r} is declared in the code and also made in the admin or "
                "by SQL: rename one of them.",
            )
        self._definitions = [str(values["definition"]) for values in mine.values()]
        self._is_new = False

    def _report(self, row: RecurringTask, error: Exception) -> None:
        is_unknown = isinstance(error, InvalidTaskPath)
        known = isinstance(error, InvalidSchedule) or is_unknown
        problem = str(error) if known else f"{type(error).__name__}: {error}"
        if is_unknown:
            self._say(
                logging.WARNING,
                row.name,
                f"scheduler: recurring task {row} is left to other dispatchers: {problem}",
            )
        else:
            self._say(
                logging.ERROR,
                row.name,
                f"scheduler: recurring task {row} could not be enqueued: {problem}",
                None if known else error,
            )
        if not is_unknown or _wait(row) < -self.LATE:
            save_problem(self._backend.database, row, problem)

    def _say(self, level: int, about: str, text: str, error: Exception | None = None) -> None:
        """Log a message once, until the problem is over or the message changes."""
        if self._said.get(about) != text:
            self._said[about] = text
            if error:
                report(error, text, level=level)
            else:
                logger.log(level, text)


def _wait(row: Any) -> float:
    """Return the seconds until the row is due, by the database's time.

    Negative if it is late, 0 if it is not planned yet.
    """
    return (row.next_run_at - row.seen_at).total_seconds() if row.next_run_at else 0.0
