"""Steps on the database thread that cancelled asyncio tasks complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from asgiref.sync import sync_to_async

R = TypeVar("R")


async def run_to_completion(step: Callable[[], R]) -> tuple[R, asyncio.CancelledError | None]:
    """Run a step on the database thread, despite cancellations of the asyncio task.

    Return its result, and the last cancellation, which the caller raises again or drops.
    """
    # If its own asyncio task is cancelled, as by the end of asyncio.run(), the step may run or not.
    once = cache(step)
    cancellation = None
    while True:
        running = asyncio.ensure_future(sync_to_async(once)())
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancellation = error
        if not running.cancelled():
            return running.result(), cancellation
