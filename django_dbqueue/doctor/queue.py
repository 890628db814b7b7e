"""The queue itself, on every database: its processes, and whether they keep up.

These checks do index lookups only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..models import Process, Queue, TaskState
from ..models.enums import State
from ..models.expressions import Now, after
from .database import QueueDatabase
from .finding import Finding, lasting

# Seconds that a job may be ready: with workers that serve its queue, and with none.
LAG, UNSERVED = 600, 60
# Seconds from which the recovery of an orphaned job, or the deletion of a job, is late.
LATE = {"orphaned": 300, "pruned": 3600}
# Maximum number of queues to name.
MOST = 5


def processes(database: QueueDatabase) -> Iterator[Finding]:
    kinds = {process.kind for process in _alive(database)}
    if not kinds:
        yield Finding(
            "No runqueue is alive.", "Nothing runs: jobs only gather.", "python manage.py runqueue"
        )
        return
    if Process.Kind.WORKER not in kinds:
        yield Finding(
            "No worker is alive.",
            "Nothing runs: jobs only gather.",
            "python manage.py runqueue --only workers",
        )
    if Process.Kind.DISPATCHER not in kinds:
        yield Finding(
            "No dispatcher is alive.",
            "What is scheduled, retries and recurring tasks among it, never starts, and nobody recovers or prunes jobs.",
            "python manage.py runqueue --only dispatcher",
        )


def lag(database: QueueDatabase) -> Iterator[Finding]:
    workers = [process for process in _alive(database) if process.kind == Process.Kind.WORKER]
    waits = _waits(database) if workers else {}
    for queue, seconds in sorted(waits.items(), key=lambda each: -each[1])[:MOST]:
        serving = [worker for worker in workers if worker.serves(queue)]
        if not serving and seconds > UNSERVED:
            yield Finding(
                f"A job of the queue {queue!r} has been ready for {lasting(seconds)}, and no worker that is alive serves it.",
                "It will never run.",
                f'python manage.py runqueue --only workers --queues "{queue}"',
            )
        elif serving and seconds > LAG:
            threads = sum(worker.details.get("threads", 0) for worker in serving)
            yield Finding(
                f"A job of the queue {queue!r} has been ready for {lasting(seconds)}; {len(serving)} workers with {threads} "
                "threads serve it.",
                "They do not keep up, or its limit is reached, or others go before it: its page in the admin says which.",
                "More --processes or --threads, another host, or a higher limit.",
            )


def orphaned_jobs(database: QueueDatabase) -> Iterator[Finding]:
    late = database.jobs.orphaned().filter(started_at__lt=after(-LATE["orphaned"]))[:1001].count()
    if late:
        yield Finding(
            f"{'More than 1,000' if late > 1000 else late} jobs run for processes that are gone, and nobody has recovered them.",
            "They neither run nor end, and hold their slots and keys.",
            "python manage.py runqueue --only dispatcher  # If one is alive, its log says what holds it up.",
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


def _kept_too_long(rows: Any, name: str, seconds: float | None) -> Iterator[Finding]:
    first = rows.order_by("finished_at").values_list("queue", "finished_at", Now()).first()
    age = (first[2] - first[1]).total_seconds() if first else 0.0
    if seconds is not None and age > seconds + LATE["pruned"]:
        yield Finding(
            f"A job of the queue {first[0]!r} ended {lasting(age)} ago, and {name} is {lasting(seconds)}.",
            "Dispatchers delete more slowly than jobs end, or none runs: the table grows without end.",
            "python manage.py runqueue --only dispatcher  # One more of them. Or keep less: delete_on_success.",
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
