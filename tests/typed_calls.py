"""What a type checker must accept and refuse: mypy with the stubs of Django, and pyright with and without them.

Never run. An ``ignore`` that is not needed is an error itself.
"""

# mypy: disable-error-code="type-arg"

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, assert_type

from django.tasks import TaskContext

from django_dbqueue import (
    Exponential,
    Finish,
    GoTo,
    JobContext,
    Rate,
    Task,
    batch,
    enqueue_many,
    limit,
    pipeline,
    recurring,
    task,
)
from django_dbqueue.middleware import Ending, EnqueueCall, TaskMiddleware
from django_dbqueue.results import JobResult
from django_dbqueue.testing import advance, assert_enqueued, drain, run_job


@task
def bare(number: int, *, text: str = "") -> bool:
    return True


@task(max_attempts=3, backoff=Exponential(first=2))
def with_options(number: int) -> None: ...


@task(takes_context=True)
def with_context(context: TaskContext, number: int) -> None: ...


@task(takes_context=True, concurrency=limit(2), key=lambda number: str(number))
def with_context_of_a_job(context: JobContext, number: int) -> None:
    context.progress(number)
    context.metadata["seen"] = context.attempt
    if members := context.batch:
        with members:
            bare.enqueue(number)
    assert_type(context.should_stop, bool)
    context.progress("half")  # type: ignore[arg-type]
    context.snooze(delay="soon")  # type: ignore[arg-type]


@task(
    concurrency=(
        limit(1, key=lambda account: account, on_conflict="discard"),
        limit(20, group="bank"),
    ),
    rate=Rate(100, per=timedelta(minutes=1), burst=10, key=lambda account: account),
    version=lambda account, amount: amount,
    on_conflict="replace",
)
def with_limits(account: int, amount: int) -> None: ...


@task(key=lambda account: account, on_conflict="once")
def once(account: int) -> None: ...


@task(enqueue="on_commit")
def greet(customer: int, *, text: str = "") -> None: ...


@task(enqueue="later")  # type: ignore[call-overload, untyped-decorator]
def with_another_time(number: int) -> None: ...


@recurring("0 9 * * *", timezone="Europe/Berlin")
@task
def summary(batch_id: str | None = None) -> str:
    return ""


@task
async def coroutine(number: int) -> str:
    return ""


@task(max_attempt=3)  # type: ignore[call-overload, untyped-decorator]
def with_a_typo(number: int) -> None: ...


@task(timeout="9")  # type: ignore[call-overload, untyped-decorator]
def with_a_wrong_type(number: int) -> None: ...


@task(on_conflict="wait")  # type: ignore[call-overload, untyped-decorator]
def with_another_options_word(number: int) -> None: ...


@task(concurrency=2)  # type: ignore[call-overload, untyped-decorator]
def with_a_number_for_a_limit(number: int) -> None: ...


@task(takes_context=True)  # type: ignore[arg-type]
def without_its_context(number: int) -> None: ...


@recurring(evry=timedelta(minutes=5))  # type: ignore[call-arg]
def with_a_typo_in_its_schedule() -> None: ...


limit(2, on_conflict="skip")  # type: ignore[arg-type]
Rate("100")  # type: ignore[arg-type]


