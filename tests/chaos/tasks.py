"""Tasks that record each of their runs."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import datetime, timedelta, timezone

from django.db.models.signals import post_delete, post_save, pre_delete, pre_save

from django_dbqueue import Constant, FanOut, batch, limit, pipeline, task
from django_dbqueue.models.expressions import Now

from ..models import Effect, Interval, Mark

# Tasks' own connections are killed too: failed tasks are retried.
RETRIED = {"max_attempts": 1000, "backoff": Constant(delay=0.5)}


def receive(sender, **kwargs):
    """A receiver of a project that watches all models."""


for signal in (pre_save, post_save, pre_delete, post_delete):
    signal.connect(receive)


def mark(context):
    Effect.objects.create(job=context.task_result.id, attempt=context.attempt)


@task(takes_context=True, **RETRIED)
def effect(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, **RETRIED)
async def effect_of_a_coroutine(context, seconds):
    await Effect.objects.acreate(job=context.task_result.id, attempt=context.attempt)
    await asyncio.sleep(seconds)


@task(takes_context=True, atomic=True, **RETRIED)
def effect_with_its_end(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, on_lost="fail")
def effect_once(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, timeout=1, **RETRIED)
def effect_that_hangs_at_first(context, seconds):
    mark(context)
    time.sleep(3600 if context.job.attempt <= 2 and random.random() < 0.3 else seconds)


ALL = [effect, effect, effect, effect_of_a_coroutine, effect_with_its_end, effect_once]


# Keys, limits, pipelines, batches and schedules. Marks contain the attempt of the row.

# Intervals of limited tasks have the limit after a slash.
LIMIT = 2
# The delay of a debounced call, in seconds.
PUT_OFF = 3


class Flaky(Exception):
    """Fails the attempt, which is retried."""


def fail_at_times(context):
    """Fail at most once in a run: failures triple the delay after a lost attempt."""
    if not context.job.failures and random.random() < 0.5:
        raise Flaky


@task(key=lambda name: name, on_conflict="replace", takes_context=True, **RETRIED)
def effect_of_a_debounce(context, name):
    """Is enqueued while it runs, also in attempts that fail or are interrupted by a deploy."""
    mark(context)
    time.sleep(random.uniform(1, 3))
    fail_at_times(context)


@task(key=lambda name: name, takes_context=True, **RETRIED)
def effect_of_a_version(context, name, version):
    """May run for longer than a dispatcher takes to finish a batch."""
    leave(context, version)
    time.sleep(random.choice([0.2, 0.8, 4]))


@task(concurrency=limit(LIMIT, key=lambda key: key), takes_context=True, **RETRIED)
def effect_within_a_limit(context, key, seconds):
    occupy(context, seconds, f"{key}/{LIMIT}")


@task(concurrency=limit(LIMIT, key=lambda key: key), takes_context=True, **RETRIED)
async def effect_of_a_coroutine_within_a_limit(context, key, seconds):
    fence = {"job": context.task_result.id, "attempt": context.job.attempt}
    await Effect.objects.acreate(job=context.task_result.id, attempt=context.attempt)
    await Interval.objects.acreate(key=f"coroutine {key}/{LIMIT}", **fence)
    await asyncio.sleep(seconds)
    await Interval.objects.filter(**fence).aupdate(ended_at=Now())


def occupy(context, seconds, *keys):
    mark(context)
    fence = {"job": context.task_result.id, "attempt": context.job.attempt}
    Interval.objects.bulk_create([Interval(key=key, **fence) for key in keys])
    time.sleep(seconds)
    Interval.objects.filter(**fence).update(ended_at=Now())


@task(
    concurrency=(limit(1, key=lambda account: account), limit(4, group="bank")),
    takes_context=True,
    **RETRIED,
)
def effect_within_two_limits(context, account, seconds):
    occupy(context, seconds, f"{account}/1", "bank/4")


@task(concurrency=limit(3, group="bank"), takes_context=True, **RETRIED)
def effect_within_the_same_group(context, seconds):
    """Has a smaller limit than the other tasks of its group."""
    occupy(context, seconds, "bank/3")


@task(concurrency=limit(4, group="bank"), takes_context=True, **RETRIED)
def effect_before_expiry(context, expires_at, seconds):
    """Leave the milliseconds by which it started too late."""
    late = datetime.now(timezone.utc) - datetime.fromisoformat(expires_at)
    leave(context, max(late, timedelta(0)) // timedelta(milliseconds=1))
    occupy(context, seconds, "bank/4")
    fail_at_times(context)


@task(takes_context=True, **RETRIED)
def effect_of_much(context, text, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, **RETRIED)
def effect_at_will(context, seconds):
    """Operators discard, stop and retry it. At a late failure, a stop may not interrupt it."""
    mark(context)
    time.sleep(seconds)
    fail_at_times(context)


@task(takes_context=True, **RETRIED)
def effect_at_will_and_short(context):
    """Is claimed in groups: some jobs are stopped before they start, and released."""
    mark(context)


OPERATED = [effect_at_will.module_path, effect_at_will_and_short.module_path]


@task(takes_context=True, **RETRIED)
def effect_that_opens_a_batch(context, seconds):
    """May die, or be interrupted by a deploy, inside the batch block."""
    mark(context)
    with batch(on_finish=effect_after_a_batch):
        for _ in range(3):
            effect.enqueue(0.05)
            time.sleep(seconds)


@task(takes_context=True, **RETRIED)
def first_stage(context, parts):
    leave(context, 0)
    return parts


@task(takes_context=True, **RETRIED)
def second_stage(context, parts):
    leave(context, 1)
    return FanOut(list(range(parts))) if parts else "on"


@task(concurrency=limit(LIMIT, key=lambda part: part), takes_context=True, **RETRIED)
def third_stage(context, part):
    leave(context, 2)


@task(takes_context=True, **RETRIED)
def effect_that_adds_to_its_batch(context, seconds):
    mark(context)
    with context.batch:
        effect.enqueue(seconds)


@task(takes_context=True, **RETRIED)
def effect_after_a_batch(context, batch_id):
    mark(context)


@task(takes_context=True, **RETRIED)
def effect_of_a_time(context):
    mark(context)


PIPELINE = pipeline(first_stage, second_stage, third_stage)


def leave(context, value):
    Mark.objects.create(job=context.task_result.id, attempt=context.job.attempt, value=value)
