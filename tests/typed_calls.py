"""What a type checker must accept and refuse. Never run: an ``ignore`` that is not needed is an error itself."""

from __future__ import annotations

from datetime import timedelta

from django.tasks import TaskContext

from django_dbqueue import Exponential, JobContext, Task, limit, task


@task
def bare(number: int, *, text: str = "") -> bool:
    return True


@task(max_attempts=3, backoff=Exponential(first=2))
def with_options(number: int) -> None: ...


@task(takes_context=True)
def with_context(context: TaskContext, number: int) -> None: ...  # type: ignore[type-arg]


@task(takes_context=True, concurrency=limit(2), key=lambda number: str(number))
def with_context_of_a_job(context: JobContext, number: int) -> None:
    context.progress(number)


@task(max_attempt=3)  # type: ignore[call-overload, untyped-decorator]
def with_a_typo(number: int) -> None: ...


@task(timeout="9")  # type: ignore[call-overload, untyped-decorator]
def with_a_wrong_type(number: int) -> None: ...


@task
async def coroutine(number: int) -> str:
    return ""


def calls() -> None:
    bare.enqueue(1, text="a").wait(timeout=5)
    bare.using(run_after=timedelta(hours=1), priority=5, metadata={"a": 1}).enqueue(1)
    bare.enqueue_on_commit(1)
    with_options.enqueue(1)
    with_context.enqueue(1)
    with_context_of_a_job.enqueue(1)
    coroutine.enqueue(1)
    task_itself: Task[[int], None] = with_options
    task_itself.enqueue(2)

    bare.enqueue("one")  # type: ignore[arg-type]
    bare.enqueue()  # type: ignore[call-arg]
    bare.enqueue(1, texts="a")  # type: ignore[call-arg]
    bare.enqueue_on_commit("one")  # type: ignore[arg-type]
    bare.using(run_after=5)  # type: ignore[arg-type]
    with_options.enqueue("one")  # type: ignore[arg-type]
    with_context.enqueue("one")  # type: ignore[arg-type]
    with_context.enqueue(None, 1)  # type: ignore[call-arg, arg-type]
    coroutine.enqueue("one")  # type: ignore[arg-type]
