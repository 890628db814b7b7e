"""Advance jobs of pipelines to their next stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from django.db import models

from .expressions import Now
from .states import State

if TYPE_CHECKING:
    from .job import Job

# Columns of the stage, equal for all jobs that enter it; each job has its own arguments.
_OF_A_STAGE = ["stage", "task", "queue", "priority", "max_attempts", "on_lost", "timeout"]
_OF_EACH = ["args", "kwargs", "limits"]


def walk(jobs: models.QuerySet[Job], moves: Iterable[tuple[Any, Job]]) -> None:
    """Advance running jobs. Each move is a job's id, and the job as it is at its next stage."""
    alike = defaultdict(list)
    for pk, there in moves:
        alike[tuple(getattr(there, name) for name in _OF_A_STAGE)].append((pk, there))
    for values, group in alike.items():
        jobs.filter(pk__in=[pk for pk, _there in group]).update(
            **dict(zip(_OF_A_STAGE, values, strict=True)),
            state=State.READY,
            process=None,
            run_after=Now(),
            failures=0,
            finished_at=None,
        )
        jobs.bulk_update([_own(jobs.model, pk, there) for pk, there in group], _OF_EACH)


def _own(model: Any, pk: Any, there: Job) -> Any:
    return model(pk=pk, **{name: getattr(there, name) for name in _OF_EACH})
