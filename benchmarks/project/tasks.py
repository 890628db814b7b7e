"""Functions of the jobs. Each system makes tasks of them in its own way."""

from __future__ import annotations

import asyncio
import os
import time

from django.conf import settings
from django.db.models import F

from ..systems import Unsupported, system


def task(function):
    return made(system(settings.BENCH_SYSTEM).task, function)


def one_at_a_time(function):
    return made(system(settings.BENCH_SYSTEM).limited, function)


def two_of_each_key(function):
    return made(system(settings.BENCH_SYSTEM).limited_by_key, function)


def made(make, function):
    try:
        return make(function)
    except Unsupported as error:
        return error


@task
def noop():
    pass


@one_at_a_time
def limited():
    pass


@two_of_each_key
def of_customer(customer):
    pass


@task
def carry(payload):
    pass


@task
def pay(account):
    """Do one read and one write, like a small real job."""
    from .models import Account

    found = Account.objects.get(pk=account)
    Account.objects.filter(pk=found.pk).update(balance=F("balance") + 1)


@task
def compute():
    """Hold the interpreter for about 50 µs."""
    sum(range(4000))


@task
def append():
    """Append a byte to a file, and so release the interpreter, as almost every job does."""
    with open(f"{os.environ['BENCH_STAMPS']}-bytes", "ab", buffering=0) as file:
        file.write(b".")


@task
def sleep():
    """Wait for 5 ms, like a call of a fast service."""
    time.sleep(0.005)


@task
def stamp(number):
    """Note the start time."""
    note(number)


waiting = most = 0


@task
async def wait(seconds):
    """Note each new maximum of jobs that wait at a time."""
    global waiting, most
    waiting += 1
    if waiting > most:
        most = waiting
        note(most)
    await asyncio.sleep(seconds)
    waiting -= 1


def note(number):
    line = f"{number} {time.monotonic()}\n".encode()
    with open(os.environ["BENCH_STAMPS"], "ab", buffering=0) as file:
        file.write(line)
