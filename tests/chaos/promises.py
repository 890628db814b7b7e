"""What keys, limits, pipelines, batches and schedules promise, held against the marks. Each returns what breaks it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django_dbqueue.models import Batch, Execution, Job, RecurringExecution

from ..models import Interval, Mark
from . import tasks
from .load import EVERY, Load

STAGES = 3


def broken(load: Load) -> dict[str, list[str]]:
    """By what the report says of it; each list must be empty."""
    executions = list(Execution.objects.order_by("attempt").defer("message", "traceback", "log"))
    return {
        "limit exceeded": list(_limits(executions)),
        "keys, last version not run": list(_keys(load.versions, executions)),
        "stages, unexplained": list(_pipelines(executions)),
        "batches, callbacks not one": list(_batches(load.batches)),
        "times, jobs not one": list(_times()),
    }


class Span(NamedTuple):
    began_at: datetime
    ended_at: datetime


def _limits(executions: Iterable[Execution]) -> Iterator[str]:
    by_fence = {(str(each.job_id), each.attempt): each for each in executions}
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for interval in Interval.objects.all():
        if span := _held(interval, by_fence.get((interval.job, interval.attempt))):
            spans[interval.key].append(span)
    for key, found in spans.items():
        if (most := _most_at_a_time(found)) > tasks.LIMIT:
            yield f"{key}: {most} at a time"


def _held(interval: Interval, execution: Execution | None) -> Span | None:
    """As long as an attempt ran and held its slot.

    A host that is cut off goes on with what it runs after it was declared dead, and its slots are another's by then: that
    is no break of the promise. So an attempt counts until its execution was written at the latest, which is when it was declared
    lost, and not at all if it only came to write its mark after that. One that was killed wrote no end: it holds its slot
    until it is recovered. What ended by itself wrote its end before its execution, so nothing of it is cut off here.
    """
    ends = [end for end in (interval.ended_at, execution and execution.finished_at) if end]
    return Span(interval.began_at, min(ends)) if ends and min(ends) > interval.began_at else None


def _most_at_a_time(spans: Iterable[Span]) -> int:
    events = sorted([(span.began_at, 1) for span in spans] + [(span.ended_at, -1) for span in spans])
    running = most = 0
    for _time, change in events:
        running += change
        most = max(most, running)
    return most


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
        ended = Counter(run.value for run in runs if outcomes.get((run.job, run.attempt)) == "successful")
        if again := [value for value, times in ended.items() if times > 1]:
            yield f"{name}: versions {again} were successful more than once"
    if gone := newest.keys() - {name for name, _ in Job.objects.filter(key__isnull=False).values_list("args", flat=True)}:
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
        yield from _walk(job, 2 if str(job.pk) in children else 0, histories[job.pk], marks[str(job.pk)])
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
    if job.state == "successful" and (stage != end or any(not marks[each] for each in range(first, end))):
        yield f"{job.pk}: it ended before stage {stage}, with marks of {sorted(marks)}"


def _batches(confirmed: set[str]) -> Iterator[str]:
    callbacks = defaultdict(list)
    for job in Job.objects.filter(task=tasks.effect_after_a_batch.module_path):
        callbacks[job.args[0]].append(job)
    for pk in confirmed | set(callbacks):
        members = Job.objects.filter(batch=pk)
        if len(callbacks[pk]) != 1 or not Batch.objects.filter(pk=pk, finished_at__isnull=False).exists():
            yield f"{pk}: {len(callbacks[pk])} callbacks"
        elif members.filter(finished_at__gt=callbacks[pk][0].enqueued_at).exists():
            yield f"{pk}: its callback came before its jobs had ended"


def _times() -> Iterator[str]:
    """One job each, and none is left out: what no dispatcher was there for is made up for."""
    times = dict(RecurringExecution.objects.order_by("run_at").values_list("run_at", "job"))
    jobs = set(Job.objects.filter(task=tasks.effect_of_a_time.module_path).values_list("pk", flat=True))
    if alone := jobs - set(times.values()):
        yield f"{len(alone)} jobs beside those of the times"
    if missing := [time for time, job in times.items() if job not in jobs]:
        yield f"{missing}: no job"
    for one, next_one in zip(times, list(times)[1:], strict=False):
        if next_one - one != timedelta(seconds=EVERY):
            yield f"{one}: it is followed by {next_one}"
