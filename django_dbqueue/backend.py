"""Backend of Django's Tasks framework: turns a call of a task into a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, cached_property, partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.db import router
from django.db.models import Model
from django.utils import timezone
from django.utils.module_loading import import_string

from . import limits
from .batches import Entry
from .batches import current as current_entry
from .compat import (
    AnyFrameworkTask,
    BaseTaskBackend,
    InvalidTask,
    TaskResultDoesNotExist,
    is_heard,
    signals,
    task_backends,
)
from .core import call_options, serialization, unique_keys
from .core.documentation import with_reference
from .core.notify import notify_queues, wake
from .core.options import Options
from .core.queue_selector import NAME, QueueSelector, check_name
from .core.serialization import Json
from .core.source import current_recurring, current_source
from .core.time_values import LONGEST_WAIT, problem_of
from .core.uuid7 import uuid7
from .engine import batches
from .engine.enqueue import Insert, LazyJobs, run_inserts
from .engine.unique import Effect, UniquePolicy
from .exceptions import InvalidOption
from .middleware import EnqueueCall, TaskMiddleware
from .models import Batch, Execution, Job
from .models.batch import BatchQuerySet
from .models.enums import Conflict, EnqueueStatus
from .models.expressions import now_plus, start_plus
from .models.progress import progress_of
from .recurrence.declare import Declared, from_settings
from .registry import load, task_or_stand_in
from .results import Enqueued, JobResult, result_of
from .tasks import AnyTask, Task, build_each

# A model that asks each field for its default takes 19 µs, a copy 5 µs.
_blank_job = cache(Job)


class DatabaseBackend(BaseTaskBackend):
    """Task backend that stores jobs in a database of the project.

    If the queue is in the same database as the caller's work, a job is written in the caller's
    transaction; if it is in another database, after the commit. A job exists if and only if the
    caller's work does.
    """

    task_class = Task
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    supports_metadata = True

    @cached_property
    def config(self) -> Options:
        """The backend's OPTIONS. Raises InvalidOption; the system checks report it earlier."""
        return Options.from_settings(self.options)

    @cached_property
    def options_of(self) -> Callable[[str], Options]:
        """The OPTIONS for the jobs of a queue, by the queue's name."""
        return cache(self.config.of)

    @cached_property
    def middleware(self) -> tuple[TaskMiddleware, ...]:
        """The objects that the backend's OPTIONS name, the outermost first.

        Raises ImportError for a path that leads to nothing, InvalidOption for another object.
        """
        return tuple(map(_middleware_at, self.config.middleware))

    @cached_property
    def recurring(self) -> list[Declared]:
        """The recurring tasks that the backend's OPTIONS declare."""
        return from_settings(self.alias, self.config.recurring)

    @cached_property
    def database(self) -> str:
        """The alias of the database that holds this backend's jobs."""
        return self.config.database or router.db_for_write(Job)

    def validate_task(self, task: Any) -> None:
        """Raise InvalidTask, with the value, for a task that this backend cannot run."""
        # First, values on which the framework would fail, or which it would accept silently.
        if type(task.priority) is not int or not -100 <= task.priority <= 100:
            raise InvalidTask(
                f"priority must be a whole number between -100 and 100. It is {task.priority!r}."
            )
        if not isinstance(task.run_after, datetime | timedelta | None):
            raise InvalidTask(
                "run_after must be an aware datetime, or a timedelta from now, "
                f"not {task.run_after!r}."
            )
        if not isinstance(metadata := getattr(task, "metadata", None) or {}, Mapping):
            raise InvalidTask(f"metadata must be a dict, not {metadata!r}.")
        if self.queues and task.queue_name not in self.queues:
            raise InvalidTask(
                f"Queue {task.queue_name!r} is not valid for backend. "
                f"TASKS[{self.alias!r}]['QUEUES'] has {', '.join(map(repr, sorted(self.queues)))}. "
                "Add it there, or give [] there for queues of any name."
            )
        if isinstance(task.run_after, timedelta):
            if abs(task.run_after) > LONGEST_WAIT:
                raise InvalidTask(
                    f"run_after must be within {LONGEST_WAIT.days:,} days from now, "
                    f"not {task.run_after.days:,}."
                )
            task = replace(task, run_after=None)
        elif settings.USE_TZ and task.run_after and timezone.is_naive(task.run_after):
            raise InvalidTask(
                f"run_after must be an aware datetime. It is {task.run_after!r}. "
                "Take it from django.utils.timezone."
            )
        super().validate_task(task)
        if isinstance(at := task.run_after, datetime) and (problem := problem_of(at)):
            raise InvalidTask(f"run_after: {problem}")
        try:
            check_name(task.queue_name)
        except ValueError as error:
            raise InvalidTask(f"queue_name of {task.module_path}: {error}") from None
        if (
            getattr(task, "on_conflict", None) == "once"
            and task.delete_on_success is None
            and self.options_of(task.queue_name).delete_on_success
        ):
            raise InvalidTask(
                f"on_conflict='once' of {task.module_path} needs the rows of finished jobs, but "
                f"TASKS[{self.alias!r}]['OPTIONS'] has delete_on_success for the queue "
                f"{task.queue_name!r}. Give the task delete_on_success=False, or another queue."
            )

    def enqueue(  # type: ignore[override]
        self, task: AnyFrameworkTask, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> JobResult:
        """Write one job.

        Raises TypeError or ValueError for arguments that do not fit or are not JSON.
        """
        self.validate_task(task)
        _check_conflict(task)
        with self.enqueueing(task) as metadata:
            job = self._called(self._blank(task, metadata), task, args, kwargs)
            return self._enqueue([job], task)[0]

    def enqueue_many(
        self,
        task: AnyFrameworkTask,
        calls: Iterable[tuple[Sequence[object], Mapping[str, object]]],
        stages: Sequence[AnyTask] = (),
    ) -> Enqueued:
        """Write many jobs of one task, all or none. Each call is a pair of args and kwargs.

        ``stages`` are the stages of a pipeline; the first one is the task.
        """
        with ExitStack() as surroundings:
            many = not isinstance(calls, Sequence) or len(calls) != 1
            blank = self.blank(task, stages, surroundings, many=many)
            if any(getattr(task, name, None) for name in ("key", "version", "concurrency", "rate")):
                return self._enqueue(
                    build_each(calls, lambda call: self.called(blank, task, *call)), task
                )
            bound = build_each(calls, lambda call: (uuid7(), *self._bound(task, *call)))
            return self._enqueue(LazyJobs(blank, bound), task)

    def blank(
        self,
        task: AnyFrameworkTask,
        stages: Sequence[AnyTask],
        surroundings: ExitStack,
        *,
        many: bool = True,
    ) -> Job:
        """Return a job of the validated task, or of a pipeline, without arguments.

        Its copies are to be written inside ``surroundings``, which enter the middleware.
        """
        self.validate_task(task)
        _check_conflict(task)
        blank = self._blank(task, surroundings.enter_context(self.enqueueing(task, many=many)))
        if stages:
            blank.stage, blank.pipeline = 0, [_as_stage(stage) for stage in stages]
        return blank

    def called(
        self,
        blank: Job,
        task: AnyFrameworkTask,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Job:
        """Return a new job like the blank one, with these arguments."""
        return self._called(blank.copy(uuid7()), task, args, kwargs)

    def waits_for_commit(self, task: AnyFrameworkTask) -> bool:
        """Return True if the task's jobs are written after the caller's commit in any case."""
        own = getattr(task, "enqueue_when", None)
        return (own or self.options_of(task.queue_name).enqueue) == "on_commit"

    def insert_of(
        self, jobs: Sequence[Job], task_of: Callable[[Job], AnyFrameworkTask]
    ) -> tuple[Enqueued, Insert]:
        """Return the results of new jobs, and the insert that is still to be run.

        All of them wait for the caller's commit, or none does.
        """
        results = Enqueued(jobs, lambda job: result_of(job, alias=self.alias, task=task_of(job)))
        waits = bool(jobs) and self.waits_for_commit(task_of(jobs[0]))
        entry = self._entry
        if entry and waits:
            entry.waits_for_commit = True
        keyed = () if isinstance(jobs, LazyJobs) else [job for job in jobs if job.key]
        new = [job for job in jobs if not job.key] if keyed else jobs
        insert = Insert(
            database=self.database,
            on_commit=waits,
            new=new,
            keyed=[(job, _policy(task_of(job))) for job in keyed],
            batch=entry,
            written=partial(self._written, jobs, new, results, entry),
        )
        return results, insert

    def at_stage(self, pipeline: list[dict[str, Json]], place: int, value: object) -> Job:
        """Return a job that enters a stage of a pipeline.

        Raises InvalidTaskPath, TypeError or ValueError if it cannot.
        """
        stage = pipeline[place]
        task = load(stage["task"])
        if options := stage.get("options"):
            task = call_options.apply(task, options)
        task = task.using(queue_name=stage["queue"], priority=stage["priority"])
        there = self._called(self._blank(task, None), task, [value], {})
        there.pipeline, there.stage, there.key, there.version = pipeline, place, None, None
        return there

    def set_policy(self, job: Job, task: AnyFrameworkTask) -> None:
        """Copy the task's retry and timeout options to the job.

        The OPTIONS for the queue supply the options that the task does not set.
        """
        options = self.options_of(job.queue)
        job.max_attempts = getattr(task, "max_attempts", None) or options.max_attempts
        job.on_lost = getattr(task, "on_lost", job.on_lost)
        if seconds := getattr(task, "timeout", None) or options.timeout:
            job.timeout = timedelta(seconds=seconds)

    def columns_of(self, task: AnyFrameworkTask, args: Sequence[object]) -> dict[str, Json]:
        """Serialise a call as JSON, to be enqueued later.

        Raises TypeError or ValueError as ``enqueue`` does.
        """
        self.validate_task(task)
        with self.enqueueing(task) as metadata:
            return self._called(self._blank(task, metadata), task, args, {}).columns

    @property
    def batches(self) -> BatchQuerySet:
        return Batch.objects.using(self.database)

    def open_batch(self, batch: Batch) -> None:
        """Write a new batch for its opener to fill."""
        batches.create_open(self.database, batch)

    def seal_batch(self, pk: UUID) -> None:
        """Seal a batch: its opener has enqueued all jobs."""
        batches.seal(self.database, pk)

    def finish_batches(self, ids: Iterable[UUID] | None = None) -> bool:
        """Finish due batches, of these or of all, and wake workers for their callbacks.

        Return whether there are any callbacks.
        """
        queues = batches.finish(self.database, ids)
        notify_queues(self.database, queues)
        return bool(queues)

    def get_result(self, result_id: str) -> JobResult:
        """Return the job's result. Raises TaskResultDoesNotExist if no job has that id."""
        try:
            job = (
                Job.objects.using(self.database)
                .select_related("process", "progress")
                .get(pk=UUID(str(result_id)))
            )
        except (Job.DoesNotExist, ValueError, TypeError, AttributeError):
            raise TaskResultDoesNotExist(f"There is no job {result_id!r}.") from None
        executions = Execution.objects.using(self.database).of_this_run(job) if job.attempt else ()
        return result_of(
            job, self.alias, task_or_stand_in(job, self.alias), executions, progress_of(job)
        )

    def check(self, **kwargs: object) -> list[CheckMessage]:
        return [with_reference(each) for each in self._problems()]

    def _problems(self) -> list[CheckMessage]:
        given = task_backends.settings.get(self.alias, {})
        queues = given.get("QUEUES", ())
        if isinstance(queues, str) or not all(
            isinstance(name, str) and NAME.fullmatch(name) for name in queues
        ):
            return [
                Error(
                    f"TASKS[{self.alias!r}]['QUEUES']: {queues!r} is not a list of queue names. "
                    "A name has 1 to 100 characters without *, comma and NUL; the first is neither "
                    "- nor a space.",
                    id="dbqueue.E005",
                )
            ]
        try:
            for group in ({}, *self.config.workers):
                queues = self.config.changed(**group).queues
                QueueSelector(queues, frozenset(self.queues))
            self.config.check_queues(self.queues)
        except (InvalidOption, TypeError) as error:
            return [Error(f"TASKS[{self.alias!r}]['OPTIONS']: {error}", id="dbqueue.E001")]
        unread = [key for key in given if key not in ("BACKEND", "QUEUES", "OPTIONS")]
        if unread and type(self) is DatabaseBackend:
            names = ", ".join(map(repr, unread))
            return [
                Warning(
                    f"TASKS[{self.alias!r}]: nothing reads {names}. Does it belong in 'OPTIONS'?",
                    id="dbqueue.W003",
                )
            ]
        return []

    @contextmanager
    def enqueueing(
        self, task: AnyFrameworkTask, *, many: bool = False
    ) -> Iterator[Mapping[str, object] | None]:
        """Enter the middleware around an enqueue call, and return the metadata for its jobs."""
        metadata = getattr(task, "metadata", None)
        if not self.middleware:
            yield metadata
            return
        call = EnqueueCall(
            task=task,
            metadata={**(metadata or {})},
            many=many,
            in_batch=self._entry is not None,
            recurring=current_recurring(),
        )
        with ExitStack() as surroundings:
            for each in self.middleware:
                surroundings.enter_context(each.enqueue(call))
            yield call.metadata

    def _blank(self, task: AnyFrameworkTask, metadata: Mapping[str, object] | None) -> Job:
        """Return a job of the task with the columns that do not depend on its arguments."""
        job = _blank_job().copy(uuid7())
        job.task, job.queue, job.priority = task.module_path, task.queue_name, task.priority
        self.set_policy(job, task)
        job.options = call_options.as_json(task, call_options.WITHOUT_COLUMN)
        if self.config.note_source:
            job.source = current_source(self.config.hidden)
        if metadata:
            job.metadata = serialization.to_json(metadata, of=f"metadata of {task.module_path}")
        if entry := self._entry:
            job.batch_id = entry.id
        if task.run_after:
            job.state = Job.State.SCHEDULED
            job.run_after = now_plus(task.run_after)
        expires = getattr(task, "expires", None)
        job.expires_at = (
            start_plus(task.run_after, expires) if isinstance(expires, timedelta) else expires
        )
        return job

    @property
    def _entry(self) -> Entry | None:
        """The ``with`` block, of a batch in this backend's database, around the current calls."""
        entry = current_entry.get()
        return entry if entry and entry.database == self.database else None

    def _called(
        self,
        job: Job,
        task: AnyFrameworkTask,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Job:
        """Return the job with the columns that depend on its arguments."""
        job.args, job.kwargs = self._bound(task, args, kwargs)
        if getattr(task, "concurrency", ()) or getattr(task, "rate", ()):
            job.limits = limits.of_call(task, args, kwargs)
        if getattr(task, "key", None) is not None or getattr(task, "version", None) is not None:
            job.key, job.version = self._key_and_version(task, args, kwargs)
        return job

    def _bound(
        self, task: AnyFrameworkTask, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[list[Json], dict[str, Json]]:
        bound = serialization.bind(task.func, task.takes_context, args, kwargs)
        # Ready-made tasks validate more of their arguments than the types.
        if check := getattr(task.func, "check_call", None):
            check(self, *args, **kwargs)
        return bound

    def _key_and_version(
        self, task: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[str | None, int | None]:
        key, version = task.key, task.version
        if isinstance(key, Model):
            key = unique_keys.as_text(key, f"key of {task.module_path}")
        elif key is not None and not isinstance(key, str):
            key = unique_keys.compute(
                key, task, args, kwargs, f"{task.module_path}: the return value of key"
            )
        if callable(version):
            version = unique_keys.compute_version(version, task, args, kwargs)
        return key and f"{task.module_path} {key}", version

    def _enqueue(self, jobs: Sequence[Job], task: AnyFrameworkTask) -> Enqueued:
        results, insert = self.insert_of(jobs, lambda job: task)
        if jobs:
            run_inserts([insert])
        return results

    def _written(
        self,
        jobs: Sequence[Job],
        new: Sequence[Job],
        results: Enqueued,
        entry: Entry | None,
        effects: Mapping[UUID, Effect],
    ) -> None:
        results.written(effects)
        if entry and not entry.opens:
            # Without keyed jobs: other callers may enqueue the same keys, and a repeated call finds
            # the existing jobs.
            entry.added.append(new)
        elif entry and effects:
            for row, status, begins in (effects[job.pk] for job in jobs if job.key):
                if begins:
                    entry.began.add(row.pk)
                elif status == EnqueueStatus.MERGED:
                    entry.met.add(row.pk)
        woken = jobs[0], *(() if isinstance(jobs, LazyJobs) else jobs)
        for queue, priority in {(job.queue, job.priority) for job in woken}:
            wake(self.database, queue, priority)
        for result in results.created() if is_heard(signals.task_enqueued, logging.DEBUG) else ():
            signals.task_enqueued.send(type(self), task_result=result)


def _check_conflict(task: Any) -> None:
    """Raise InvalidTask for calls that would silently not be deduplicated."""
    on_conflict = getattr(task, "on_conflict", "rerun")
    if on_conflict != "rerun" and task.key is None:
        raise InvalidTask(
            f"on_conflict={on_conflict!r} of {task.module_path} needs a key, and there is none. "
            "Give the task key=..., or the call: using(key=...)."
        )


def _policy(task: Any) -> UniquePolicy:
    return UniquePolicy(
        on_conflict=Conflict(task.on_conflict),
        run_after=task.run_after,
        expires=task.expires,
        max_wait=task.max_wait or LONGEST_WAIT,
    )


def _as_stage(task: AnyTask) -> dict[str, Json]:
    stage = {"task": task.module_path, "queue": task.queue_name, "priority": task.priority}
    options = call_options.as_json(task, call_options.OF_A_STAGE)
    return {**stage, "options": options} if options else stage


def _middleware_at(path: str) -> TaskMiddleware:
    """Return the object at a dotted path, or one of the class there.

    Raises ImportError if nothing is there, InvalidOption if it is something else.
    """
    found = import_string(path)
    if isinstance(found, type) and issubclass(found, TaskMiddleware):
        found = found()
    if not isinstance(found, TaskMiddleware):
        raise InvalidOption(
            f"middleware: {path!r} is {found!r}, and not a subclass of TaskMiddleware. Derive it "
            "from django_dbqueue.middleware.TaskMiddleware."
        )
    return found
