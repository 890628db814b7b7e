"""What is in a queue, as rows: states, queues, jobs, failures, processes and recurring tasks."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from django.db.models import F

from ..backend import DatabaseBackend
from ..core import redaction
from ..core.serialization import signature_of
from ..exceptions import InvalidTaskPath
from ..models import Alert, Execution, Failure, Job, Process, Queue, RecurringTask, TaskState
from ..models.bounded_count import LIMIT
from ..models.enums import State
from ..models.job import JobQuerySet
from ..models.queue import Load
from ..registry import load
from .output import Row, as_json

# The states that a queue's load counts.
LOADED = (State.READY, State.SCHEDULED, State.BLOCKED, State.RUNNING)
LONGEST_MESSAGE = 100


def stats(backend: DatabaseBackend) -> Row:
    """Return numbers of jobs by state, and of what an operator looks after first.

    No state is counted beyond a limit; then the number is a lower bound, such as "10,000+".
    """
    jobs, by_queue = Job.objects.using(backend.database), queues(backend)
    numbers: dict[str, Any] = {state.value: _counted(jobs.filter(state=state)) for state in State}
    ages = [row["oldest"] for row in by_queue if row["oldest"] is not None]
    kinds = Process.objects.using(backend.database).alive().values_list("kind", flat=True)
    alive = Counter(kinds)
    return {
        **numbers,
        "oldest_ready": max(ages, default=None),
        "paused_queues": sum(row["paused"] for row in by_queue),
        "paused_tasks": len(TaskState.objects.using(backend.database).names_of_paused()),
        "open_failures": Failure.objects.using(backend.database).open().count(),
        "workers": alive[Process.Kind.WORKER],
        "dispatchers": alive[Process.Kind.DISPATCHER],
    }


def queues(backend: DatabaseBackend) -> list[Row]:
    """Return each queue that has jobs or was seen by a worker, with its load."""
    rows = Queue.objects.using(backend.database)
    loads = rows.loads(Job.objects.using(backend.database).lanes())
    seen = {queue.name: queue for queue in rows.seen()}
    workers = list(Process.objects.using(backend.database).workers())
    names = sorted({*loads, *seen, *backend.queues})
    found = []
    for name in names:
        load, queue = loads.get(name, Load()), seen.get(name)
        found.append(
            {
                "queue": name,
                **{state.value: getattr(load, state.value) for state in LOADED},
                "oldest": load.age if load.oldest else None,
                "workers": sum(worker.serves(name) for worker in workers),
                "limit": queue.limit if queue else None,
                "paused": bool(queue and queue.is_paused(queue.seen_at)),
            }
        )
    return found


def jobs(rows: JobQuerySet, backend: DatabaseBackend, number: int) -> list[Row]:
    """Return the newest of these jobs."""
    return [
        {
            "id": job.pk,
            "task": job.task,
            "queue": job.queue,
            "state": job.state,
            "attempt": job.attempt,
            "run_after": job.run_after,
            "arguments": _arguments(job, backend),
        }
        for job in rows.order_by("-pk")[:number]
    ]


def job(one: Job, backend: DatabaseBackend) -> Row:
    """Return all that is known of a job, with its attempts."""
    executions = Execution.objects.using(backend.database).filter(job=one).order_by("attempt")
    problem = ""
    if Execution.objects.using(backend.database).is_task_unknown(one):
        problem = (
            "No live worker knows its task. Deploy workers that have the task, or discard the job."
        )
    # Not as one.process: a router may read that from a replica, and a dead process has no row.
    process = Process.objects.using(backend.database).filter(pk=one.process_id or 0).first()
    attempts = [
        {
            "attempt": each.attempt,
            "outcome": each.outcome,
            "started_at": each.started_at,
            "duration": each.finished_at - each.started_at,
            "process": each.process,
            "release": each.release,
            "error": f"{each.error_type}: {each.message}" if each.error_type else "",
            "traceback": each.traceback,
            "log": each.log,
        }
        for each in executions
    ]
    hidden = backend.config.hidden
    return {
        "id": one.pk,
        "task": one.task,
        "arguments": _arguments(one, backend),
        "state": one.state,
        "problem": problem,
        "queue": one.queue,
        "priority": one.priority,
        "key": one.key and one.key.partition(" ")[2],
        "batch": one.batch_id,
        "attempt": one.attempt,
        "failures": one.failures,
        "max_attempts": one.max_attempts or None,
        "timeout": one.timeout,
        "enqueued_at": one.enqueued_at,
        "run_after": one.run_after,
        "expires_at": one.expires_at,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "stop_requested_at": one.stop_requested_at,
        "blocked_by": one.blocked_by,
        "process": one.process_id and str(process or f"#{one.process_id}"),
        "enqueued_by": one.source,
        "metadata": redaction.without_secrets(one.metadata, hidden),
        "result": redaction.without_secrets(one.result, hidden),
        "attempts": attempts,
    }


def failures(backend: DatabaseBackend, number: int, *, closed: bool) -> list[Row]:
    """Return the failures that were seen last: the open ones, or all."""
    rows = Failure.objects.using(backend.database)
    found = list((rows.all() if closed else rows.open()).order_by("-last_seen")[:number])
    affected = Execution.objects.using(backend.database).count_affected_jobs(
        [failure.pk for failure in found]
    )
    return [
        {
            "failure": failure.pk,
            "error": failure.error_type.rpartition(".")[2],
            "message": failure.message.strip()[:LONGEST_MESSAGE],
            "location": failure.location,
            "state": failure.state,
            "occurrences": failure.count,
            "failed_now": affected[failure.pk].failed if failure.pk in affected else 0,
            "waiting": affected[failure.pk].waiting if failure.pk in affected else 0,
            "first_seen": failure.first_seen,
            "last_seen": failure.last_seen,
        }
        for failure in found
    ]


def alerts(backend: DatabaseBackend, number: int) -> list[Row]:
    """Return the alerts whose problems were found last, those that last first."""
    rows = Alert.objects.using(backend.database).order_by(
        F("ended_at").desc(nulls_first=True), "-opened_at", "-pk"
    )
    return [
        {
            "target": alert.target,
            "check": str(alert),
            "severity": alert.severity,
            "problem": alert.what,
            "since": alert.opened_at,
            "ended": alert.ended_at,
            "sent": alert.sent_at,
            "error": alert.error,
        }
        for alert in rows[:number]
    ]


def workers(backend: DatabaseBackend) -> list[Row]:
    """Return the processes with the number of jobs that each holds."""
    running = Job.objects.using(backend.database).count_running()
    rows: Any = Process.objects.using(backend.database).seen().select_related("supervisor")
    return [
        {
            "process": process.name,
            "kind": process.kind,
            "queues": ", ".join(process.queues) if process.kind == Process.Kind.WORKER else "",
            "jobs": running.get(process.pk, 0),
            "alive": process.is_alive(process.seen_at),
            "request": process.request,
            "release": process.release,
            "memory_mb": process.memory and round(process.memory / 2**20),
            "heartbeat": max(timedelta(), process.seen_at - process.heartbeat_at),
            "started_at": process.started_at,
        }
        for process in rows.order_by("hostname", "kind", "pk")
    ]


def recurring(backend: DatabaseBackend) -> list[Row]:
    """Return the recurring tasks with their next times."""
    return [
        {
            "name": row.name,
            "calls": row.task or row.command,
            "schedule": row.cron or f"every {row.every}",
            "timezone": row.timezone,
            "enabled": row.is_enabled,
            "next": row.next_run_at,
            "problem": row.problem,
        }
        for row in RecurringTask.objects.using(backend.database).order_by("name")
    ]


def _arguments(row: Job, backend: DatabaseBackend) -> str:
    """Return the arguments as in a call, without the values that ``hidden`` names."""
    try:
        task = load(row.task)
        parameters = list(signature_of(task.func).parameters.values())[task.takes_context :]
    except InvalidTaskPath:
        parameters = []
    args, kwargs = redaction.call_without_secrets(
        row.args, row.kwargs, parameters, backend.config.hidden
    )
    each = args if isinstance(args, list) else [args]
    given = [as_json(value, indent=None) for value in each]
    if isinstance(kwargs, dict):
        given += [f"{name}={as_json(value, indent=None)}" for name, value in kwargs.items()]
    return ", ".join(given)


def _counted(rows: JobQuerySet) -> int | str:
    number = len(rows.order_by().values_list("pk", flat=True)[: LIMIT + 1])
    return number if number <= LIMIT else f"{LIMIT:,}+"