def calls() -> None:
    assert_type(bare.enqueue(1, text="a"), JobResult)
    assert_type(bare.enqueue(1, text="a").wait(timeout=5), JobResult)
    assert_type(bare.enqueue_many([(1,), {"number": 2}]), Sequence[JobResult])
    assert_type(bare.call(1), bool)
    assert_type(coroutine.call(1), str)
    bare.using(run_after=timedelta(hours=1), priority=5, metadata={"a": 1}).enqueue(1)
    bare.enqueue_on_commit(1)
    bare.using(enqueue="in_transaction").enqueue(1)
    calls = [bare.prepare(1), greet.prepare(2, text="a"), pipeline(bare, with_options).prepare(3)]
    assert_type(enqueue_many(calls), Sequence[JobResult])
    with_options.enqueue(1)
    with_context.enqueue(1)
    with_context_of_a_job.enqueue(1)
    with_limits.enqueue(1, amount=2)
    summary.enqueue()
    coroutine.enqueue(1)
    task_itself: Task[[int], None] = with_options
    task_itself.enqueue(2)
    anything: Task[..., Any] = bare
    anything.enqueue("one")

    result = bare.get_result("0")
    assert_type(result.enqueued, str)
    assert_type(result.metadata, dict[str, Any])
    result.refresh()
    if result.is_finished and not result.errors:
        print(result.return_value, result.status, result.attempts, result.id.upper())

    with batch(on_finish=summary, description="all") as members:
        pipeline(bare, with_options.using(priority=1)).using(metadata={"a": 1}).enqueue(1).wait()
        assert_type(members.progress(), dict[str, int])

    bare.enqueue("one")  # type: ignore[arg-type]
    bare.enqueue()  # type: ignore[call-arg]
    bare.enqueue(1, texts="a")  # type: ignore[call-arg]
    bare.enqueue_on_commit("one")  # type: ignore[arg-type]
    bare.prepare("one")  # type: ignore[arg-type]
    greet.prepare(1, texts="a")  # type: ignore[call-arg]
    enqueue_many([bare.enqueue(1)])  # type: ignore[list-item]
    enqueue_many([(bare, 1)])  # type: ignore[list-item]
    bare.using(enqueue="later")  # type: ignore[arg-type]
    bare.enqueue_many([1])  # type: ignore[list-item]
    bare.using(run_after=5)  # type: ignore[arg-type]
    bare.using(prioriti=5)  # type: ignore[call-arg]
    bare.call("one")  # type: ignore[arg-type]
    with_options.enqueue("one")  # type: ignore[arg-type]
    with_context.enqueue("one")  # type: ignore[arg-type]
    with_context.enqueue(None, 1)  # type: ignore[call-arg, arg-type]
    coroutine.enqueue("one")  # type: ignore[arg-type]
    result.wait(timeout="5")  # type: ignore[arg-type]
    batch(on_finished=summary)  # type: ignore[call-arg]
    batch(on_finish=calls)  # type: ignore[arg-type]
    pipeline(bare, calls)  # type: ignore[arg-type]
    GoTo(calls)  # type: ignore[arg-type]
    Finish(value=1)


class Tenants(TaskMiddleware):
    @contextmanager
    def enqueue(self, call: EnqueueCall) -> Generator[None, None, None]:
        call.metadata["tenant"] = "north"
        assert_type(call.many, bool)
        yield

    def run(self, context: JobContext) -> AbstractContextManager[object]:
        return nullcontext(context.metadata["tenant"])

    def ended(self, context: JobContext, ending: Ending) -> None:
        assert_type(ending.is_last_failure, bool)
        assert_type(ending.error, BaseException | None)
        ending.outcome = "failed"  # type: ignore[misc, assignment]


class Untyped(TaskMiddleware):
    def run(self, context: int) -> AbstractContextManager[object]:  # type: ignore[override]
        return nullcontext()


def tests() -> None:
    assert_type(drain(), int)
    assert_type(run_job(bare.enqueue(1)), JobResult)
    advance(minutes=5)
    assert_enqueued(bare, args=[1], kwargs={"text": "a"}, queue="mail", times=1)
    run_job(1)  # type: ignore[arg-type]
    advance("5")  # type: ignore[call-arg]
    assert_enqueued(print)  # type: ignore[arg-type]


async def coroutines() -> None:
    assert_type(await bare.aenqueue(1), JobResult)
    assert_type(await bare.aenqueue_many([(1,)]), Sequence[JobResult])
    assert_type(await bare.acall(1), bool)
    assert_type(await coroutine.acall(1), str)
    assert_type(await (await bare.aget_result("0")).await_(timeout=5), JobResult)
    async with batch() as members:
        await bare.aenqueue(1)
        await pipeline(bare, with_options).aenqueue(1)
    assert_type(members, batch)

    await bare.aenqueue("one")  # type: ignore[arg-type]
    bare.aenqueue(1).wait()  # type: ignore[attr-defined]
