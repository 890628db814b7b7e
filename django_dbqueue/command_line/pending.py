"""Check before a deployment that this code can run the jobs that wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..backend import DatabaseBackend
from ..compat import InvalidTask
from ..core import call_options, serialization
from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import Batch, Job, RecurringTask
from ..models.enums import UNFINISHED
from ..recurrence import target
from ..registry import load
from .output import Row


def unfit(backend: DatabaseBackend) -> list[Row]:
    """Return the tasks of unfinished jobs that this code cannot run, with the reason.

    Jobs with the same arguments by number and names are checked once.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    known: dict[object, str] = {}
    columns = ("pk", "task", "args", "kwargs", "options", "pipeline", "stage")
    jobs = Job.objects.using(backend.database).filter(state__in=UNFINISHED).only(*columns)
    for job in jobs.order_by().iterator(chunk_size=2000):
        shape = job.task, _shape(job.args), tuple(sorted(job.kwargs or ())), str(job.options)
        if shape not in known:
            known[shape] = _problem(job)
        if problem := known[shape] or _problem_of_stages(job):
            found.setdefault((job.task, problem), []).append(job.pk)
    return [
        {"task": task, "jobs": len(ids), "problem": problem, "for_example": str(ids[0])}
        for (task, problem), ids in sorted(found.items())
    ] + [*_callbacks(backend), *_recurring(backend)]


def _shape(args: Any) -> object:
    return len(args) if isinstance(args, list) else str(args)


def _problem(job: Job) -> str:
    try:
        task = load(job.task)
        if job.options is not None:
            task = call_options.apply(task, job.options)
        serialization.bind(task.func, task.takes_context, job.args, job.kwargs)
    except (InvalidTaskPath, InvalidTask, TypeError, ValueError) as error:
        return str(error)
    return ""


def _problem_of_stages(job: Job) -> str:
    for stage in (job.pipeline or ())[(job.stage or 0) + 1 :]:
        try:
            task = load(stage["task"])
            serialization.bind(task.func, task.takes_context, [None], {})
        except (InvalidTaskPath, TypeError) as error:
            return f"A later stage: {error}"
    return ""


def _callbacks(backend: DatabaseBackend) -> Iterator[Row]:
    batches = Batch.objects.using(backend.database).filter(finished_at=None).order_by("pk")
    known: dict[tuple[object, ...], str] = {}
    for batch in batches.only("on_finish", "on_success").iterator(chunk_size=2000):
        for job in batch.callbacks(successful=True):
            shape = job.task, _shape(job.args), str(job.options)
            if shape not in known and (problem := known.setdefault(shape, _problem(job))):
                said = f"It follows a batch: {problem}"
                yield {
                    "task": job.task,
                    "jobs": None,
                    "problem": said,
                    "for_example": str(batch.pk),
                }


def _recurring(backend: DatabaseBackend) -> Iterator[Row]:
    # Rows from code follow the code: dispatchers update them, and delete those that are gone.
    rows = RecurringTask.objects.using(backend.database).enabled().filter(is_from_code=False)
    for row in rows.order_by("name"):
        try:
            target.resolve(row, backend.database, backend.alias)
        except (InvalidTaskPath, InvalidSchedule) as error:
            name = row.task or row.command
            yield {"task": name, "jobs": None, "problem": str(error), "for_example": row.name}
