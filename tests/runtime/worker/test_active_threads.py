"""The number of threads that take jobs: the one with the highest rate, and no job waits for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from django_dbqueue.core.options import Options
from django_dbqueue.runtime.worker import job_cpu_time
from django_dbqueue.runtime.worker.active_threads import ActiveThreads, ThreadLimit
from django_dbqueue.runtime.worker.job_cpu_time import JobCpuTime
from django_dbqueue.runtime.worker.run_times import RunTimes
from django_dbqueue.runtime.worker.thread_pool import ThreadPool

from ...conftest import LONG, until

# Rates of jobs with each number of threads, and the share of one core that they use.
ALIKE: dict[int, tuple[float, float]] = dict.fromkeys((1, 2, 4, 8, 16), (6000, 1.0))
SHORT = {1: (5400, 0.95), 2: (5200, 1.0), 4: (4300, 1.0), 8: (3700, 1.0), 16: (3100, 1.0)}
QUERIES = {1: (760, 0.7), 2: (1000, 1.0), 4: (980, 1.0), 8: (890, 1.0), 16: (760, 1.0)}
WAITS: dict[int, tuple[float, float]] = {n: (190 * n, 0.02 * n) for n in (1, 2, 4, 8, 16)}


def mean_rate(limit: ThreadLimit, rates: dict[int, tuple[float, float]], number: int) -> float:
    """Return the mean rate of as many measurements as there are in a time."""
    found = []
    for _ in range(number):
        rate, busy = rates[limit.number]
        found.append(rate)
        limit.after(rate, busy)
    return sum(found) / number


@pytest.mark.parametrize("rates", [ALIKE, SHORT, QUERIES, WAITS])
@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16])
def test_rate_is_near_that_of_the_best_number(
    rates: dict[int, tuple[float, float]], threads: int
) -> None:
    allowed = {number: rate for number, rate in rates.items() if number <= threads}
    limit = ThreadLimit(threads)
    best = max(rate for rate, _ in allowed.values())

    # Ten seconds from the start on, and then a long time.
    assert mean_rate(limit, allowed, 40) >= 0.94 * best
    assert mean_rate(limit, allowed, 400) >= 0.97 * best


def test_other_jobs_change_the_number_within_seconds() -> None:
    limit = ThreadLimit(16)
    mean_rate(limit, SHORT, 400)
    threads = limit.after(*SHORT[1])
    assert threads <= 2

    for _ in range(16):  # Four seconds.
        threads = limit.after(*WAITS[threads])

    assert threads == 16


def test_number_that_is_no_power_of_two_is_tried() -> None:
    rates = {1: (300.0, 1.0), 2: (350.0, 1.0), 3: (400.0, 1.0)}

    assert mean_rate(ThreadLimit(3), rates, 400) > 390


@contextmanager
def pool_of(
    threads: int, run: Callable[[Any], None], usual: float | None = None
) -> Iterator[ThreadPool]:
    run_times = RunTimes()
    if usual is not None:
        run_times.observe("a.task", usual)
    status: Any = SimpleNamespace(mark_claimed=lambda pk: None, mark_started=lambda pk: None)
    pool = ThreadPool(Options(threads=threads), status, run_times, run)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def a_job(**given: Any) -> Any:
    pk = uuid4()
    return SimpleNamespace(
        pk=pk,
        task="a.task",
        fence=(pk, 1, 1),
        slot_group=None,
        size=0,
        limits=None,
        clock=time.monotonic(),
        **given,
    )


# Of an unknown task, a job is looked at twice at most. A usual time is known beforehand.
@pytest.mark.parametrize(("usual", "longest"), [(None, 2 * ActiveThreads.LONG), (1.0, 0.0)])
def test_job_does_not_wait_for_a_long_one_while_a_thread_sleeps(
    usual: float | None, longest: float
) -> None:
    """Whatever the limit is: here one thread, which long jobs occupy one after the other."""
    started: dict[int, float] = {}
    end, all_started = threading.Event(), threading.Event()

    def run(call: Any) -> None:
        started[call.job.number] = time.monotonic()
        if len(started) == 8:
            all_started.set()
        end.wait(LONG)

    with pool_of(8, run, usual) as pool:
        pool._active._limit = SimpleNamespace(after=lambda rate, busy: 1)  # type: ignore[assignment]
        pool._active._number = 1
        began = time.monotonic()
        pool.put([a_job(number=number) for number in range(8)])
        assert all_started.wait(LONG)
        end.set()

    delays = [started[number] - began for number in range(8)]
    assert max(delays) < 7 * longest + 0.5
    assert delays == sorted(delays)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_each_job_runs_once_and_none_is_left(threads: int) -> None:
    ran: list[int] = []

    def run(call: Any) -> None:
        if call.job.number % 50 == 0:
            time.sleep(0.01)
        ran.append(call.job.number)

    with pool_of(threads, run) as pool:
        for start in range(0, 5000, 100):
            pool.put([a_job(number=number) for number in range(start, start + 100)])
            time.sleep(0.001)
        end = time.monotonic() + LONG
        while len(ran) < 5000 and time.monotonic() < end:
            time.sleep(0.01)

    assert sorted(ran) == list(range(5000))


def test_closed_pool_runs_what_it_has_and_its_threads_end() -> None:
    ran: list[int] = []
    with pool_of(4, lambda call: ran.append(call.job.number)) as pool:
        pool._active._number = 1
        pool.put([a_job(number=number) for number in range(200)])
    end = time.monotonic() + LONG
    while any(t.name.startswith("job-") and t.is_alive() for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(ran) == 200


def compute_until(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(1000))


@pytest.mark.parametrize(
    ("is_busy", "first", "is_replaced"),
    [
        (False, lambda end: end.wait(LONG), True),
        (True, lambda end: end.wait(LONG), False),
        (True, compute_until, True),
    ],
    ids=["waits, core idle", "waits, core busy", "computes, core busy"],
)
def test_job_that_waits_is_replaced_only_while_the_core_is_idle(
    monkeypatch: pytest.MonkeyPatch,
    is_busy: bool,
    first: Callable[[threading.Event], object],
    is_replaced: bool,
) -> None:
    """On a busy core, jobs wait for each other: with more threads, all of them take longer still."""
    monkeypatch.setattr(ActiveThreads, "_is_busy", property(lambda self: is_busy))
    end, second_started = threading.Event(), threading.Event()

    def run(call: Any) -> None:
        if call.job.number == 0:
            first(end)
        else:
            second_started.set()

    with pool_of(8, run, usual=1.0) as pool:
        pool._active._limit = SimpleNamespace(after=lambda rate, busy: 1)  # type: ignore[assignment]
        pool._active._number = 1
        pool.put([a_job(number=0), a_job(number=1)])
        assert second_started.wait(LONG if is_replaced else 0.2) is is_replaced
        end.set()
        assert second_started.wait(LONG)


def test_task_that_computes_for_long_is_replaced_at_once_on_a_busy_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ActiveThreads, "_is_busy", property(lambda self: True))
    monkeypatch.setattr(ActiveThreads, "_replace_long", lambda self: None)
    end, started = threading.Event(), threading.Event()

    def run(call: Any) -> None:
        if call.job.number == 1:
            started.set()
        elif call.job.number == 0:
            compute_until(end)

    with pool_of(8, run) as pool:
        pool._active._cpu_times.observe("a.task", 1.0)
        pool._active._limit = SimpleNamespace(after=lambda rate, busy: 1)  # type: ignore[assignment]
        pool._active._number = 1
        pool.put([a_job(number=0), a_job(number=1)])
        assert started.wait(LONG)
        end.set()


def test_processor_time_of_another_thread_is_that_since_its_last_job() -> None:
    cpu, ready, end = JobCpuTime(), threading.Event(), threading.Event()

    def work() -> None:
        cpu.enter()
        compute_for(0.05)
        assert 0.05 <= cpu.end(LONG) < 0.07
        compute_for(0.02)
        ready.set()
        end.wait(LONG)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(LONG)
    assert thread.ident
    assert 0.02 <= cpu.of(thread.ident) < 0.05
    end.set()
    thread.join()
    # The system's thread ends a moment later.
    until(lambda: cpu.of(thread.ident or 0) == float("inf"))
    assert cpu.of(12345) == float("inf")


def test_processor_time_is_not_read_for_each_short_job(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used, readings = [100.0], [5.0], [0]

    def read() -> float:
        readings[0] += 1
        return used[0]

    monkeypatch.setattr(job_cpu_time.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(job_cpu_time.time, "thread_time", read)
    cpu = JobCpuTime()
    cpu.enter()

    def job(run_time: float, computes: float) -> float:
        clock[0] += run_time
        used[0] += computes
        return cpu.end(run_time)

    assert [job(0.0001, 0.0001) for _ in range(9)] == [0.0001] * 9
    assert readings == [1]
    # It waits for the most of its time. The processor time of the jobs before it counts, too.
    assert job(0.1, 0.002) == pytest.approx(0.0029)
    assert readings == [2]
    assert job(0.1, 0.002) == pytest.approx(0.002)
    # More than its run time it cannot have used.
    assert [job(0.0019, 0.0019), job(0.003, 0.003)] == pytest.approx([0.0019, 0.003])


def compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
