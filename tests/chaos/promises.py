"""Check the promises of keys, limits, pipelines, batches and schedules against the records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django_dbqueue.core.counts import Counts
from django_dbqueue.models import (
    Batch,
    Execution,
    Job,
    RecurringExecution,
    Statistic,
    StatisticDelta,
)
from django_dbqueue.models.enums import FAILURES

from ..models import Interval, Mark
from . import tasks
from .load import EVERY, SCHEDULE, Load
from .operators import Operators
from .watch import Watch

STAGES = 3
# In seconds: a transaction may have started before its call, and the start of a task takes time.
SLACK = 0.5
LATE = 2.0


def broken(load: Load, operators: Operators, watch: Watch) -> dict[str, list[str]]:
    """Return the violations by their label in the report; each list must be empty."""
    executions = list(Execution.objects.order_by("attempt").defer("traceback", "log"))
    return {
        "stalled work": [f"{what} for {seconds:.0f} s" for what, seconds in watch.stalled.items()],
        "reruns after a stop": list(_stopped(operators.stopped, executions)),
        "debounced, early starts": list(_debounced(load, executions)),
        "limits exceeded": list(_limits(executions)),
        "last version not run last": list(_keys(load.versions, executions)),
        "unexplained stages": list(_pipelines(executions)),
        "batches, callbacks not 1": list(_batches(load.batches)),
        "batches ahead of a key": list(_members(load.members, executions)),
        "expiry not kept": list(_expiring(executions)),
        "schedule times, jobs not 1": list(_times()),
        "attempts not counted once": list(_counts(executions)),
    }


def _stopped(attempts: dict[str, int], executions: Iterable[Execution]) -> Iterator[str]:
    for each in executions:
        if each.attempt > attempts.get(str(each.job_id), each.attempt):
            yield f"{each.job_id}: stopped in attempt {attempts[str(each.job_id)]}, but attempt {each.attempt} ran"


def _debounced(load: Load, executions: Iterable[Execution]) -> Iterator[str]:
    """A debounced job does not start during its delay, however the earlier attempt ended."""
    for each in executions:
        for called_at, until in load.put_off.get(str(each.job_id), ()):
            if called_at < each.claimed_at < until - timedelta(seconds=SLACK):
                yield f"{each.job_id}: attempt {each.attempt} began at {each.claimed_at}, called at {called_at} with a delay until {until}"


def _counts(executions: Iterable[Execution]) -> Iterator[str]:
    """The statistics count each settled attempt once, and its outcome."""
    settled = [each for each in executions if not each.message.endswith("outcome was dropped.")]
    failed = sum(each.outcome in FAILURES for each in settled)
    counts = Counts()
    for statistic in Statistic.objects.filter(period=Statistic.Period.HOUR):
        counts.merge(statistic.counts)
    for delta in StatisticDelta.objects.all():
        counts.merge(Counts.from_json(delta.counts))
    runs, failures = counts.runs, counts.failures
    if (runs, failures) != (len(settled), failed):
        yield f"{runs} runs and {failures} failures for {len(settled)} attempts and {failed} failed"


class Span(NamedTuple):
    began_at: datetime
    ended_at: datetime
    most: int


def _limits(executions: Iterable[Execution]) -> Iterator[str]:
    by_fence = {(str(each.job_id), each.attempt): each for each in executions}
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for interval in Interval.objects.all():
        if span := _held(interval, by_fence.get((interval.job, interval.attempt))):
            spans[interval.key.partition("/")[0]].append(span)
    for key, found in spans.items():
        if number := _too_many(found):
            yield f"{key}: {number} at a time"


def _held(interval: Interval, execution: Execution | None) -> Span | None:
    """Return the time during which an attempt ran and held its slot.

    A host that is cut off continues its jobs after it was declared dead, and their slots are
    reused: this is not a violation. So an attempt counts at most until its execution was written, which is
    when it was declared lost, and not at all if it wrote its record later. A killed attempt has no
    end: it holds its slot until its recovery. An attempt that ended by itself wrote its end before
    its execution, so it counts in full.
    """
    ends = [end for end in (interval.ended_at, execution and execution.finished_at) if end]
    most = int(interval.key.partition("/")[2])
    return (
        Span(interval.began_at, min(ends), most) if ends and min(ends) > interval.began_at else None
    )


def _too_many(spans: Iterable[Span]) -> int:
    """Return the largest number of concurrent attempts above one of their limits, or 0."""
    events = sorted(
        [(span.began_at, 1, span.most) for span in spans]
        + [(span.ended_at, -1, span.most) for span in spans]
    )
    running, worst = Counter[int](), 0
    for _time, change, most in events:
        running[most] += change
        running += Counter()
        if running and running.total() > min(running):
            worst = max(worst, running.total())
    return worst


def _keys(newest: dict[str, int], executions: Iterable[Execution]) -> Iterator[str]:
    """Check that the newest version of each key ran last.

    An unconfirmed newer version may have been committed: the row has it. The order of runs is that
    of the attempts' numbers: a lost attempt may write its record at any time.
    """
    outcomes = {(str(each.job_id), each.attempt): each.outcome for each in executions}
    marks = defaultdict(list)
    for mark in Mark.objects.order_by("attempt"):
        marks[mark.job].append(mark)
    for job in Job.objects.filter(task=tasks.effect_of_a_version.module_path):
        name, version = job.args
        runs = marks[str(job.pk)]
        if job.version not in (version, None) or version < newest.get(name, 0):
            yield f"{name}: the arguments have version {version}, the row {job.version}, the newest is {newest.get(name)}"
        elif not runs or runs[-1].value != version:
            yield f"{name}: version {version} is the newest, but {runs and runs[-1].value} ran last"
        ended = Counter(
            run.value for run in runs if outcomes.get((run.job, run.attempt)) == "successful"
        )
        if reruns := [value for value, times in ended.items() if times > 1]:
            yield f"{name}: versions {reruns} were successful more than once"
    there = Job.objects.filter(task=tasks.effect_of_a_version.module_path).values_list(
        "args", flat=True
    )
    if absent := newest.keys() - {name for name, _version in there}:
        yield f"{absent}: no job"


def _pipelines(executions: Iterable[Execution]) -> Iterator[str]:
    histories, marks = defaultdict(list), defaultdict(Counter)
    for each in executions:
        histories[each.job_id].append(each)
    for job, value in Mark.objects.values_list("job", "value"):
        marks[job][value] += 1
    pipelines = {job.pk: job for job in Job.objects.filter(pipeline__isnull=False)}
    children = {pk for job in pipelines.values() for pk in job.result or ()}
    for job in pipelines.values():
        yield from _stages(
            job, 2 if str(job.pk) in children else 0, histories[job.pk], marks[str(job.pk)]
        )
    if missing := children - set(map(str, pipelines)):
        yield f"{missing}: missing children of a fan-out"


def _stages(job: Any, first: int, history: list[Execution], marks: Counter[int]) -> Iterator[str]:
    """Each stage is left by one successful attempt, and entered by no other way."""
    stage = first
    for each in history:
        if each.stage != stage:
            yield f"{job.pk}: attempt {each.attempt} was at stage {each.stage} instead of {stage}"
        stage = (each.stage or 0) + (each.outcome == "successful")
    tried = Counter(each.stage for each in history)
    if extra := [stage for stage in marks if marks[stage] > tried[stage]]:
        yield f"{job.pk}: stages {extra} have more marks than executions"
    end = 2 if job.result else STAGES
    if job.state == "successful" and (
        stage != end or any(not marks[each] for each in range(first, end))
    ):
        yield f"{job.pk}: ended before stage {stage}, with marks of {sorted(marks)}"


def _batches(confirmed: set[str]) -> Iterator[str]:
    callbacks = defaultdict(list)
    for job in Job.objects.filter(task=tasks.effect_after_a_batch.module_path):
        callbacks[job.args[0]].append(job)
    batches = {str(row.pk): row for row in Batch.objects.all()}
    for pk in confirmed | set(callbacks) | set(batches):
        # A later retry of a member, by an operator, does not reopen its batch.
        members = Job.objects.filter(batch=pk).exclude(task__in=tasks.OPERATED)
        # A batch whose opener failed in its block is discarded, and has no callback.
        wanted = 1 if pk in confirmed or (pk in batches and batches[pk].on_finish) else 0
        if len(callbacks[pk]) != wanted or pk not in batches or not batches[pk].finished_at:
            yield f"{pk}: {len(callbacks[pk])} callbacks instead of {wanted}"
        elif not wanted:
            continue
        elif members.filter(finished_at__gt=callbacks[pk][0].enqueued_at).exists():
            yield f"{pk}: the callback was enqueued before its jobs had ended"


def _members(
    batches: dict[str, tuple[datetime, list[str]]], executions: Iterable[Execution]
) -> Iterator[str]:
    """A batch waits for the run of a key that it has enqueued, whatever other calls follow."""
    runs = defaultdict(list)
    for each in executions:
        if each.outcome == "successful":
            runs[str(each.job_id)].append((each.claimed_at, each.finished_at))
    rows = Job.objects.filter(task=tasks.effect_after_a_batch.module_path)
    callbacks = {job.args[0]: job.enqueued_at for job in rows}
    slack = timedelta(seconds=SLACK)
    for pk, (called_at, jobs) in batches.items():
        finished_at = callbacks.get(pk)
        for job in jobs:
            if finished_at and not any(
                began > called_at - slack and ended < finished_at + slack
                for began, ended in runs[job]
            ):
                yield f"{pk}: finished at {finished_at}, without a run of {job} since {called_at}"


def _expiring(executions: Iterable[Execution]) -> Iterator[str]:
    """A job starts before its expiry, or is discarded after it; a retry may come too late."""
    histories = defaultdict(list)
    for each in executions:
        histories[each.job_id].append(each)
    late = dict(Mark.objects.filter(value__gt=LATE * 1000).values_list("job", "value"))
    for job in Job.objects.filter(task=tasks.effect_before_expiry.module_path):
        expires_at, history = datetime.fromisoformat(job.args[0]), histories[job.pk]
        if str(job.pk) in late:
            yield f"{job.pk}: started {late[str(job.pk)]} ms after its expiry"
        last = history[-1] if history else None
        match job.state, last and last.outcome:
            case "successful", "successful":
                is_kept = True
            case "discarded", "discarded":
                is_kept = last.error_type.endswith("Expired") and job.finished_at >= expires_at
            case "failed", "failed":
                # The delay before the retry, and its spread.
                is_kept = last.finished_at > expires_at - timedelta(seconds=1)
            case "failed", "lost" | "interrupted":
                is_kept = job.on_lost == "fail"
            case _:
                is_kept = False
        if not is_kept:
            ends = [each.outcome for each in history]
            yield f"{job.pk}: {job.state} after {ends}, expiry at {expires_at}"


def _times() -> Iterator[str]:
    """Each time has one job, and no time is missing, even if no dispatcher ran then."""
    rows = RecurringExecution.objects.filter(task__name=SCHEDULE)
    times = dict(rows.order_by("run_at").values_list("run_at", "job"))
    jobs = set(
        Job.objects.filter(task=tasks.effect_of_a_time.module_path).values_list("pk", flat=True)
    )
    if alone := jobs - set(times.values()):
        yield f"{len(alone)} jobs without a time"
    if missing := [time for time, job in times.items() if job not in jobs]:
        yield f"{missing}: no job"
    for one, next_one in zip(times, list(times)[1:], strict=False):
        if next_one - one != timedelta(seconds=EVERY):
            yield f"{one}: followed by {next_one}"
