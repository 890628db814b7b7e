"""What the jobs do. Each system makes tasks of these functions in its own way."""

from __future__ import annotations

import asyncio
import os
import time

from django.conf import settings
from django.db.models import F

from ..systems import Unsupported, system


def task(function):
    try:
        return system(settings.BENCH_SYSTEM).task(function)
    except Unsupported as error:
        return error


@task
def noop():
    pass


@task
def carry(payload):
    pass


@task
def pay(account):
    """One read and one write, as a small real job has them."""
    from .models import Account

    found = Account.objects.get(pk=account)
    Account.objects.filter(pk=found.pk).update(balance=F("balance") + 1)


@task
def stamp(number):
    """Note when it started."""
    line = f"{number} {time.monotonic()}\n".encode()
    with open(os.environ["BENCH_STAMPS"], "ab", buffering=0) as file:
        file.write(line)


@task
async def wait():
    await asyncio.sleep(0.1)
