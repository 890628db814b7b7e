"""How many threads of a worker take jobs, and which of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sized

from .job_cpu_time import JobCpuTime
from .run_times import RunTimes
from .task_call import ThreadCall


class ActiveThreads:
    """Lets some threads take jobs while the others sleep.

    The interpreter runs one thread at a time. Each further thread with short jobs costs switches
    between threads, and each further thread whose jobs wait for something uses that time. Which of
    the two holds is measured: ``ThreadLimit`` finds the limit with the highest rate of jobs.

    A thread that has ended a job takes the next one without waking another thread. A thread whose
    job is long does not count: another one takes its place, at once if the task usually is. A job
    is long if it takes more than LONG seconds. While the process uses a whole core, jobs take long
    because they wait for each other, and a further thread would make all of them slower: then only
    a job that has computed for that long itself is long.

    The thread that fell asleep last wakes first, so that the others, and their connections, stay
    idle.
    """

    # Seconds. In these intervals the running jobs are looked at, while jobs wait and threads sleep.
    LONG = 0.005
    # Share of one core from which on threads wait for each other, and the weight of its last value.
    BUSY, WEIGHT = 0.8, 0.3
    # Seconds of each measurement of the rate.
    WINDOW = 0.25

    def __init__(
        self,
        threads: int,
        waiting: Sized,
        running: Mapping[int, ThreadCall],
        run_times: RunTimes,
    ) -> None:
        self._limit = ThreadLimit(threads)
        self._waiting, self._running, self._run_times = waiting, running, run_times
        self._cpu, self._cpu_times = JobCpuTime(), RunTimes()
        self._threads, self._number = threads, self._limit.number
        self._lock = threading.Lock()
        # Threads that take jobs and count, and threads that sleep, each with the lock it waits for.
        self._active: set[int] = set()
        self._asleep: list[tuple[int, threading.Lock]] = []
        self._has_backlog = threading.Event()
        self._closed = False
        # Number of jobs that have ended.
        self._ended = 0
        # Share of one core that the process uses, while jobs wait.
        self._share = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="active-threads", daemon=True).start()

    @property
    def number(self) -> int:
        """The number of threads that take jobs, not counting those with long ones."""
        return self._number

    @property
    def is_one_too_many(self) -> bool:
        """Whether this thread is to sleep before it takes another job."""
        return threading.get_ident() not in self._active or len(self._active) > self._number

    def sleep(self) -> bool:
        """Sleep until there is a job for this thread. Return False if the pool is closed."""
        thread, lock = threading.get_ident(), threading.Lock()
        with self._lock:
            self._active.discard(thread)
            if self._closed and not self._waiting:
                return False
            if self._waiting and len(self._active) < self._number:
                self._active.add(thread)
                return True
            if self._waiting:  # The active threads may have long jobs.
                self._has_backlog.set()
            lock.acquire()
            self._asleep.append((thread, lock))
        lock.acquire()
        return True

    def wake(self) -> None:
        """Wake as many threads as there are waiting jobs, and as the limit allows."""
        with self._lock:
            number = min(len(self._waiting), self._number - len(self._active))
            for _ in range(min(number, len(self._asleep))):
                thread, lock = self._asleep.pop()
                self._active.add(thread)
                lock.release()
            if len(self._waiting) > max(number, 0):
                self._has_backlog.set()

    def enter(self) -> None:
        """Add this thread."""
        self._cpu.enter()

    def begin(self, task: str) -> None:
        """Note that this thread starts a job. If it is long, let another thread take jobs."""
        usual = (self._cpu_times if self._is_busy else self._run_times).estimate(task)
        if usual is not None and usual > self.LONG:
            self._active.discard(threading.get_ident())
            if self._waiting:
                self.wake()

    def end(self, task: str, run_time: float) -> None:
        """Note that this thread has ended its job, which took ``run_time`` seconds."""
        self._cpu_times.observe(task, self._cpu.end(run_time))
        self._ended += 1

    def close(self) -> None:
        """Let all threads go on until no job waits, and then end."""
        with self._lock:
            self._closed, self._number = True, self._threads
            while self._asleep:
                thread, lock = self._asleep.pop()
                self._active.add(thread)
                lock.release()
        self._has_backlog.set()

    def _run(self) -> None:
        while self._has_backlog.wait() and not self._closed:
            self._has_backlog.clear()
            self._follow_backlog()

    def _follow_backlog(self) -> None:
        """Look after the threads as long as jobs wait."""
        self._share = 0.0
        while self._waiting and not self._closed:
            began, ended, used = time.monotonic(), self._ended, time.process_time()
            is_full = True
            while (left := began + self.WINDOW - time.monotonic()) > 0:
                self._measure_share(min(left, self.LONG) if self._asleep else left)
                is_full = is_full and bool(self._waiting)
                self._replace_long()
            if is_full:
                seconds = time.monotonic() - began
                rate, share = (
                    (self._ended - ended) / seconds,
                    (time.process_time() - used) / seconds,
                )
                with self._lock:
                    if not self._closed:
                        self._number = self._limit.after(rate, share)
                self.wake()

    def _measure_share(self, seconds: float) -> None:
        began, used = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.monotonic() - began)
        self._share += (share - self._share) * self.WEIGHT

    @property
    def _is_busy(self) -> bool:
        return self._share > self.BUSY

    def _replace_long(self) -> None:
        if self._asleep and self._waiting:
            since = time.monotonic() - self.LONG
            for thread, call in list(self._running.items()):
                if call.began < since and (not self._is_busy or self._cpu.of(thread) > self.LONG):
                    self._active.discard(thread)
            self.wake()


class ThreadLimit:
    """Finds the number of threads with the highest rate, by trying the numbers beside it.

    This is hill climbing, as in the thread pool of .NET. A trial lasts for one measurement. The
    longer no trial has been better, the more measurements lie between two of them.
    """

    # A larger number has to be better by this factor, as it costs memory and connections. A smaller
    # one may be a little worse.
    BETTER, AS_GOOD = 1.03, 0.98
    # Number of measurements between two trials: at first, and at most.
    SOON, LATE = 2, 64
    # A rate that differs by this factor is one of other jobs.
    OTHER = 1.4
    # Share of one core below which threads mostly wait: a smaller number cannot be better.
    IDLE = 0.6
    # Number to begin with: two threads are never much slower than one, and while threads mostly
    # wait, each measurement doubles them.
    FIRST = 2

    def __init__(self, most: int) -> None:
        self._levels = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        self._here = self._levels.index(min(self.FIRST, most))
        self._trial: int | None = None
        self._rate = 0.0
        self._step, self._pause, self._left = -1, self.SOON, self.SOON

    @property
    def number(self) -> int:
        """Number of threads for the next measurement."""
        return self._levels[self._here if self._trial is None else self._trial]

    def after(self, rate: float, busy: float) -> int:
        """Return the number of threads for the next measurement.

        rate: jobs per second in the last one. busy: share of one core that the process used in it.
        """
        if self._trial is not None:
            self._judge(self._trial, rate)
        elif not self._rate / self.OTHER < rate < self._rate * self.OTHER:
            self._rate, self._pause, self._left = rate, self.SOON, 1
        else:
            self._rate += (rate - self._rate) / 2
        self._left -= 1
        if self._left <= 0:
            self._trial = self._beside(busy)
            self._left = self._pause
        return self.number

    def _judge(self, trial: int, rate: float) -> None:
        factor = self.BETTER if trial > self._here else self.AS_GOOD
        if rate >= self._rate * factor:
            self._here, self._rate = trial, rate
            self._pause, self._left = self.SOON, 1
        else:
            self._step = -self._step
            self._pause = self._left = min(self.LATE, self._pause * 2)
        self._trial = None

    def _beside(self, busy: float) -> int | None:
        """Return the index of the next trial, or None if there is none."""
        steps = (1,) if busy < self.IDLE else (self._step, -self._step)
        for step in steps:
            if 0 <= self._here + step < len(self._levels):
                return self._here + step
        return None
