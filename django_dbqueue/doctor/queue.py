"""The queue itself, on every database: its processes, and whether they keep up.

These checks do index lookups only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, Q, Subquery
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..core.options import Options
from ..models import (
    Alert,
    Execution,
    Failure,
    HangedJob,
    Operation,
    Process,
    Queue,
    RecurringTask,
    TaskState,
)
from ..models.bounded_count import LIMIT, count
from ..models.enums import State
from ..models.execution import UNKNOWN_TASK
from ..models.expressions import Now, now_plus
from ..models.job import JobQuerySet
from ..models.recurring_task import RecurringTaskQuerySet
from .database import QueueDatabase
from .finding import Finding, Severity, format_duration, one_line

# Seconds that a job may be ready in a queue that no worker serves.
UNSERVED = 60
# Seconds from which the recovery of an orphaned job, the deletion of a job, or a run of a recurring
# task is late.
LATE = {"orphaned": 300, "pruned": 3600, "recurring": 300, "operations": 300}
# Failed jobs are recent for an hour.
RECENT_SECONDS = 3600
# The order of the index of ready jobs: see count().
BY_LANE = ("queue", "priority", "run_after")
# The subject of a finding about all that are not named.
OTHERS = "(others)"
# Maximum number of queues, processes or recurring tasks to name, and of failures.
MOST, MOST_FAILURES = 5, 10
# Maximum number of jobs that wait to be tried again, whose last attempts are read.
MOST_TRIED = 2000
DISPATCH = (
    "python manage.py runqueue --only dispatcher  # If one is alive, its log shows the reason."
)


def processes(database: QueueDatabase) -> Iterator[Finding]:
    kinds = {process.kind for process in _alive(database)}
    if not kinds:
        yield Finding(
            _("No runqueue is alive."),
            _no_job_runs(database),
            "python manage.py runqueue",
            Severity.CRITICAL,
            "runqueue",
        )
        return
    if Process.Kind.WORKER not in kinds:
        yield Finding(
            _("No worker is alive."),
            _no_job_runs(database),
            "python manage.py runqueue --only workers",
            Severity.CRITICAL,
            "worker",
        )
    if Process.Kind.DISPATCHER not in kinds:
        yield Finding(
            _("No dispatcher is alive."),
            _(
                "Scheduled jobs, retries and recurring tasks never start, and no jobs are "
                "recovered or pruned."
            ),
            "python manage.py runqueue --only dispatcher",
            Severity.CRITICAL,
            "dispatcher",
        )


def _no_job_runs(database: QueueDatabase) -> str:
    number = count(database.jobs.ready(), *BY_LANE)
    said = ngettext(
        "No job runs; %(count)s ready job so far.",
        "No job runs; %(count)s ready jobs so far.",
        number,
    )
    return said % {"count": _number(number)} if number else _("No job runs.")


def silent_processes(database: QueueDatabase) -> Iterator[Finding]:
    rows = Process.objects.using(database.alias).silent().seen().order_by("heartbeat_at")
    silent: list[Any] = list(rows[:1000])
    if silent:
        named = [
            _("%(name)s for %(time)s")
            % {
                "name": each.name,
                "time": format_duration(_seconds(each.heartbeat_at, each.seen_at)),
            }
            for each in silent[:MOST]
        ]
        said = ngettext(
            "%(count)s process without a heartbeat: %(names)s.",
            "%(count)s processes without a heartbeat: %(names)s.",
            len(silent),
        )
        if more := silent[MOST:]:
            named.append(_("%(count)s more") % {"count": _number(len(more))})
        yield Finding(
            said % {"count": _number(len(silent)), "names": ", ".join(named)},
            _(
                "A process that hangs, was killed or has lost the database runs no jobs. "
                "Dispatchers recover its jobs and delete its row."
            ),
            f"{DISPATCH}\n# And see the log of the process, and whether its host runs runqueue.",
        )


def quiet_processes(database: QueueDatabase) -> Iterator[Finding]:
    rows = Process.objects.using(database.alias).quieted().order_by("name")
    names = list(rows.values_list("name", flat=True)[:1000])
    if names:
        said = ngettext(
            "%(count)s quiet process: %(names)s.",
            "%(count)s quiet processes: %(names)s.",
            len(names),
        )
        shown = ", ".join(names[:MOST] + ["…"] * (len(names) > MOST))
        yield Finding(
            said % {"count": _number(len(names)), "names": shown},
            _("An operator wants them to claim no more jobs: jobs that only they would run wait."),
            _("The page Processes of the admin can resume them."),
        )


def lag(database: QueueDatabase) -> Iterator[Finding]:
    workers = list(Process.objects.using(database.alias).workers()[:1000])
    waits = _waits(database) if workers else {}
    late: list[tuple[int, float, str, list[Process]]] = []
    for queue, seconds in waits.items():
        serving = [worker for worker in workers if worker.serves(queue)]
        if not serving and any(worker.has(queue) for worker in workers):
            continue  # See quiet_processes().
        within = _options_of(database, queue).ready_within
        if not serving and seconds > min(UNSERVED, within or UNSERVED):
            late.append((0, -seconds, queue, serving))
        elif serving and within is not None and seconds > within:
            late.append((1, -seconds, queue, serving))
    # Unserved queues first, then those that have waited for longest.
    late.sort(key=lambda each: each[:3])
    for _rank, seconds, queue, serving in late[:MOST]:
        yield _late(database, queue, -seconds, serving)
    if rest := late[MOST:]:
        said = ngettext(
            "%(count)s further queue with jobs that have been ready for too long.",
            "%(count)s further queues with jobs that have been ready for too long.",
            len(rest),
        )
        yield Finding(
            said % {"count": _number(len(rest))},
            _("As above."),
            _("As above. The page Queues of the admin lists all queues."),
            Severity.WARNING if rest[0][-1] else Severity.CRITICAL,
            OTHERS,
            further=tuple(queue for _rank, _seconds, queue, _serving in rest),
        )


def _late(database: QueueDatabase, queue: str, seconds: float, serving: list[Process]) -> Finding:
    named = {"queue": repr(queue), "time": format_duration(seconds)}
    if not serving:
        return Finding(
            _(
                "A job of the queue %(queue)s has been ready for %(time)s, and no live worker "
                "serves the queue."
            )
            % named,
            _("It will never run."),
            f'python manage.py runqueue --only workers --queues "{queue}"'
            if any(not each.queues or queue in each.queues for each in database.backends)
            else _("Add it to QUEUES, or move its jobs to a queue that is there."),
            Severity.CRITICAL,
            queue,
        )
    within = _options_of(database, queue).ready_within or 0.0
    # In the order of the lane index: see count().
    ready = count(database.jobs.ready().filter(queue=queue), "priority", "run_after")
    named |= {
        "within": format_duration(within),
        "ready": _number(ready),
        "workers": _number(len(serving)),
        "threads": _number(sum(worker.threads for worker in serving)),
    }
    return Finding(
        _(
            "A job of the queue %(queue)s has been ready for %(time)s, and ready_within is "
            "%(within)s. Ready jobs: %(ready)s; workers that serve the queue: %(workers)s, with "
            "%(threads)s threads."
        )
        % named,
        _(
            "The workers do not keep up, or the job's limit is reached, or other jobs run "
            "first: the job's page in the admin shows the reason."
        ),
        _("More --processes or --threads, another host, or a higher limit. If its jobs may wait:")
        + f"\n'per_queue': {{{queue!r}: {{'ready_within': {round(2 * seconds)}}}}}",
        subject=queue,
    )


def overdue_rows(database: QueueDatabase) -> RecurringTaskQuerySet:
    """Return the recurring tasks whose time has passed, or which cannot be enqueued."""
    tasks = RecurringTask.objects.using(database.alias)
    is_late = Q(next_run_at__lt=now_plus(-LATE["recurring"]))
    rows = tasks.upcoming().filter(is_late | ~Q(problem=""))
    if any(process.kind == Process.Kind.DISPATCHER for process in _alive(database)):
        # Dispatchers declare the tasks of their code: these were removed from it.
        rows = rows.exclude(pk__in=tasks.undeclared().values("pk"))
    return rows


def overdue_recurring_tasks(database: QueueDatabase) -> Iterator[Finding]:
    overdue: list[Any] = list(overdue_rows(database)[:1001])
    for row in overdue[:MOST]:
        said, named = _("The recurring task %(name)s has no next time."), {"name": repr(row.name)}
        if row.next_run_at and row.next_run_at > row.seen_at:
            said = _("The recurring task %(name)s cannot be enqueued at its next time.")
        elif row.next_run_at:
            said = _("The recurring task %(name)s is overdue by %(time)s, since %(since)s.")
            named["time"] = format_duration(_seconds(row.next_run_at, row.seen_at))
            named["since"] = _moment(row.next_run_at)
        why, remedy = _("No dispatcher enqueues it: none is alive, or none can."), DISPATCH
        if row.problem:
            why = _("Its schedule, its task or its arguments are invalid, or its task is unknown.")
            remedy = _("Correct the recurring task in the admin or by SQL, or disable it.")
        yield Finding(
            f"{said % named} {one_line(row.problem)}".strip(),
            why,
            remedy,
            Severity.CRITICAL,
            row.name,
        )
    if invalid := [row for row in overdue[MOST:] if row.problem]:
        said = ngettext(
            "%(count)s further recurring task cannot be enqueued.",
            "%(count)s further recurring tasks cannot be enqueued.",
            len(invalid),
        )
        yield Finding(
            said % {"count": _number(len(invalid))},
            _("Its schedule, its task or its arguments are invalid, or its task is unknown."),
            _("Correct the recurring task in the admin or by SQL, or disable it."),
            Severity.CRITICAL,
            f"{OTHERS}, invalid",
            further=tuple(row.name for row in invalid),
        )
    if rest := [row for row in overdue[MOST:] if not row.problem]:
        said = ngettext(
            "%(count)s further recurring task is overdue.",
            "%(count)s further recurring tasks are overdue.",
            len(rest),
        )
        yield Finding(
            said % {"count": _number(len(rest))},
            _("No dispatcher enqueues them: none is alive, or none can."),
            DISPATCH,
            Severity.CRITICAL,
            OTHERS,
            further=tuple(row.name for row in rest),
        )


def failures(database: QueueDatabase) -> Iterator[Finding]:
    """Find open failures with jobs that failed recently: new ones first, then the most frequent.

    Reads a limited number of jobs, the last ones: the numbers are lower bounds if there are more.
    """
    last = Execution.objects.using(database.alias).filter(
        job=OuterRef("pk"), attempt=OuterRef("attempt")
    )
    jobs = recently_failed(database).values_list(Subquery(last.values("failure")), flat=True)
    found = Counter(jobs[: LIMIT + 1])
    # The symbol needs no words, which languages would put in different places.
    at_least = "≥ " if found.total() > LIMIT else ""
    opened = Failure.objects.using(database.alias).open().in_bulk([pk for pk in found if pk])
    ranked = sorted(
        opened.values(),
        key=lambda each: (not _is_new(each), -found[each.pk], each.pk),
    )
    for failure in ranked[:MOST_FAILURES]:
        said = ngettext(
            "Failure %(name)s: %(count)s job failed within the last hour; occurrences: %(all)s "
            "since %(since)s.",
            "Failure %(name)s: %(count)s jobs failed within the last hour; occurrences: %(all)s "
            "since %(since)s.",
            found[failure.pk],
        )
        named = {
            "name": one_line(str(failure)),
            "count": at_least + _number(found[failure.pk]),
            "all": _number(failure.count),
            "since": _moment(failure.first_seen),
        }
        again = failure.reopened_at and _(
            "It was resolved, and has been seen again since %(since)s."
        ) % {"since": _moment(failure.reopened_at)}
        yield Finding(
            f"{said % named} {again or ''}".strip(),
            _(
                "These jobs have no attempts left. The failure's page in the admin shows the "
                "traceback and the jobs."
            ),
            _("Fix the cause, retry the jobs and resolve the failure in the admin. If it is known:")
            + f"\nFailure.objects.filter(pk={failure.pk}).mute()",
            subject=f"{failure.pk} {failure.reopened_at or ''}".strip(),
            is_event=True,
        )
    if rest := ranked[MOST_FAILURES:]:
        number = sum(found[failure.pk] for failure in rest)
        said = ngettext(
            "%(count)s further open failure; jobs failed within the last hour: %(jobs)s.",
            "%(count)s further open failures; jobs failed within the last hour: %(jobs)s.",
            len(rest),
        )
        yield Finding(
            said % {"count": _number(len(rest)), "jobs": at_least + _number(number)},
            _("These jobs have no attempts left."),
            _("The page Failures of the admin lists all failures."),
            subject=OTHERS,
        )


def _is_new(failure: Failure) -> bool:
    """Return whether it was first seen, or seen again, shortly before it was last seen."""
    began = failure.reopened_at or failure.first_seen
    return _seconds(began, failure.last_seen) < RECENT_SECONDS


def hanged_jobs(database: QueueDatabase) -> Iterator[Finding]:
    queues = {queue for backend in database.backends for queue in backend.config.per_queue}
    by_queue = {queue: _options_of(database, queue).hanged_after for queue in queues}
    after = min(backend.config.hanged_after for backend in database.backends)
    hanged = HangedJob.objects.using(database.alias).hanged(after_seconds=after, by_queue=by_queue)
    if number := count(hanged):
        # A row by hand may have no start, and the jobs may have ended since they were counted.
        started = hanged.filter(started_at__isnull=False).order_by("started_at")
        first: Any = started.values_list("task", "started_at", Now()).first()
        said = ngettext("%(count)s hanged job.", "%(count)s hanged jobs.", number)
        longest = _("The first one, of %(task)s, has run for %(time)s.")
        named = first and {
            "task": one_line(first[0]),
            "time": format_duration(_seconds(*first[1:])),
        }
        yield Finding(
            said % {"count": _number(number)} + (f" {longest % named}" if named else ""),
            _("They hold a thread, their slots and their keys."),
            _("The page Hanged jobs of the admin shows the stack of each, and can stop it."),
        )


def stalled_operations(database: QueueDatabase) -> Iterator[Finding]:
    # One that runs within a request has no job, and ends soon.
    old = Operation.objects.using(database.alias).filter(
        created_at__lt=now_plus(-LATE["operations"])
    )
    stalled = list(old.stalled().order_by("pk")[:1000])
    for each in stalled[:MOST]:
        yield Finding(
            _(
                "The operation %(name)s has not ended, and no job goes on with it: %(done)s of "
                "%(total)s jobs processed."
            )
            % {"name": each, "done": _number(each.done), "total": _number(each.total)},
            _("The others are unchanged."),
            _("The page Operations of the admin can continue it, or stop and undo it."),
            subject=str(each.pk),
        )
    yield from _further(str(each.pk) for each in stalled[MOST:])


def unknown_tasks(database: QueueDatabase) -> Iterator[Finding]:
    """Find jobs that wait for a worker that knows their task.

    Reads a limited number of jobs, those that are due first: there may be more.
    """
    last = Execution.objects.using(database.alias).filter(job=OuterRef("pk")).order_by("-attempt")
    tried = database.jobs.scheduled().attempted().order_by("run_after")
    errors = tried.values_list("task", Subquery(last.values("error_type")[:1]))[:MOST_TRIED]
    found = Counter(task for task, error in errors if error == UNKNOWN_TASK)
    ranked = sorted(found.items(), key=lambda it: (-it[1], it[0]))
    for task, number in ranked[:MOST]:
        yield Finding(
            _("No live worker knows the task %(task)s. Jobs that wait for it: %(count)s.")
            % {"task": one_line(task), "count": _number(number)},
            _("They fail when they have waited for the time of the option unknown_task_after."),
            _("Deploy workers that have the task, or discard its jobs."),
            subject=task,
        )
    yield from _further(task for task, _number in ranked[MOST:])


def interrupted_moves(database: QueueDatabase) -> Iterator[Finding]:
    moves = Operation.objects.using(database.alias).holding()
    late = moves.filter(finished_at__lt=now_plus(-LATE["operations"])).order_by("pk")
    interrupted = list(late[:1000])
    for each in interrupted[:MOST]:
        yield Finding(
            _("A move to the backend %(backend)s was interrupted. It holds jobs: %(count)s.")
            % {"backend": each.value, "count": _number(each.total - each.done)},
            _("They run in neither of the two backends."),
            _("Repeat manage.py queue move: it completes interrupted moves first."),
            subject=str(each.pk),
        )
    yield from _further(str(each.pk) for each in interrupted[MOST:])


def orphaned_jobs(database: QueueDatabase) -> Iterator[Finding]:
    late = (
        database.jobs.orphaned().filter(started_at__lt=now_plus(-LATE["orphaned"]))[:1001].count()
    )
    if late:
        said = ngettext(
            "%(count)s running job belongs to a dead process and has not been recovered.",
            "%(count)s running jobs belong to dead processes and have not been recovered.",
            late,
        )
        yield Finding(
            said % {"count": f"> {_number(1000)}" if late > 1000 else late},
            _("They make no progress, and hold their slots and keys."),
            DISPATCH,
            Severity.CRITICAL,
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
            _("A job of the queue %(queue)s ended %(time)s ago, and %(option)s is %(kept)s.")
            % {
                "queue": repr(first[0]),
                "time": format_duration(age),
                "option": name,
                "kept": format_duration(seconds),
            },
            _(
                "Dispatchers delete more slowly than jobs end, or none runs: the table keeps "
                "growing."
            ),
            "python manage.py runqueue --only dispatcher  "
            "# Add one. Or keep less: delete_on_success.",
            subject=name,
        )


def undelivered_alerts(database: QueueDatabase) -> Iterator[Finding]:
    rows = Alert.objects.using(database.alias).undelivered().order_by("-pk")[:1000]
    errors = {alert.target: alert.error for alert in rows}
    ranked = list(errors.items())
    for target, error in ranked[:MOST]:
        yield Finding(
            _("Alerts cannot be sent by %(target)s: %(error)s")
            % {"target": target, "error": one_line(error) or _("there is no answer.")},
            _("It is not told of problems. They are sent as soon as this works again."),
            "python manage.py queue alerts --test",
            subject=target,
        )
    yield from _further(target for target, _error in ranked[MOST:])


def _further(subjects: Iterable[str]) -> Iterator[Finding]:
    if rest := tuple(subjects):
        said = ngettext(
            "%(count)s further finding of this kind.",
            "%(count)s further findings of this kind.",
            len(rest),
        )
        named = {"count": _number(len(rest))}
        yield Finding(said % named, _("As above."), _("As above."), subject=OTHERS, further=rest)


def _alive(database: QueueDatabase) -> list[Process]:
    return list(Process.objects.using(database.alias).alive()[:1000])


def recently_failed(database: QueueDatabase) -> JobQuerySet:
    """Return the jobs that failed recently, in the order of their index; the last one first."""
    return database.jobs.filter(
        state=State.FAILED, finished_at__gte=now_plus(-RECENT_SECONDS)
    ).order_by("-finished_at")


def _options_of(database: QueueDatabase, queue: str) -> Options:
    """Return the options of the backend that has the queue, or may have it."""
    backend = min(database.backends, key=lambda each: (queue not in each.queues, bool(each.queues)))
    return backend.options_of(queue)


def _seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M %Z}".strip()


def _number(number: int) -> str:
    return number_format(number, force_grouping=True) if type(number) is int else str(number)


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
