"""Move the waiting jobs and the schedules of another queue into this one."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, transaction
from django.db.models import prefetch_related_objects
from django.utils import timezone

from ..backend import DatabaseBackend
from ..core import serialization
from ..core.transactions import repeated, writing
from ..exceptions import InvalidSchedule
from ..models import RecurringTask
from ..models.locking import lock_first
from ..recurrence.target import resolve
from ..registry import tasks_in
from .output import Row
from .sources.source import Schedule, Source, Unfit, Waiting

T = TypeVar("T")

# Rows of the other queue that are moved in one transaction, and the most that stay before the move
# ends: they are read again with each part.
PART, MOST_UNFIT = 200, 5000
LOWEST, HIGHEST = -100, 100
# Kind of a schedule that only the other queue needs: it stays there, and is no error.
BUILT_IN = "built-in"


class Mover:
    """Moves from a source into a backend. ``renamed`` are paths of tasks: theirs, and ours.

    dry: only count what would be moved. Tasks, queues and arguments are checked.
    """

    def __init__(
        self, source: Source, backend: DatabaseBackend, renamed: Mapping[str, str], *, dry: bool
    ) -> None:
        self._source, self._backend, self._renamed, self._dry = source, backend, renamed, dry
        self._tasks = tasks_in(backend.config.task_modules)
        # By task and problem, which is "" for what was moved, or could be.
        self._jobs: Counter[tuple[str, str]] = Counter()
        self._schedules: list[Row] = []
        # Names of the schedules that a dry run would have moved.
        self._names: set[str] = set()

    def move(self) -> list[Row]:
        """Move all that can be moved. Return what was moved, and what stays with the reason."""
        databases = self._source.databases()
        if not self._dry:
            self._source.prepare()
        for database in databases:
            for rows in self._source.parts():
                self._move_jobs(rows.using(database).order_by(*self._source.order))
            for rows in self._source.schedules():
                self._move_schedules(rows.using(database).order_by("pk"))
        jobs = [
            {"kind": "job", "task": task, "number": number, "problem": problem}
            for (task, problem), number in sorted(self._jobs.items())
        ]
        return [*jobs, *self._schedules]

    def _move_jobs(self, rows: Any) -> None:
        if self._dry:
            for row in rows.iterator(chunk_size=PART):
                task, problem = self._tried(row, self._read_and_check)
                self._jobs[task, problem] += 1
            return
        unfit: list[Any] = []
        while self._move_part(rows, unfit):
            if len(unfit) > MOST_UNFIT:
                raise Unfit(
                    f"More than {MOST_UNFIT:,} jobs cannot be moved. Correct the reasons, which "
                    "--dry-run lists, and repeat."
                )

    def _move_part(self, rows: Any, unfit: list[Any]) -> bool:
        """Move the first rows that are not unfit. Return whether more may be left."""

        def move() -> list[tuple[Any, str, str]]:
            found = lock_first(rows.exclude(pk__in=unfit), PART)
            prefetch_related_objects(found, *self._source.related)
            results = [(row, *self._tried(row, self._read_and_enqueue)) for row in found]
            if moved := [row for row, _task, problem in results if not problem]:
                self._source.remove(moved)
            return results

        results = self._in_transactions(rows.db, move)
        for row, task, problem in results:
            self._jobs[task, problem] += 1
            if problem:
                unfit.append(row.pk)
        return len(results) == PART

    def _in_transactions(self, database: str, act: Callable[[], T]) -> T:
        """Call ``act`` in a transaction of each database; repeat it after a conflict."""

        def act_in_transactions() -> T:
            with self._transactions(database):
                return act()

        return repeated(database, act_in_transactions)

    def _transactions(self, database: str) -> ExitStack:
        """Begin a transaction of each database: the other queue's is committed last.

        After a failure between the two, a repetition finds the jobs that were moved before by
        their keys, and the schedules by ``RecurringTask.definition``.
        """
        stack = ExitStack()
        stack.enter_context(writing(database))
        if database != self._backend.database:
            stack.enter_context(transaction.atomic(using=self._backend.database))
        return stack

    def _tried(self, row: Any, act: Callable[[Waiting, Any], object]) -> tuple[str, str]:
        """Return the task of a row, and why the row stays where it is; "" if it does not."""
        read: list[Waiting] = []
        problem = _problem_of(lambda: read.append(self._source.read(row)))
        task = read[0].task if read else "?"
        return task, problem or _problem_of(lambda: act(read[0], row))

    def _read_and_check(self, job: Waiting, row: Any) -> None:
        task = self._call(job, row)
        self._backend.validate_task(task)
        serialization.bind(task.func, task.takes_context, job.args, job.kwargs)

    def _read_and_enqueue(self, job: Waiting, row: Any) -> None:
        # What raises after the job is written must not leave it there, as the row stays too.
        with transaction.atomic(using=self._backend.database):
            task = self._call(job, row)
            # Task.enqueue() cannot pass on a keyword argument named self.
            task.get_backend().enqueue(task, job.args, job.kwargs)

    def _call(self, job: Waiting, row: Any) -> Any:
        task, identity = self._task(job.task), self._source.identity(row)
        if not isinstance(job.args, list | tuple) or not isinstance(job.kwargs, Mapping):
            raise Unfit(
                f"Its arguments must be a list and a dict, not {job.args!r} and {job.kwargs!r}. "
                "Correct them there."
            )
        options: dict[str, Any] = {
            "queue_name": job.queue,
            "priority": job.priority and max(LOWEST, min(HIGHEST, job.priority)),
            "run_after": _if_later(job.run_after),
            "backend": self._backend.alias,
            "metadata": {**job.metadata, "imported_from": identity},
            # A job that waited for the commit would be in neither queue for a moment.
            "enqueue": "in_transaction",
            **job.options,
        }
        if row._state.db != self._backend.database and not (task.key or "key" in options):
            options |= {"key": identity, "on_conflict": "once", "delete_on_success": False}
        return task.using(**options)

    def _task(self, path: str) -> Any:
        wanted = self._renamed.get(path, path)
        if wanted in self._tasks:
            return self._tasks[wanted]
        near = difflib.get_close_matches(wanted, self._tasks, n=1)
        hint = f"--rename {path}={near[0]}?" if near else f"Decorate it, or --rename {path}=NEW."
        raise Unfit(f"{wanted} is no task with @task. {hint}")

    def _move_schedules(self, rows: Any) -> None:
        for row in list(rows):
            kind = BUILT_IN if self._source.is_built_in(row) else "schedule"
            if self._dry:
                results = [self._tried_schedule(row)]
            else:
                move = partial(self._move_schedule, rows.filter(pk=row.pk))
                results = self._in_transactions(rows.db, move)
            self._schedules += [
                {"kind": kind, "task": name, "number": 1, "problem": problem}
                for name, problem in results
            ]

    def _move_schedule(self, rows: Any) -> list[tuple[str, str]]:
        results = []
        for row in lock_first(rows, 1):
            name, problem = self._tried_schedule(row)
            if not problem:
                self._source.remove_schedule(row)
            results.append((name, problem))
        return results

    def _tried_schedule(self, row: Any) -> tuple[str, str]:
        """Return the name of a schedule, and why it stays where it is; "" if it does not."""
        read: list[Schedule] = []
        problem = _problem_of(lambda: read.append(self._source.read_schedule(row)))
        name = read[0].name if read else str(row)
        return name, problem or _problem_of(lambda: self._save(read[0], row))

    def _save(self, schedule: Schedule, of: Any) -> None:
        """Write a recurring task, unless it was moved before. Raises Unfit."""
        row = RecurringTask(
            name=schedule.name,
            task=self._task(schedule.task).module_path,
            args=schedule.args,
            kwargs=schedule.kwargs,
            queue=schedule.queue or "",
            priority=schedule.priority,
            is_enabled=schedule.is_enabled,
            definition=f"{of._state.db} {self._source.name} {of.pk}",
            **schedule.when,
        )
        database = self._backend.database
        found = RecurringTask.objects.using(database).filter(name=row.name).first()
        if found and found.definition == row.definition:
            return
        if found or row.name in self._names:
            raise Unfit(f"There is a recurring task {row.name!r} already. Rename one of them.")
        row.recurrence  # noqa: B018
        resolve(row, database, self._backend.alias)
        row.clean_fields()
        if self._dry:
            self._names.add(row.name)
            return
        with transaction.atomic(using=database):
            row.save(using=database)


def _problem_of(act: Callable[[], object]) -> str:
    """Call ``act``. Return what is wrong with its row; "" if nothing is.

    One row, or code of the project around its call, must not hold up the others.
    """
    try:
        act()
    except (Unfit, InvalidSchedule) as error:
        return str(error)
    except (InterfaceError, OperationalError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _if_later(at: datetime | None) -> datetime | None:
    now = timezone.now() if settings.USE_TZ else datetime.now()
    return at if at and at > now else None
