"""What keys, limits, pipelines, batches and schedules promise, held against the marks. Each returns what breaks it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django_dbqueue.models import Batch, Execution, Job, RecurringExecution

from ..models import Interval, Mark
from . import tasks
from .load import EVERY, SCHEDULE, Load
from .operators import Operators
from .watch import Watch

STAGES = 3


def broken(load: Load, operators: Operators, watch: Watch) -> dict[str, list[str]]:
    """By what the report says of it; each list must be empty."""
    executions = list(Execution.objects.order_by("attempt").defer("message", "traceback", "log"))
    return {
        "could go on, and stood": [
            f"{what} for {seconds:.0f} s" for what, seconds in watch.idle.items()
        ],
        "stopped, and ran on": list(_stopped(operators.stopped, executions)),
        "debounced, and too early": list(_debounced(load, executions)),
        "limit exceeded": list(_limits(executions)),
        "keys, last version not run": list(_keys(load.versions, executions)),
        "stages, unexplained": list(_pipelines(executions)),
        "batches, callbacks not one": list(_batches(load.batches)),
        "times, jobs not one": list(_times()),
    }


def _stopped(attempts: dict[str, int], executions: Iterable[Execution]) -> Iterator[str]:
    for each in executions:
        if each.attempt > attempts.get(str(each.job_id), each.attempt):
            yield f"{each.job_id}: stopped in attempt {attempts[str(each.job_id)]}, and there was attempt {each.attempt}"


def _debounced(load: Load, executions: Iterable[Execution]) -> Iterator[str]:
    """It does not start within the time that it was put off by, whatever became of the attempt before."""
    for each in executions:
        for asked_at, until in load.put_off.get(str(each.job_id), ()):
            # Half a second, as its transaction may have begun so much before its answer came.
            if asked_at < each.claimed_at < until - timedelta(seconds=0.5):
                yield f"{each.job_id}: attempt {each.attempt} began at {each.claimed_at}, asked at {asked_at} to wait until {until}"


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
    """As long as an attempt ran and held its slot.

    A host that is cut off goes on with what it runs after it was declared dead, and its slots are another's by then: that
    is no break of the promise. So an attempt counts until its execution was written at the latest, which is when it was declared
    lost, and not at all if it only came to write its mark after that. One that was killed wrote no end: it holds its slot
    until it is recovered. What ended by itself wrote its end before its execution, so nothing of it is cut off here.
    """
    ends = [end for end in (interval.ended_at, execution and execution.finished_at) if end]
    most = int(interval.key.partition("/")[2])
    return (
        Span(interval.began_at, min(ends), most) if ends and min(ends) > interval.began_at else None
    )


def _too_many(spans: Iterable[Span]) -> int:
    """How many ran at a time, where one of them allows fewer; else 0."""
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
    """Of what was not confirmed, a newer version may have been committed: the row knows. Which run is the last, the number of its
    attempt tells; one that was declared lost may write its mark at any time.
    """
    outcomes = {(str(each.job_id), each.attempt): each.outcome for each in executions}
    marks = defaultdict(list)
    for mark in Mark.objects.order_by("attempt"):
        marks[mark.job].append(mark)
    for job in Job.objects.filter(task=tasks.effect_of_a_version.module_path):
        name, version = job.args
        runs = marks[str(job.pk)]
        if version != job.version or version < newest.get(name, 0):
            yield f"{name}: it has version {version}, of {job.version} and {newest.get(name)}"
        elif not runs or runs[-1].value != version:
            yield f"{name}: version {version} is the last, and {runs and runs[-1].value} was run last"
        ended = Counter(
            run.value for run in runs if outcomes.get((run.job, run.attempt)) == "successful"
        )
        if again := [value for value, times in ended.items() if times > 1]:
            yield f"{name}: versions {again} were successful more than once"
    there = Job.objects.filter(task=tasks.effect_of_a_version.module_path).values_list(
        "args", flat=True
    )
    if gone := newest.keys() - {name for name, _version in there}:
        yield f"{gone}: there is no job"


def _pipelines(executions: Iterable[Execution]) -> Iterator[str]:
    histories, marks = defaultdict(list), defaultdict(Counter)
    for each in executions:
        histories[each.job_id].append(each)
    for job, value in Mark.objects.values_list("job", "value"):
        marks[job][value] += 1
    walks = {job.pk: job for job in Job.objects.filter(pipeline__isnull=False)}
    children = {pk for job in walks.values() for pk in job.result or ()}
    for job in walks.values():
        yield from _walk(
            job, 2 if str(job.pk) in children else 0, histories[job.pk], marks[str(job.pk)]
        )
    if missing := children - set(map(str, walks)):
        yield f"{missing}: they were fanned out to, and are not there"


def _walk(job: Any, first: int, history: list[Execution], marks: Counter[int]) -> Iterator[str]:
    """Each stage is left by one successful attempt, and entered by no other way."""
    stage = first
    for each in history:
        if each.stage != stage:
            yield f"{job.pk}: attempt {each.attempt} was at stage {each.stage}, and not at {stage}"
        stage = (each.stage or 0) + (each.outcome == "successful")
    tried = Counter(each.stage for each in history)
    if extra := [stage for stage in marks if marks[stage] > tried[stage]]:
        yield f"{job.pk}: stages {extra} left more marks than they have executions"
    end = 2 if job.result else STAGES
    if job.state == "successful" and (
        stage != end or any(not marks[each] for each in range(first, end))
    ):
        yield f"{job.pk}: it ended before stage {stage}, with marks of {sorted(marks)}"


def _batches(confirmed: set[str]) -> Iterator[str]:
    callbacks = defaultdict(list)
    for job in Job.objects.filter(task=tasks.effect_after_a_batch.module_path):
        callbacks[job.args[0]].append(job)
    batches = {str(row.pk): row for row in Batch.objects.all()}
    for pk in confirmed | set(callbacks) | set(batches):
        members = Job.objects.filter(batch=pk)
        # One whose opener has failed in its block is called off, and followed by nothing.
        wanted = 1 if pk in confirmed or (pk in batches and batches[pk].on_finish) else 0
        if len(callbacks[pk]) != wanted or pk not in batches or not batches[pk].finished_at:
            yield f"{pk}: {len(callbacks[pk])} callbacks, of {wanted}"
        elif not wanted:
            continue
        elif members.filter(finished_at__gt=callbacks[pk][0].enqueued_at).exists():
            yield f"{pk}: its callback came before its jobs had ended"


def _times() -> Iterator[str]:
    """One job each, and none is left out: what no dispatcher was there for is made up for."""
    rows = RecurringExecution.objects.filter(task__name=SCHEDULE)
    times = dict(rows.order_by("run_at").values_list("run_at", "job"))
    jobs = set(
        Job.objects.filter(task=tasks.effect_of_a_time.module_path).values_list("pk", flat=True)
    )
    if alone := jobs - set(times.values()):
        yield f"{len(alone)} jobs beside those of the times"
    if missing := [time for time, job in times.items() if job not in jobs]:
        yield f"{missing}: no job"
    for one, next_one in zip(times, list(times)[1:], strict=False):
        if next_one - one != timedelta(seconds=EVERY):
            yield f"{one}: it is followed by {next_one}"
