"""Workers and lock holders of the state machine, and the ways in which an attempt ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import QuerySet
from hypothesis import strategies as st

from django_dbqueue import FanOut, Finish, GoTo
from django_dbqueue.compat import task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult, Settled
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.models.enums import FINISHED
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime.connections import prepare
from django_dbqueue.runtime.worker.after_settle import finish_batches, wake_dependents
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.pipeline_step import after_stage

from .. import direct, tasks

ACTORS = 3
# Queue names that a case-insensitive or padding collation takes for equal.
QUEUES = ["default", "mail", "Mail", "mail "]
# The queue selectors of workers.
SERVED = [("*",), ("default", "mail")]
# Larger than a claim loads without counting; two of them exceed the limit.
LARGE, PREFETCHED = 30_000, 50_000
# Random, so that no database compresses it.
LARGE_TEXT = random.Random(1).randbytes(LARGE // 2).hex()
Outcome, State = Execution.Outcome, Job.State


class End(NamedTuple):
    """The end of an attempt. ``way``: the next step of a pipeline's job after a success."""

    outcome: Execution.Outcome
    state: Job.State
    wait: float = 0.0
    way: str = "on"


ENDS = [
    End(Outcome.SUCCESSFUL, State.SUCCESSFUL),
    End(Outcome.SUCCESSFUL, State.SUCCESSFUL, way="fan out"),
    End(Outcome.SUCCESSFUL, State.SUCCESSFUL, way="back"),
    End(Outcome.FAILED, State.READY),
    End(Outcome.FAILED, State.SCHEDULED, 60.0),
    End(Outcome.FAILED, State.SCHEDULED, 1.5),
    End(Outcome.FAILED, State.FAILED),
    End(Outcome.TIMED_OUT, State.FAILED),
    End(Outcome.INTERRUPTED, State.READY),
    End(Outcome.SNOOZED, State.SCHEDULED, 60.0),
    End(Outcome.DISCARDED, State.DISCARDED),
]
# Ends after which the job is retried.
RETRIED_ENDS = [end for end in ENDS if end.state not in FINISHED]
actors, queues = st.integers(0, ACTORS - 1), st.sampled_from(QUEUES)
ends = st.lists(st.sampled_from(ENDS), min_size=4, max_size=4)


class Actor:
    """A worker with a process row, its own connection, and the jobs that it believes it owns."""

    def __init__(self, number: int) -> None:
        self.thread = ThreadPoolExecutor(1, f"actor-{number}")
        self.call(prepare, "default", 10.0)
        self.number, self.incarnation = number, 0
        self.register(SERVED[0])

    def register(self, queues: tuple[str, ...] | None = None) -> None:
        """Register a new process, as after a restart. The old one may settle late."""
        self.incarnation += 1
        self.queues = queues or self.queues
        self.selector = QueueSelector(self.queues)
        name, serves = f"worker {self.number}.{self.incarnation}", {"queues": ",".join(self.queues)}
        self.process = Process(
            name=name,
            kind="worker",
            hostname="h",
            pid=self.number + 1,
            details=serves,
            expires_at=now_plus(3600),
        )
        self.call(Process.objects.register, self.process)
        options = Options(prefetch_bytes=PREFETCHED)
        self.claimer = Claimer(
            "default", self.process, self.selector, options, group_size=lambda job, line: 3
        )
        self.claimer.FRESH = -1.0
        self.held: list[Job] = []
        self.late: list[Job] = getattr(self, "late", [])

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        return self.thread.submit(function, *args)

    def call(self, function: Any, *args: Any) -> Any:
        return self.submit(function, *args).result(30)

    def serves(self, queue: str) -> bool:
        return self.selector.position(queue) is not None

    def close(self) -> None:
        # Do not wait: after a failure, its last call may never return.
        self.thread.submit(connections.close_all)
        self.thread.shutdown(wait=False)


class LockHolder:
    """Holds row locks on its own connection."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "stranger")

    @contextmanager
    def holding(self, rows: QuerySet[Any]) -> Iterator[None]:
        self.thread.submit(self._lock, rows).result(30)
        try:
            yield
        finally:
            self.thread.submit(self._unlock).result(30)

    def _lock(self, rows: QuerySet[Any]) -> None:
        self.transaction = transaction.atomic()
        self.transaction.__enter__()
        list(rows.order_by("pk").select_for_update())

    def _unlock(self) -> None:
        self.transaction.__exit__(None, None, None)

    def close(self) -> None:
        self.thread.submit(connections.close_all).result(30)
        self.thread.shutdown()


def settle(outcomes: list[AttemptResult]) -> Settled:
    """Settle as a worker does: wake dependent jobs and finish batches."""
    settled = direct.settle(outcomes)
    wake_dependents(settled, task_backends["default"], ())
    finish_batches(settled, task_backends["default"])
    return settled


def settlement(job: Any, end: End) -> AttemptResult:
    if job.not_to_run or job.has_expired():
        return AttemptResult.of(job, Outcome.DISCARDED, State.DISCARDED)
    if job.pipeline and end.outcome == Outcome.SUCCESSFUL:
        return AttemptResult.of(
            job,
            Outcome.SUCCESSFUL,
            **after_stage(job, _returned(job, end.way), task_backends["default"]),
        )
    return AttemptResult.of(
        job,
        end.outcome,
        end.state,
        wait=end.wait,
        result="x" if end.outcome == Outcome.SUCCESSFUL else None,
    )


def _returned(job: Any, way: str) -> Any:
    is_last = job.stage + 1 == len(job.pipeline)
    match way:
        case "fan out":
            return Finish("at an end") if is_last else FanOut(["one", "two"])
        case "back":
            return GoTo(tasks.grind, "back")
    return "on"
