"""Insert new jobs. One call may insert very many, and most are never read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from django.db import OperationalError, connections

from ..core.serialization import Json
from ..core.transactions import is_conflict, on_commit_all, writing
from ..models import Job
from ..models.job import JobQuerySet
from .batches import join
from .fast_sql import create, insert
from .limits import block_surplus
from .statistics import insert_of_enqueued
from .unique import OF_A_NEW_JOB, TIMES, Effect, UniquePolicy, upsert

TRIES = 6
# The effects of calls with keys, by the ids of the calls' jobs.
Effects = dict[UUID, Effect]

_DIFFERING = ["id", "args", "kwargs"]
_COMMON = [name for name in OF_A_NEW_JOB if name not in _DIFFERING]
# The columns that are written for each job.
COLUMNS = [*_DIFFERING, *_COMMON]


class LazyJobs(Sequence[Job]):
    """Lazy sequence of new jobs that differ only in their ids and arguments.

    Each job is created on access, which saves 10 µs a job.
    """

    def __init__(
        self, common: Job, differing: Sequence[tuple[UUID, list[Json], dict[str, Json]]]
    ) -> None:
        self._common, self._differing = common, differing

    def __len__(self) -> int:
        return len(self._differing)

    def __getitem__(self, place: int) -> Job:  # type: ignore[override]
        """Return one job. Slices are not supported: no caller needs one."""
        pk, args, kwargs = self._differing[place]
        job = self._common.copy(pk)
        job.args, job.kwargs = args, kwargs
        job._state.adding, job._state.db = self._common._state.adding, self._common._state.db
        return job

    def rows_behind(self, first: Job) -> list[tuple[object, ...]]:
        """Return the rows of all jobs but the first, which is written and has the times of all."""
        _copy_times(self._common, first)
        common = itemgetter(*_COMMON)(self._common.__dict__)
        return [(*each, *common) for each in self._differing[1:]]


class BatchEntry(Protocol):
    """The ``with`` block of a batch in which jobs are enqueued."""

    id: UUID
    opens: bool
    waits_for_commit: bool
    has_failed: bool


class Insert(NamedTuple):
    """New jobs of one backend, to be written together with those of others.

    on_commit: whether they wait for the caller's commit, whatever transaction is open.
    keyed: the jobs with keys.
    written: called after the insert, with the effects of all calls.
    """

    database: str
    on_commit: bool
    new: Sequence[Job]
    keyed: Sequence[tuple[Job, UniquePolicy]]
    batch: BatchEntry | None
    written: Callable[[Mapping[UUID, Effect]], None]

    @property
    def waits(self) -> bool:
        return self.on_commit or not connections[self.database].in_atomic_block

    @property
    def is_discarded(self) -> bool:
        """Whether the block of the batch has failed, and discarded its jobs before the commit."""
        return bool(self.batch and self.batch.has_failed and self.batch.waits_for_commit)


def run_inserts(inserts: Sequence[Insert]) -> None:
    """Run inserts into an open transaction of their database at once, and the others on commit.

    If one of those that run together fails, none is committed.
    """
    waiting: list[Insert] = []
    at_once: list[Insert] = []
    for each in inserts:
        (waiting if each.waits else at_once).append(each)
    if at_once:
        _run_together(at_once)
    if waiting:
        on_commit_all(partial(_run_together, waiting))


def _run_together(inserts: Sequence[Insert]) -> None:
    inserts = [each for each in inserts if not each.is_discarded]
    effects = _write_all(inserts)
    for each in inserts:
        each.written(effects)


def _write_all(inserts: Sequence[Insert], tries: int = TRIES) -> Effects:
    """Write all jobs, or none. Repeat transactions that are not the caller's after a conflict.

    The order of the databases is fixed, as no server detects a deadlock of two calls that wait for
    each other in two databases.
    """
    groups: dict[str, list[Insert]] = {}
    for each in sorted(inserts, key=attrgetter("database")):
        groups.setdefault(each.database, []).append(each)
    effects: Effects = {}
    try:
        with ExitStack() as transactions:
            for database, group in groups.items():
                connection = connections[database]
                is_open = connection.in_atomic_block
                if is_open:
                    # Outside of a block of ours: the caller's transaction survives BatchFinished.
                    _join_batches(database, group)
                if len(groups) > 1 or any(each.keyed or each.batch for each in group):
                    is_own = not _is_in_transaction(database)
                    transactions.enter_context(writing(database, savepoint=False))
                    if is_own:
                        _read_committed(connection)
                if not is_open:
                    _join_batches(database, group)
                effects |= _write_group(database, group)
    except OperationalError as error:
        if tries == 1 or not is_conflict(error) or any(map(_is_in_transaction, groups)):
            raise
    else:
        return effects
    return _write_all(inserts, tries - 1)


def _is_in_transaction(database: str) -> bool:
    """Return True if the caller has a transaction open, or may have one without autocommit."""
    connection = connections[database]
    return connection.in_atomic_block or not connection.get_autocommit()


def _read_committed(connection: Any) -> None:
    """Set the isolation level of this transaction to READ COMMITTED.

    Each statement then sees all earlier commits. A stricter transaction of PostgreSQL refuses to
    lock a row that was changed since it began.
    """
    if connection.vendor == "postgresql" and connection.isolation_level > 2:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def _join_batches(database: str, group: Sequence[Insert]) -> None:
    for pk, opens in {each.batch.id: each.batch.opens for each in group if each.batch}.items():
        join(database, pk, opens=opens)


def _write_group(database: str, group: Sequence[Insert]) -> Effects:
    first, *others = group
    new, keyed = first.new, first.keyed
    if others:
        new = [job for each in group for job in each.new]
        # In the order of the calls.
        keyed = sorted((call for each in group for call in each.keyed), key=lambda it: it[0].pk)
    effects = upsert(database, keyed) if keyed else {}
    if new:
        write(database, new)
    return effects


def write(database: str, jobs: Sequence[Job]) -> None:
    """Insert new jobs without keys, all or none.

    The database may set their times. Jobs for the same times have them from the first of these.
    """
    limited = [] if isinstance(jobs, LazyJobs) else [job for job in jobs if job.limits]
    if limited:
        block_surplus(database, limited)
    is_one, is_lazy = len(jobs) == 1, isinstance(jobs, LazyJobs)
    # Before the first job gets its times.
    groups = [] if is_one or is_lazy else _by_times(jobs)
    first = jobs[0]
    counted = insert_of_enqueued(database, _numbers(jobs))
    is_one_statement = is_one and connections[database].vendor == "postgresql"
    with nullcontext() if is_one_statement else writing(database, savepoint=False):
        create(database, first, TIMES, ahead=counted)
        if is_one:
            return
        rows = Job.objects.using(database)
        if isinstance(jobs, LazyJobs):
            insert(rows, COLUMNS, jobs.rows_behind(first))
        else:
            _create_firsts(rows, [group[0] for group in groups[1:]])
            insert(rows, COLUMNS, [row for group in groups for row in _rows_behind(*group)])


def _numbers(jobs: Sequence[Job]) -> dict[tuple[str, str], int]:
    """Return the number of jobs by queue and task."""
    if isinstance(jobs, LazyJobs) or len(jobs) == 1:
        return {(jobs[0].queue, jobs[0].task): len(jobs)}
    return Counter((job.queue, job.task) for job in jobs)


def _by_times(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs in groups with the same times, as expressions or as times."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    known: dict[tuple[int, int], list[Job]] = {}
    for job in jobs:
        # Most jobs share the objects: the hash of an expression takes 20 µs.
        same = id(job.run_after), id(job.expires_at)
        if same not in known:
            known[same] = groups.setdefault((job.run_after, job.expires_at), [])
        known[same].append(job)
    return list(groups.values())


def _create_firsts(rows: JobQuerySet, firsts: list[Job]) -> None:
    """Insert the first job of each group, and read back its times."""
    if firsts:
        rows.bulk_create(firsts)
        written = rows.only(*TIMES).in_bulk([job.pk for job in firsts])
        for job in firsts:
            _copy_times(job, written[job.pk])


def _rows_behind(first: Job, *others: Job) -> list[tuple[object, ...]]:
    """Return the rows of the other jobs of a group, whose first job is written."""
    for job in others:
        _copy_times(job, first)
    return [itemgetter(*COLUMNS)(job.__dict__) for job in others]


def _copy_times(job: Job, first: Job) -> None:
    """Copy the times of the first job, with which this job is written."""
    job.__dict__.update({name: first.__dict__[name] for name in TIMES})
    job._state.adding, job._state.db = False, first._state.db
