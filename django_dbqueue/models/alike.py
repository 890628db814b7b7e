"""New jobs of one call: many are made, and most are never looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .keyed import OF_A_NEW_JOB, TIMES

if TYPE_CHECKING:
    from .job import Job

_DIFFERING = ["id", "args", "kwargs"]
_COMMON = [name for name in OF_A_NEW_JOB if name not in _DIFFERING]
# What is written of each.
COLUMNS = [*_DIFFERING, *_COMMON]


class LazyJobs(Sequence["Job"]):
    """New jobs that have all in common but their ids and arguments. Each is made when somebody looks at it: 10 µs less."""

    def __init__(self, common: Job, differing: Sequence[tuple[UUID, list[Any], dict[str, Any]]]) -> None:
        self._common, self._differing = common, differing

    def __len__(self) -> int:
        return len(self._differing)

    def __getitem__(self, place: Any) -> Any:
        """One of them: nobody needs a slice."""
        pk, args, kwargs = self._differing[place]
        job = self._common.copy(pk)
        job.args, job.kwargs = args, kwargs
        job._state.adding, job._state.db = self._common._state.adding, self._common._state.db
        return job

    def rows_behind(self, first: Job) -> list[tuple[Any, ...]]:
        """What is to be written of all but the first, which was written, and has the times of all."""
        _learn(self._common, first)
        common = itemgetter(*_COMMON)(self._common.__dict__)
        return [(*each, *common) for each in self._differing[1:]]


def rows_behind(first: Job, jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
    """The same of any jobs."""
    if isinstance(jobs, LazyJobs):
        return jobs.rows_behind(first)
    for job in jobs[1:]:
        _learn(job, first)
    columns = itemgetter(*COLUMNS)
    return [columns(job.__dict__) for job in jobs[1:]]


def _learn(job: Job, first: Job) -> None:
    """It is written with the times of the first."""
    job.__dict__.update({name: first.__dict__[name] for name in TIMES})
    job._state.adding, job._state.db = False, first._state.db
