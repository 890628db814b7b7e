"""Keys and groups of limits: different limits never share a key, tasks of a group do."""

from __future__ import annotations

import sys
import threading
import types

import pytest
from django.core.checks import run_checks
from django.db import connection

from django_dbqueue import Rate, limit, limits, task
from django_dbqueue.compat import task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.limits import of_call
from django_dbqueue.models import Execution, Job, Semaphore

from .. import direct
from ..conftest import LONG, a_process
from ..tasks import add

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome


def enqueue_ready(task, *calls):
    jobs = task.enqueue_many(calls)
    Job.objects.filter(state=State.BLOCKED).update(state=State.READY, blocked_by=None)
    return jobs


def settle(*jobs):
    return direct.settle(
        [AttemptResult.of(job, Outcome.SUCCESSFUL, State.SUCCESSFUL) for job in jobs]
    )


def constant_key(text):
    """Return a key function that takes no arguments and always returns ``text``."""
    return lambda: text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"concurrency": limit(1, group="rate x")}, {"rate": Rate(1, group="x")}),
        (
            {"concurrency": limit(1, group="a b", key=constant_key("c"))},
            {"concurrency": limit(1, group="a", key=constant_key("b c"))},
        ),
        (
            {"concurrency": limit(1, group='a" b')},
            {"concurrency": limit(1, group="a", key=constant_key('b"'))},
        ),
        (
            {"concurrency": limit(1, group='a"', key=constant_key("b"))},
            {"concurrency": limit(1, group="a", key=constant_key('" b'))},
        ),
        (
            {"concurrency": limit(1, group="a", key=constant_key("b"))},
            {"concurrency": limit(1, group="a b")},
        ),
        ({"concurrency": limit(1, group="tests.tasks.add")}, {"concurrency": limit(1)}),
        (
            {"concurrency": limit(1, group="tests.tasks.add a=1")},
            {"concurrency": limit(1, key=lambda a: a)},
        ),
        (
            {"concurrency": limit(1, group="tests.tasks.add", key=constant_key("a=1"))},
            {"concurrency": limit(1, key=lambda a: a)},
        ),
        (
            {"concurrency": limit(1, key=lambda a: f"b={a}")},
            {"concurrency": limit(1, key=lambda a, b: str(a))},
        ),
        ({"concurrency": limit(1)}, {"rate": Rate(1)}),
    ],
)
def test_different_limits_have_different_keys(one, other):
    def keys(settings):
        return {each["key"] for each in of_call(task(**settings)(add.func), (1, 2), {})}

    assert not keys(one) & keys(other)


@pytest.mark.parametrize("values", [("Bob", "bob"), ("bob", "bob "), ("é", "e"), ("ß", "ss")])
def test_values_equal_under_collation_have_separate_limits(claim, values):
    of_name = task(concurrency=limit(1, group="name", key=lambda a: a))(add.func)
    enqueue_ready(of_name, *[(value, 1) for value in values], *[(value, 2) for value in values])

    found: list[Job] = []
    # A daemon thread, because the claim may hang.
    thread = threading.Thread(
        target=lambda: (found.extend(claim()), connection.close()), daemon=True
    )
    thread.start()
    thread.join(LONG)

    assert not thread.is_alive()
    assert sorted(job.args[0] for job in found) == sorted(values)
    assert Semaphore.objects.count() == 2


def test_overlong_keys_are_shortened_without_collision():
    one, other = limits._fitting("x" * 500 + "a"), limits._fitting("x" * 500 + "b")
    assert one != other
    assert len(one) == len(other) == limits.LONGEST_KEY


# Different limits in one group


def of_group(most, name="add", **options):
    return task(concurrency=limit(most, group="bank"), **options)(add.func)


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_group_exceeds_limit_of_no_running_job(claim, order):
    for most in order:
        enqueue_ready(of_group(most), (most, 1), (most, 2), (most, 3))

    running = [*claim(), *claim(a_process("another"))]

    assert len(running) == min(job.args[0] for job in running) == order[0]


