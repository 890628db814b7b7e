"""Jobs in Celery's words: states, return values, and errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ...compat import task_backends
from ..usual_place import usual_place
from .subset import Subset

if TYPE_CHECKING:
    from ...models.job import JobQuerySet

# Between two looks at the header of a chord.
PAUSE_SECONDS = 0.2
# By the job's state. A waiting job is PENDING, or RETRY.
STATES = {
    "running": "STARTED",
    "successful": "SUCCESS",
    "failed": "FAILURE",
    "discarded": "REVOKED",
}


class TaskFailed(Exception):
    """Raised by ``get()`` for a failed task, with the task's exception as text.

    The exception itself is not stored.
    """


class TaskRevokedError(Exception):
    """Raised by ``get()`` for a task that was revoked, or has expired."""


@dataclass(frozen=True)
class AsyncResult(Subset):
    """The job with an id, in Celery's words. For the id of a chord: the job of its body."""

    id: str

    def __str__(self) -> str:
        return self.id

    @property
    def state(self) -> str:
        """PENDING, STARTED, RETRY, SUCCESS, FAILURE or REVOKED; PENDING for an unknown id too.

        REVOKED is any discarded job, thus also one that has expired. A chord is PENDING until its
        header has ended, and FAILURE if a task of it was not successful.
        """
        found = self._found()
        if found is None:
            return "PENDING"
        if not hasattr(found, "failures"):
            return "FAILURE" if found.finished_at else "PENDING"
        return STATES.get(found.state) or ("RETRY" if found.failures else "PENDING")

    @property
    def status(self) -> str:
        """The same as ``state``."""
        return self.state

    def ready(self) -> bool:
        """Return True if the task has ended."""
        return self.state in ("SUCCESS", "FAILURE", "REVOKED")

    def successful(self) -> bool:
        """Return True if the task was successful."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        """Return True if the task has failed."""
        return self.state == "FAILURE"

    @property
    def result(self) -> Any:
        """The return value; the exception for a task that has failed or was revoked; else None."""
        match self.state:
            case "SUCCESS":
                return self._found().result
            case "FAILURE":
                return TaskFailed(self._last_error())
            case "REVOKED":
                return TaskRevokedError(self.id)
        return None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the task's end, and return its return value.

        timeout: the longest wait, in seconds; None waits without a limit.

        Raises TaskFailed, TaskRevokedError, and as ``JobResult.wait()`` does: the builtin
        TimeoutError, NotYetVisible, and TaskResultDoesNotExist for an unknown id.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.ready():
            left = None if end is None else max(0.0, end - time.monotonic())
            found = self._found()
            if found is None or hasattr(found, "failures"):
                _backend().get_result(str(found.pk) if found else self.id).wait(left)
            elif left == 0.0:
                raise TimeoutError(f"Chord {self.id} has not ended within {timeout} s.")
            else:
                time.sleep(PAUSE_SECONDS)
        result = self.result
        if isinstance(result, (TaskFailed, TaskRevokedError)):
            raise result
        return result

    def revoke(self, terminate: bool = False) -> None:
        """Discard the job if it waits; with ``terminate``, stop it if it runs.

        Of a chord whose header has not ended, these are the jobs of the header.
        """
        found = self._found()
        if found is None:
            return
        is_job = hasattr(found, "failures")
        own = jobs().filter(pk=found.pk) if is_job else jobs().filter(batch=found.pk)
        own.waiting().discard()
        if terminate:
            own.stop()

    def _found(self) -> Any:
        """Return the job; the batch of a chord whose body is not enqueued; or None."""
        rows = jobs()
        try:
            pk = UUID(str(self.id))
        except ValueError:
            return None
        if job := rows.filter(pk=pk).first():
            return job
        from ...models import Batch

        header = Batch.objects.using(_backend().database).filter(pk=pk).first()
        if header is None or not (follower := header.follower("on_success")):
            return header
        finish = rows.get(pk=follower)
        return rows.get(pk=finish.result) if finish.result else finish

    def _last_error(self) -> str:
        found = self._found()
        if not hasattr(found, "failures"):
            return "A task of the chord's header was not successful."
        errors = _backend().get_result(str(found.pk)).errors
        return errors[-1].traceback.strip().splitlines()[-1] if errors else self.id


@dataclass(frozen=True)
class GroupResult(Subset):
    """The results of a group, in the order of its tasks."""

    results: list[AsyncResult]

    def __iter__(self) -> Iterator[AsyncResult]:
        return iter(self.results)

    def ready(self) -> bool:
        """Return True if all tasks have ended."""
        return all(each.ready() for each in self.results)

    def successful(self) -> bool:
        """Return True if all tasks were successful."""
        return all(each.successful() for each in self.results)

    def get(self, timeout: float | None = None) -> list[Any]:
        """Return the return values. ``timeout`` is for each task; raises as AsyncResult does."""
        return [each.get(timeout) for each in self.results]


def _backend() -> Any:
    alias = usual_place()["backend"]
    backend = task_backends[alias]
    if not hasattr(type(backend), "database"):
        # Not AttributeError, which a property would report as an attribute that is not served.
        raise TypeError(
            f"TASKS[{alias!r}] is a {type(backend).__name__}, whose results cannot be read by an "
            "id. In tests, use a DatabaseBackend and drain() of django_dbqueue.testing."
        )
    return backend


def jobs() -> JobQuerySet:
    from ...models import Job  # The models cannot be imported before the apps are ready.

    return Job.objects.using(_backend().database)
