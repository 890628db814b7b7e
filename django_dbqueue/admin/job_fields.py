"""Fields that a job's page shows beside its data."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils.translation import gettext_lazy as _

from ..models import Job
from . import columns

TIMES = (
    columns.time("enqueued_at", _("enqueued")),
    columns.time("run_after", _("run after")),
    columns.time("expires_at", _("expires")),
    columns.time("started_at", _("last started")),
    columns.time("finished_at", _("finished")),
)


def fields_of(job: Job, with_batch: bool) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of fields, without fields that the job does not have."""
    belongs = [columns.linked_batch] if with_batch and job.batch else []
    keyed = [columns.key, *["version"] * (job.version is not None)] if job.key else []
    # Without an explicit run_after, a job may run as soon as it is enqueued.
    at_once = abs(job.run_after - job.enqueued_at) <= timedelta(seconds=1)
    times = [
        each
        for each in TIMES
        if getattr(job, each.__name__) and not (at_once and each.__name__ == "run_after")
    ]
    rows = (
        [columns.state, columns.attempts, *[columns.owner] * (job.process_id is not None)],
        [columns.linked_task, columns.linked_queue, "priority"],
        [*belongs, *keyed],
        times[:3],
        times[3:],
        [
            *["max_attempts"] * (job.max_attempts > 0),
            *[columns.timeout] * (job.timeout is not None),
            "on_lost",
        ],
    )
    return tuple(tuple(row) for row in rows if row)
