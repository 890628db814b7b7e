"""Tasks that mind the time, and say how far they are."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import datetime, timedelta

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection
from django.utils import timezone

from django_dbqueue import Constant, task

from .models import Run


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


logger = logging.getLogger("shop.orders")

DELAYS = {
    "minute": timedelta(minutes=1),
    "negative": -1,
    "nan": float("nan"),
    "text": "soon",
    "true": True,
    "naive": datetime(2030, 1, 1),
    "century": timedelta(days=40_000),
}


@task(expires=timedelta(minutes=10))
def greet(name):
    Run.objects.create(job=f"greeted {name}")
    return name


@task(expires=timedelta(minutes=10), max_attempts=5, backoff=Constant(delay=3600, jitter=0))
def greet_again_in_an_hour():
    raise ConnectionError("the server is down")


def _delay(how):
    return timezone.now() + timedelta(hours=1) if how == "time" else DELAYS.get(how, how)


@task(takes_context=True)
def snooze(context, how=60, times=1):
    if context.attempt <= times:
        try:
            Run.objects.create(job=f"attempt {context.attempt}")
            context.snooze(_delay(how))
        except Exception:
            Run.objects.create(job="swallowed")
            raise
    return context.attempt


@task(takes_context=True)
async def snooze_async(context, how=60, times=1):
    if context.attempt <= times:
        await asyncio.sleep(0)
        context.snooze(_delay(how))
    return context.attempt


@task(takes_context=True, atomic=True)
def snooze_atomically(context):
    Run.objects.create(job="rolled back")
    context.snooze(60)


# What no argument may hold.
REASONS = {"nul": "the shop\x00 is closed"}


def _ask_again(context, delay, reason, handled):
    try:
        if handled:
            raise ConnectionError(f"no answer from server {context.attempt}")
        context.retry(delay=delay, reason=REASONS.get(reason, reason))
    except ConnectionError:
        context.retry(delay=delay, reason=REASONS.get(reason, reason))


@task(
    takes_context=True,
    max_attempts=3,
    retry_on=(ZeroDivisionError,),
    discard_on=(BaseException,),
    backoff=lambda e, r: 1234.0,
)
def ask_again(context, delay=0, reason="", handled=False):
    _ask_again(context, delay, reason, handled)


@task(takes_context=True, max_attempts=3, retry_on=(ZeroDivisionError,))
async def ask_again_async(context, delay=0, reason="", handled=False):
    await asyncio.sleep(0)
    _ask_again(context, delay, reason, handled)


@task(
    takes_context=True,
    max_attempts=3,
    backoff=lambda error, result: 77.0 if isinstance(error, ConnectionError) else None,
)
def ask_the_back_off(context, handled):
    _ask_again(context, None, "", handled)


def _note(context, steps):
    for number in range(steps):
        context.progress(number + 1, steps, f"step {number + 1}")


@task(takes_context=True)
def note(context, steps):
    _note(context, steps)


@task(takes_context=True)
async def note_async(context, steps):
    _note(context, steps)


@task(takes_context=True, atomic=True)
def note_atomically(context, fail=False, seconds=0.0):
    context.progress(1, 2, "half")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    if fail:
        raise ValueError("after the note")


@task(takes_context=True, max_attempts=2, backoff=Constant(delay=0, jitter=0))
def note_once(context):
    if context.attempt == 1:
        context.progress(1, 4)
        raise ValueError("a quarter is done")


@task(takes_context=True)
def note_until(context, name):
    """Until a row of that name is there."""
    done = 0
    try:
        while not Run.objects.filter(job=name).exists():
            done += 1
            context.progress(done, note="on and on")
            time.sleep(0.01)
    except BaseException as error:
        connection.close()  # The exception may have come in the middle of an answer.
        Run.objects.create(job=f"ended by {type(error).__name__}")
        raise


@task(takes_context=True)
async def note_until_async(context, name):
    context.progress(1, 3)
    while not await Run.objects.filter(job=name).aexists():
        await asyncio.sleep(0.01)
    context.progress(3, 3)


@task(takes_context=True, delete_on_success=True)
def note_and_leave_no_trace(context):
    context.progress(1, 1)


@task(takes_context=True)
def note_badly(context, done, total=None, note=""):
    context.progress(float(done) if isinstance(done, str) else done, total, note)


def say(name, number):
    for each in range(number):
        logger.warning("%s says %d", name, each)


@task
def talk(name, number=1, fail=False):
    say(name, number)
    if fail:
        raise ValueError("no more words")


@task
async def talk_async(name, number=1):
    for each in range(number):
        logger.warning("%s says %d", name, each)
        await asyncio.sleep(0.001)
    await asyncio.create_task(_talk_beside(name))
    await sync_to_async(say)(f"{name} in a thread", 1)


async def _talk_beside(name):
    logger.warning("%s beside", name)


@task
def talk_across(name):
    async_to_sync(_talk_beside)(name)


@task
def talk_at_length(how):
    match how:
        case "long":
            logger.warning("x" * 1_000_000)
        case "many":
            for number in range(100):
                logger.warning("%d %s", number, "y" * 1_500)
        case "nul":
            logger.warning("a \x00 and a \ud800 <script>alert(1)</script>")
        case "broken":
            logger.warning("%d", "no number")
        case "without a text":
            logger.warning(NoText())
        case "error":
            try:
                raise ValueError("inside")
            except ValueError:
                logger.exception("it was caught")
        case "quiet":
            logger.debug("a line below the level")


@task
def talk_in_a_thread_of_its_own():
    thread = threading.Thread(target=say, args=("a thread", 1))
    thread.start()
    thread.join()
    say("the task", 1)
