"""Insert new jobs. One call may insert very many, and most are never read again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from operator import itemgetter
from uuid import UUID

from ..core.serialization import Json
from ..core.transactions import writing
from ..models import Job
from .fast_sql import create, insert
from .limits import block_surplus
from .unique import OF_A_NEW_JOB, TIMES

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


def write(database: str, jobs: Sequence[Job]) -> None:
    """Insert new jobs without keys, all or none.

    They have the times of the first job, which the database may set.
    """
    limited = [] if isinstance(jobs, LazyJobs) else [job for job in jobs if job.limits]
    if limited:
        block_surplus(database, limited)
    first, rows = jobs[0], Job.objects.using(database)
    with writing(database, savepoint=False) if len(jobs) > 1 else nullcontext():
        create(rows, first, TIMES)
        if len(jobs) > 1:
            insert(rows, COLUMNS, _rows_behind(first, jobs))


def _rows_behind(first: Job, jobs: Sequence[Job]) -> list[tuple[object, ...]]:
    """Return the rows of all jobs but the first, for any sequence of jobs."""
    if isinstance(jobs, LazyJobs):
        return jobs.rows_behind(first)
    for job in jobs[1:]:
        _copy_times(job, first)
    columns = itemgetter(*COLUMNS)
    return [columns(job.__dict__) for job in jobs[1:]]


def _copy_times(job: Job, first: Job) -> None:
    """Copy the times of the first job, with which this job is written."""
    job.__dict__.update({name: first.__dict__[name] for name in TIMES})
    job._state.adding, job._state.db = False, first._state.db
