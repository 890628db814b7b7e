"""Jobs that leave a mark in the world each time they run."""

from __future__ import annotations

import asyncio
import random
import time

from django_dbqueue import Constant, FanOut, limit, pipeline, task
from django_dbqueue.models.expressions import Now

from ..models import Effect, Interval, Mark

# The database is killed under the tasks too: what fails for that is tried again.
AGAIN = {"max_attempts": 1000, "backoff": Constant(delay=0.5)}


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

LIMIT = 2


@task(key=lambda name: name, takes_context=True, **AGAIN)
def effect_of_a_version(context, name, version):
    leave(context, version)
    time.sleep(random.uniform(0.2, 0.8))


@task(concurrency=limit(LIMIT, key=lambda key: key), takes_context=True, **AGAIN)
def effect_within_a_limit(context, key, seconds):
    mark(context)
    interval = Interval.objects.create(key=key, job=context.task_result.id, attempt=context.job.attempt)
    time.sleep(seconds)
    Interval.objects.filter(pk=interval.pk).update(ended_at=Now())


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
def effect_after_a_batch(context, batch):
    mark(context)


@task(takes_context=True, **AGAIN)
def effect_of_a_time(context):
    mark(context)


WALK = pipeline(first_stage, second_stage, third_stage)


def leave(context, value):
    Mark.objects.create(job=context.task_result.id, attempt=context.job.attempt, value=value)