def test_job_with_higher_limit_waits_for_stricter_running_jobs(claim):
    of_group(2).enqueue_many([(1, 1), (1, 2)])
    strict = claim()
    enqueue_ready(of_group(3), (2, 1))

    assert len(strict) == 2
    assert claim() == []
    settle(*strict)
    assert len(claim()) == 1


def test_job_with_lower_limit_waits_for_looser_running_jobs(claim):
    enqueue_ready(of_group(3), (1, 1), (1, 2))
    loose = claim()
    enqueue_ready(of_group(2), (2, 1))

    assert claim() == []
    settle(loose[0])
    assert len(claim()) == 1


def test_raised_limit_applies_after_earlier_jobs_end(claim):
    of_group(1).enqueue(0)
    before = claim()
    enqueue_ready(of_group(3), (1, 1), (1, 2), (1, 3))
    assert claim() == []

    settle(*before)
    started = claim()
    direct.sweep(100)

    assert len([*started, *claim()]) == 3


def test_slower_rate_of_group_applies(claim):
    fast = task(rate=Rate(100, per=1, group="service"))(add.func)
    slow = task(rate=Rate(1, per=60, group="service"))(add.func)
    enqueue_ready(fast, (1, 1))
    assert len(claim()) == 1

    enqueue_ready(slow, (2, 1))
    assert claim() == []

    Job.objects.all().delete()
    Semaphore.objects.all().delete()
    enqueue_ready(slow, (2, 1))
    assert len(claim()) == 1
    enqueue_ready(fast, (1, 1))
    assert claim() == []


# Groups


def make_shop_task(name, **options):
    """Return a task of the module ``shop.tasks``."""

    def call(account): ...

    call.__name__ = call.__qualname__ = name
    call.__module__ = "shop.tasks"
    return task(**options)(call)


def by_account(account):
    return account


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            {"concurrency": limit(1, group="vault")},
            {"concurrency": limit(4, group="vault")},
            "1 at a time and 4 at a time",
        ),
        (
            {"rate": Rate(5, per=60, group="vault")},
            {"rate": Rate(5, group="vault", burst=2)},
            "5 in 60 s with burst=1 and 5 in 1 s with burst=2",
        ),
        ({"concurrency": limit(4, group="vault")}, {"concurrency": limit(4, group="vault")}, None),
        ({"rate": Rate(60, per=60, group="vault")}, {"rate": Rate(1, group="vault")}, None),
        ({"concurrency": limit(1, group="vault")}, {"concurrency": limit(4, group="Bank")}, None),
        ({"concurrency": limit(1, group="vault")}, {"rate": Rate(4, group="vault")}, None),
        ({"concurrency": limit(1)}, {"concurrency": limit(4)}, None),
        (
            {"concurrency": limit(1, key=by_account, group="vault")},
            {"concurrency": limit(4, group="vault")},
            None,
        ),
        (
            {"concurrency": limit(1, group="vault")},
            {"concurrency": limit(4, group="vault"), "backend": "other"},
            None,
        ),
    ],
)
def test_check_warns_of_different_limits_in_one_group(monkeypatch, one, other, said):
    module = types.ModuleType("shop.tasks")
    module.first, module.again, module.second = (
        make_shop_task("first", **one),
        make_shop_task("first", **one),
        make_shop_task("second", **other),
    )
    monkeypatch.setitem(sys.modules, "shop.tasks", module)
    monkeypatch.setitem(
        vars(task_backends["default"]),
        "config",
        Options(database="default", task_modules=("shop.tasks",)),
    )

    messages = [
        message.msg
        for message in run_checks(tags=["dbqueue_recurring"])
        if message.id == "dbqueue.W005"
    ]
    found = [message for message in messages if "shop.tasks" in message]

    assert len(found) == (said is not None)
    assert (
        not found
        or f"shop.tasks.first and shop.tasks.second share the group 'vault' with different limits: {said}."
        in found[0]
    )
