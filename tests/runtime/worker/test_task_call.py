"""A call is ended from outside while its own code runs, and neither before nor after."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from django_dbqueue.exceptions import Interrupted, Stopped, TimedOut
from django_dbqueue.models import Job
from django_dbqueue.runtime.worker.task_call import CoroutineCall, ThreadCall


@pytest.fixture
def job():
    return Job(task="t", queue="q")


def spin(seconds: float) -> str:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return "done"


def test_it_is_ended_between_two_of_its_instructions(job):
    call = ThreadCall(job)
    threading.Timer(0.1, call.ask, [TimedOut]).start()

    with pytest.raises(TimedOut):
        call.run(lambda: spin(20))

    assert call.should_stop


def test_what_is_asked_before_it_begins_is_raised_at_its_beginning(job):
    call = ThreadCall(job)
    call.ask(Stopped)

    with pytest.raises(Stopped):
        call.run(lambda: pytest.fail("It ran."))


def test_what_is_asked_after_its_end_reaches_nobody(job):
    call = ThreadCall(job)
    assert call.run(lambda: "done") == "done"
    call.ask(TimedOut)

    assert spin(0.05) == "done"


def test_only_the_first_reason_counts(job):
    call = ThreadCall(job)
    call.ask(Stopped)
    call.ask(TimedOut)

    assert call.reason is Stopped


def test_at_whatever_moment_it_is_asked_nothing_is_raised_outside_of_it(job):
    """The exception is under way when the call ends, in each of the instructions of its end."""
    ended = [0, 0]
    calls: list[ThreadCall] = []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            if calls:
                calls[-1].ask(TimedOut)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for _ in range(3000):
            call = ThreadCall(job)
            calls.append(call)
            try:
                call.run(lambda: spin(random.uniform(0, 0.0005)))
                ended[0] += 1
            except TimedOut:
                ended[1] += 1
            calls.clear()
    finally:
        stop.set()
        asker.join()

    assert sum(ended) == 3000
    assert ended[1] > 10


def test_where_it_is_can_be_seen(job):
    call, inside = ThreadCall(job), threading.Event()

    def wait():
        inside.set()
        time.sleep(0.5)

    runner = threading.Thread(target=call.run, args=[wait])
    runner.start()
    inside.wait(5)

    assert "time.sleep(0.5)" in call.stack()
    assert "runtime/worker/task_call.py" not in call.stack()
    runner.join()


class TestOfACoroutine:
    def test_it_is_cancelled_where_it_awaits(self, job):
        call, seen = CoroutineCall(job), []

        async def wait():
            try:
                await asyncio.sleep(20)
            finally:
                seen.append("cleared up")

        async def main():
            asyncio.get_running_loop().call_later(0.05, call.ask, Interrupted)
            asyncio.get_running_loop().call_later(0.02, lambda: seen.append(call.stack()))
            with pytest.raises(Interrupted):
                await call.run(wait)
            await asyncio.sleep(0.02)  # Nothing is under way to whoever called it.

        asyncio.run(main())
        assert "await asyncio.sleep(20)" in seen[0]
        assert seen[1] == "cleared up"

    def test_one_that_was_cancelled_by_others_says_so(self, job):
        async def cancelled():
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(CoroutineCall(job).run(cancelled))

    def test_what_is_asked_after_its_end_reaches_nobody(self, job):
        call = CoroutineCall(job)

        async def main():
            async def done():
                return "done"

            assert await call.run(done) == "done"
            call.ask(Interrupted)
            await asyncio.sleep(0.02)

        asyncio.run(main())
