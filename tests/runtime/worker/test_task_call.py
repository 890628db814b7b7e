"""Interrupt a call from outside: only while the task's own code runs."""

from __future__ import annotations

import asyncio
import os
import random
import sys
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


def test_running_call_is_interrupted(job):
    call = ThreadCall(job)
    threading.Timer(0.1, call.interrupt, [TimedOut]).start()

    with pytest.raises(TimedOut):
        call.run(lambda: spin(20))

    assert call.should_stop


def test_interrupt_before_start_is_raised_at_start(job):
    call = ThreadCall(job)
    call.interrupt(Stopped)

    with pytest.raises(Stopped):
        call.run(lambda: pytest.fail("It ran."))


def test_interrupt_after_end_has_no_effect(job):
    call = ThreadCall(job)
    assert call.run(lambda: "done") == "done"
    call.interrupt(TimedOut)

    assert spin(0.05) == "done"


def test_first_reason_wins(job):
    call = ThreadCall(job)
    call.interrupt(Stopped)
    call.interrupt(TimedOut)

    assert call.reason is Stopped


@pytest.mark.skipif(
    sys.gettrace() is not None, reason="It would interrupt the tracer, which then keeps its lock."
)
def test_interrupt_at_any_moment_is_raised_only_inside_call(job):
    """The exception is pending when the call ends, at any of its last instructions."""
    ended = [0, 0]
    calls: list[ThreadCall] = []
    stop = threading.Event()

    def interrupt_repeatedly():
        while not stop.is_set():
            if calls:
                calls[-1].interrupt(TimedOut)

    interrupter = threading.Thread(target=interrupt_repeatedly)
    interrupter.start()
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
        interrupter.join()

    assert sum(ended) == 3000
    assert ended[1] > 10


def test_stack_shows_current_frame(job):
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


class TestCoroutineCall:
    def test_interrupt_cancels_at_await(self, job):
        call, seen = CoroutineCall(job), []

        async def wait():
            try:
                await asyncio.sleep(20)
            finally:
                seen.append("cleared up")

        def interrupt():
            seen.append(call.stack())
            call.interrupt(Interrupted)

        async def main():
            asyncio.get_running_loop().call_later(0.02, interrupt)
            with pytest.raises(Interrupted):
                await call.run(wait)
            await asyncio.sleep(0.02)  # No exception is pending for the caller.

        asyncio.run(main())
        assert "await asyncio.sleep(20)" in seen[0]
        assert seen[1] == "cleared up"

    def test_cancellation_by_others_is_propagated(self, job):
        async def cancelled():
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(CoroutineCall(job).run(cancelled))

    def test_interrupt_after_end_has_no_effect(self, job):
        call = CoroutineCall(job)

        async def main():
            async def done():
                return "done"

            assert await call.run(done) == "done"
            call.interrupt(Interrupted)
            await asyncio.sleep(0.02)

        asyncio.run(main())


def missing_program() -> None:
    os.execvp("no-such-program", ["no-such-program"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
class TestForkedChild:
    """A child process that a task has forked ends with the task's code."""

    ENDS = pytest.mark.parametrize(
        ("end", "code", "printed"),
        [
            (lambda: None, 0, ""),
            (sys.exit, 0, ""),
            (lambda: sys.exit(3), 3, ""),
            (lambda: sys.exit(-1), 255, ""),
            (lambda: sys.exit("no such order"), 1, "no such order"),
            (missing_program, 1, "FileNotFoundError"),
        ],
    )

    @staticmethod
    def forks(end):
        def forks():
            if not (child := os.fork()):
                end()
            return child

        return forks

    @staticmethod
    def exit_code_of(run) -> int:
        """Return the exit code of the child. One that comes back from the call exits with 99."""
        parent = os.getpid()
        try:
            child = run()
        finally:
            if os.getpid() != parent:
                os._exit(99)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @ENDS
    def test_child_of_function_does_not_return(self, job, end, code, printed, capfd):
        assert self.exit_code_of(lambda: ThreadCall(job).run(self.forks(end))) == code
        assert printed in capfd.readouterr().err

    @ENDS
    def test_child_of_coroutine_does_not_return(self, job, end, code, printed, capfd):
        async def forks():
            return self.forks(end)()

        assert self.exit_code_of(lambda: asyncio.run(CoroutineCall(job).run(forks))) == code
        assert printed in capfd.readouterr().err
