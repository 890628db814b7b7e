"""Jobs that leave a mark in the world each time they run."""

from __future__ import annotations

import asyncio
import random
import time

from django.db.models.signals import post_delete, post_save, pre_delete, pre_save

from django_dbqueue import Constant, FanOut, batch, limit, pipeline, task
from django_dbqueue.models.expressions import Now

from ..models import Effect, Interval, Mark

# The database is killed under the tasks too: what fails for that is tried again.
AGAIN = {"max_attempts": 1000, "backoff": Constant(delay=0.5)}


def see(sender, **kwargs):
    """Of a project that looks at each change of any model."""


for signal in (pre_save, post_save, pre_delete, post_delete):
    signal.connect(see)


def mark(context):
    Effect.objects.create(job=context.task_result.id, attempt=context.attempt)


@task(takes_context=True, **AGAIN)
def effect(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, **AGAIN)
async def effect_of_a_coroutine(context, seconds):
    await Effect.objects.acreate(job=context.task_result.id, attempt=context.attempt)
    await asyncio.sleep(seconds)


@task(takes_context=True, atomic=True, **AGAIN)
def effect_with_its_end(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, on_lost="fail")
def effect_once(context, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, timeout=1, **AGAIN)
def effect_that_hangs_at_first(context, seconds):
    mark(context)
    time.sleep(3600 if context.job.attempt <= 2 and random.random() < 0.3 else seconds)


ALL = [effect, effect, effect, effect_of_a_coroutine, effect_with_its_end, effect_once]


# Of keys, limits, pipelines, batches and schedules. The marks say which attempt of the row it is.

# What runs under a limit leaves intervals that say it after a slash.
LIMIT = 2
# How long a debounced call is put off, in seconds.
PUT_OFF = 3


class Again(Exception):
    """The attempt has failed, and is tried again."""


def fail_at_times(context):
    """Once in a run: the pause after a lost attempt is three times as long for each failure before it."""
    if not context.job.failures and random.random() < 0.5:
        raise Again


@task(key=lambda name: name, on_conflict="replace", takes_context=True, **AGAIN)
def effect_of_a_debounce(context, name):
    """It is asked for while it runs, also in attempts that fail or are interrupted by a deploy."""
    mark(context)
    time.sleep(random.uniform(1, 3))
    fail_at_times(context)


@task(key=lambda name: name, takes_context=True, **AGAIN)
def effect_of_a_version(context, name, version):
    leave(context, version)
    time.sleep(random.uniform(0.2, 0.8))


@task(concurrency=limit(LIMIT, key=lambda key: key), takes_context=True, **AGAIN)
def effect_within_a_limit(context, key, seconds):
    occupy(context, seconds, f"{key}/{LIMIT}")


def occupy(context, seconds, *keys):
    mark(context)
    fence = {"job": context.task_result.id, "attempt": context.job.attempt}
    Interval.objects.bulk_create([Interval(key=key, **fence) for key in keys])
    time.sleep(seconds)
    Interval.objects.filter(**fence).update(ended_at=Now())


@task(
    concurrency=(limit(1, key=lambda account: account), limit(4, group="bank")),
    takes_context=True,
    **AGAIN,
)
def effect_within_two_limits(context, account, seconds):
    occupy(context, seconds, f"{account}/1", "bank/4")


@task(concurrency=limit(3, group="bank"), takes_context=True, **AGAIN)
def effect_within_the_same_group(context, seconds):
    """It allows fewer at a time than the others of its group."""
    occupy(context, seconds, "bank/3")


@task(takes_context=True, **AGAIN)
def effect_of_much(context, text, seconds):
    mark(context)
    time.sleep(seconds)


@task(takes_context=True, **AGAIN)
def effect_at_will(context, seconds):
    """Operators call it off, stop it, and retry it. Where it fails at the end, a stop may come too late to interrupt it."""
    mark(context)
    time.sleep(seconds)
    fail_at_times(context)


@task(takes_context=True, **AGAIN)
def effect_at_will_and_short(context):
    """Many are claimed together: some are stopped before they begin, and given back."""
    mark(context)


AT_WILL = [effect_at_will.module_path, effect_at_will_and_short.module_path]


@task(takes_context=True, **AGAIN)
def effect_that_opens_a_batch(context, seconds):
    """It may die, or be stopped by a deploy, inside the block."""
    mark(context)
    with batch(on_finish=effect_after_a_batch):
        for _ in range(3):
            effect.enqueue(0.05)
            time.sleep(seconds)


@task(takes_context=True, **AGAIN)
def first_stage(context, parts):
    leave(context, 0)
    return parts


@task(takes_context=True, **AGAIN)
def second_stage(context, parts):
    leave(context, 1)
    return FanOut(list(range(parts))) if parts else "on"


@task(concurrency=limit(LIMIT, key=lambda part: part), takes_context=True, **AGAIN)
def third_stage(context, part):
    leave(context, 2)


@task(takes_context=True, **AGAIN)
def effect_that_adds_to_its_batch(context, seconds):
    mark(context)
    with context.batch:
        effect.enqueue(seconds)


@task(takes_context=True, **AGAIN)
def effect_after_a_batch(context, batch_id):
    mark(context)


@task(takes_context=True, **AGAIN)
def effect_of_a_time(context):
    mark(context)


WALK = pipeline(first_stage, second_stage, third_stage)


def leave(context, value):
    Mark.objects.create(job=context.task_result.id, attempt=context.job.attempt, value=value)
