"""The queue itself, on every database: its processes, and whether they keep up.

These checks do index lookups only.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..models import Process, Queue, TaskState
from ..models.enums import State
from ..models.expressions import Now, now_plus
from ..models.job import JobQuerySet
from .database import QueueDatabase
from .finding import Finding, format_duration

# Seconds that a job may be ready: with workers that serve its queue, and with none.
LAG, UNSERVED = 600, 60
# Seconds from which the recovery of an orphaned job, or the deletion of a job, is late.
LATE = {"orphaned": 300, "pruned": 3600}
# Maximum number of queues to name.
MOST = 5


def processes(database: QueueDatabase) -> Iterator[Finding]:
    kinds = {process.kind for process in _alive(database)}
    if not kinds:
        yield Finding("No runqueue is alive.", "No job runs.", "python manage.py runqueue")
        return
    if Process.Kind.WORKER not in kinds:
        yield Finding(
            "No worker is alive.",
            "No job runs.",
            "python manage.py runqueue --only workers",
        )
    if Process.Kind.DISPATCHER not in kinds:
        yield Finding(
            "No dispatcher is alive.",
            "Scheduled jobs, retries and recurring tasks never start, and no jobs are recovered or "
            "pruned.",
            "python manage.py runqueue --only dispatcher",
        )


def lag(database: QueueDatabase) -> Iterator[Finding]:
    workers = [process for process in _alive(database) if process.kind == Process.Kind.WORKER]
    waits = _waits(database) if workers else {}
    for queue, seconds in sorted(waits.items(), key=lambda each: -each[1])[:MOST]:
        serving = [worker for worker in workers if worker.serves(queue)]
        if not serving and seconds > UNSERVED:
            yield Finding(
                f"A job of the queue {queue!r} has been ready for {format_duration(seconds)}, and "
                "no live worker serves the queue.",
                "It will never run.",
                f'python manage.py runqueue --only workers --queues "{queue}"',
            )
        elif serving and seconds > LAG:
            threads = sum(worker.details.get("threads", 0) for worker in serving)
            yield Finding(
                f"A job of the queue {queue!r} has been ready for {format_duration(seconds)}; "
                f"{len(serving)} workers with {threads} threads serve the queue.",
                "The workers do not keep up, or the job's limit is reached, or other jobs run "
                "first: the job's page in the admin shows the reason.",
                "More --processes or --threads, another host, or a higher limit.",
            )


def orphaned_jobs(database: QueueDatabase) -> Iterator[Finding]:
    late = (
        database.jobs.orphaned().filter(started_at__lt=now_plus(-LATE["orphaned"]))[:1001].count()
    )
    if late:
        yield Finding(
            f"{'More than 1,000' if late > 1000 else late} running jobs belong to dead processes "
            "and have not been recovered.",
            "They make no progress, and hold their slots and keys.",
            "python manage.py runqueue --only dispatcher  "
            "# If one is alive, its log shows the reason.",
        )


def retention(database: QueueDatabase) -> Iterator[Finding]:
    for backend in database.backends:
        own = {queue: backend.options_of(queue) for queue in backend.config.per_queue}
        kept = [(database.jobs.filter(queue=queue), options) for queue, options in own.items()]
        for rows, options in [(database.jobs.exclude(queue__in=list(own)), backend.config), *kept]:
            for state, name in (
                (State.SUCCESSFUL, "keep_successful"),
                (State.FAILED, "keep_failed"),
                (State.DISCARDED, "keep_failed"),
            ):
                yield from _kept_too_long(rows.filter(state=state), name, getattr(options, name))


def _kept_too_long(rows: JobQuerySet, name: str, seconds: float | None) -> Iterator[Finding]:
    first = rows.order_by("finished_at").values_list("queue", "finished_at", Now()).first()
    age = (first[2] - first[1]).total_seconds() if first else 0.0
    if first and seconds is not None and age > seconds + LATE["pruned"]:
        yield Finding(
            f"A job of the queue {first[0]!r} ended {format_duration(age)} ago, and {name} is "
            f"{format_duration(seconds)}.",
            "Dispatchers delete more slowly than jobs end, or none runs: the table keeps growing.",
            "python manage.py runqueue --only dispatcher  "
            "# Add one. Or keep less: delete_on_success.",
        )


def _alive(database: QueueDatabase) -> list[Process]:
    return list(Process.objects.using(database.alias).alive()[:1000])


def _waits(database: QueueDatabase) -> dict[str, float]:
    """Return the seconds that each queue's oldest job has been ready, without paused jobs."""
    paused = set(Queue.objects.using(database.alias).paused().values_list("name", flat=True))
    tasks = list(TaskState.objects.using(database.alias).paused().values_list("name", flat=True))
    lanes = [lane for lane in database.jobs.lanes() if lane.queue not in paused]
    found: dict[str, float] = {}
    jobs = database.jobs.exclude(task__in=tasks) if tasks else database.jobs
    for lane, seconds in jobs.waits(lanes).items():
        found[lane.queue] = max(seconds, found.get(lane.queue, 0.0))
    return found
