"""The role that claims and runs jobs."""

from __future__ import annotations

import logging
import random
import threading
import time
from inspect import iscoroutinefunction

from django.db import DatabaseError, InterfaceError

from ..backend import DatabaseBackend
from ..models import Execution, Job, Process, Settlement
from ..options import Options
from ..selector import QueueSelector
from ..tasks import load
from . import executor
from .claimer import Claimer
from .connection import close_connections, discard, prepare
from .coroutines import Coroutines
from .heartbeat import Heartbeat
from .listener import Listener
from .pool import Pool
from .settler import Settler
from .stop import Stop

logger = logging.getLogger("django_dbqueue")


class Worker:
    """Claims jobs, runs them on its threads and its event loop, and settles them."""

    # A claimed job that has not been started for so long is given back.
    STALE = 2.0

    def __init__(self, backend: DatabaseBackend, options: Options) -> None:
        self._backend, self._options = backend, options
        self._selector = QueueSelector(options.queues, frozenset(backend.queues))
        self._wake = threading.Event()
        self._claimed = 0
        self._in_doubt = False
        details = {"queues": str(self._selector), "threads": options.threads}
        self._heartbeat = Heartbeat(Process.Kind.WORKER, backend.database, options, details)
        self._settler = Settler(backend.database, lambda: self._heartbeat.healthy)
        self._pool = Pool(options, lambda job: executor.run(job, backend), self._settler.put, self._wake.set)
        self._coroutines = Coroutines(
            options.coroutines, lambda job: executor.run_async(job, backend), self._settler.put, self._wake.set
        )

    def run(self, stop: Stop, supervisor: int | None = None) -> None:
        """Work until ``stop`` is asked for, then end in order: give back, wait, settle, sign off."""
        self._start(stop, supervisor)
        pause = 0.0
        while not stop.asked and self._healthy() and not self._worn_out():
            found = self._claim()
            # Looks often after work, then less and less; a busy pool says itself when it has room.
            pause = 0.0 if found else min(self._options.poll_interval, pause * 1.5 or 0.01)
            if not found:
                self._wake.wait(pause * random.uniform(0.8, 1.0))
                self._wake.clear()
        self._end(stop)

    def _start(self, stop: Stop, supervisor: int | None) -> None:
        prepare(self._backend.database)
        process = self._heartbeat.start(supervisor)
        self._claimer = Claimer(self._backend.database, process, self._selector)
        stop.wakes(self._wake)
        Listener(self._backend.database, stop, self._heard).start()
        self._settler.start()
        self._pool.start()
        logger.info("%s serves %s with %d threads.", process, self._selector, self._options.threads, extra=process.log_fields)

    def _heard(self, queue: str) -> None:
        if self._selector.rank(queue) is not None:
            self._wake.set()

    def _claim(self) -> int:
        try:
            if self._in_doubt:
                self._give_back_unknown()
            if stale := self._pool.take_back(self.STALE):
                self._release(stale)
            room = 0 if self._coroutines.full() else self._pool.room()
            jobs = self._claimer.claim(room) if room > 0 else []
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Jobs could not be claimed: %s", error)
            discard(self._backend.database)
            self._in_doubt = True
            return 0
        self._pool.put([job for job in jobs if not self._is_for_the_loop(job)])
        self._claimed += len(jobs)
        return len(jobs)

    def _give_back_unknown(self) -> None:
        """A claim that broke may still have been committed: such jobs are this process's, but never came here."""
        owned = list(Job.objects.using(self._backend.database).running().filter(process=self._heartbeat.process))
        # In the order in which a job passes them, so that none slips by.
        here = {(job.pk, job.attempt) for job in [*self._pool.waiting(), *self._running()]}
        here.update(outcome.fence for outcome in self._settler.unsettled())
        self._release([job for job in owned if (job.pk, job.attempt) not in here])
        self._in_doubt = False

    def _is_for_the_loop(self, job: Job) -> bool:
        """Start the job of an ``async def`` task. What cannot be loaded fails on a thread, as anything else there."""
        try:
            if not iscoroutinefunction(load(job.task).func):
                return False
        except BaseException:
            return False
        self._coroutines.put(job)
        return True

    def _healthy(self) -> bool:
        return self._heartbeat.healthy and self._settler.alive

    def _worn_out(self) -> bool:
        return self._options.max_jobs is not None and self._claimed >= self._options.max_jobs

    def _release(self, jobs: list[Job]) -> None:
        Job.objects.using(self._backend.database).release(jobs)

    def _running(self) -> list[Job]:
        return [*self._pool.running(), *self._coroutines.running()]

    def _end(self, stop: Stop) -> None:
        process = self._heartbeat.process
        logger.info("%s claims no more; jobs still running: %d.", process, len(self._running()), extra=process.log_fields)
        try:
            self._release(self._pool.take_back())
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Jobs could not be given back, and will be recovered: %s", error)
            discard(self._backend.database)
        self._wait_for_running(stop)
        for job in self._running():
            logger.warning("Job %s of %s is interrupted and given back.", job.pk, job.task, extra=job.log_fields)
            self._settler.put(Settlement.of(job, Execution.Outcome.INTERRUPTED, Job.State.READY))
        self._pool.close()
        self._coroutines.close()
        self._settler.close(timeout=5.0)
        self._heartbeat.stop()
        close_connections()
        logger.info("%s has ended.", process, extra=process.log_fields)

    def _wait_for_running(self, stop: Stop) -> None:
        """As long as they take, if the worker is only worn out; ``shutdown_timeout`` from when it is told to stop."""
        end = None
        while self._running() and not stop.now and (end is None or time.monotonic() < end):
            if end is None and (stop.asked or not self._healthy()):
                end = time.monotonic() + self._options.shutdown_timeout
            time.sleep(0.02)
