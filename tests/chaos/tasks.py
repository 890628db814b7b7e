"""Jobs that leave a mark in the world each time they run."""

from __future__ import annotations

import asyncio
import random
import time

from django_dbqueue import Constant, task

from ..models import Effect

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
    time.sleep(3600 if random.random() < 0.3 else seconds)


ALL = [effect, effect, effect, effect_of_a_coroutine, effect_with_its_end, effect_once]
