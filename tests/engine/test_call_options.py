"""Options of one call: using() takes the options of @task, and they hold for its jobs alone."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_dbqueue import Constant, Exponential, Linear, Rate, batch, limit, pipeline, task
from django_dbqueue.compat import InvalidTask
from django_dbqueue.models import Execution, Job
from django_dbqueue.testing import drain

from .. import tasks

pytestmark = pytest.mark.django_db
STRATEGIES = [Constant(delay=7), Linear(step=3, cap=9), Exponential(first=2, jitter=0.0)]


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"max_attempts": 7}, {"max_attempts": 7}),
        ({"timeout": 1.5}, {"timeout": timedelta(seconds=1.5)}),
        ({"on_lost": "fail"}, {"on_lost": "fail"}),
        ({"delete_on_success": True}, {"options": {"delete_on_success": True}}),
        ({"delete_on_success": False}, {"options": {"delete_on_success": False}}),
        ({"backoff": Constant(delay=7)}, None),
        ({"concurrency": limit(3)}, None),
        ({"rate": Rate(5)}, None),
    ],
)
def test_option_is_stored_with_the_jobs_of_the_call_alone(options, columns):
    tasks.add.using(**options).enqueue(1)
    tasks.add.using(**options).enqueue_many([(2,), (3,)])
    tasks.add.enqueue(4)

    *own, other = Job.objects.order_by("pk")
    if columns:
        assert {name: [getattr(job, name) for job in own] for name in columns} == {
            name: [value] * 3 for name, value in columns.items()
        }
    else:
        assert all(job.options or job.limits for job in own)
    assert (other.options, other.limits, other.timeout, other.max_attempts) == (None, None, None, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backoff_of_the_call_delays_its_retries(strategy):
    tasks.fail.using(max_attempts=2, backoff=strategy).enqueue()

    drain()

    job = Job.objects.get()
    end = Execution.objects.get().finished_at
    assert job.state == "scheduled"
    first = strategy.seconds(1)
    assert 0.85 * first - 0.5 < (job.run_after - end).total_seconds() < 1.15 * first + 0.5


def test_max_attempts_of_the_call_takes_precedence():
    tasks.fail.using(max_attempts=3, backoff=Constant(delay=0)).enqueue()

    drain()

    assert Job.objects.get().state == "failed"
    assert Execution.objects.count() == 3


@pytest.mark.parametrize("own", [True, False])
def test_success_of_the_call_is_deleted_or_kept(own):
    tasks.add.using(delete_on_success=own).enqueue(1)
    tasks.add.enqueue(2)

    drain()

    assert Job.objects.count() == 2 - own


def test_limit_of_the_call_takes_precedence_and_may_be_lifted():
    tasks.occupy.enqueue("a", 0)
    tasks.occupy.using(concurrency=()).enqueue("a", 0)
    tasks.add.using(concurrency=limit(1)).enqueue_many([(1,), (2,)])

    limited, free, *others = Job.objects.order_by("pk")

    assert limited.limits and free.limits is None
    assert {each["max_running"] for job in others for each in job.limits} == {1}


def test_later_settings_keep_earlier_ones():
    configured = tasks.fail.using(backoff=Constant(delay=0)).using(max_attempts=2)

    configured.using(queue_name="mail").enqueue()

    job = Job.objects.get()
    assert (job.queue, job.max_attempts) == ("mail", 2)
    assert job.options == {"backoff": {"constant": {"delay": 0, "cap": 3600.0, "jitter": 0.1}}}
    assert tasks.fail.backoff is None


def test_stage_of_a_pipeline_has_its_own_options():
    slow = tasks.pour.using(timeout=90, max_attempts=4, backoff=Linear(step=1))
    pipeline(tasks.grind.using(timeout=5), slow).enqueue("beans")
    job = Job.objects.get()
    assert (job.timeout, job.options) == (timedelta(seconds=5), None)

    drain()

    job = Job.objects.get()
    assert (job.timeout, job.max_attempts) == (timedelta(seconds=90), 4)
    assert job.options["backoff"] == {"linear": {"step": 1, "cap": 3600.0, "jitter": 0.1}}


def test_callback_of_a_batch_has_the_options_of_its_call():
    callback = tasks.add.using(timeout=5, max_attempts=3, backoff=Constant(delay=1))
    with batch(on_finish=callback):
        tasks.nothing.enqueue()

    drain()

    job = Job.objects.get(task=tasks.add.module_path)
    assert (job.timeout, job.max_attempts) == (timedelta(seconds=5), 3)
    assert "backoff" in job.options


def test_call_with_a_key_replaces_the_options_of_the_waiting_job():
    tasks.add.using(key="a", backoff=Constant(delay=1)).enqueue(1)
    tasks.add.using(key="a").enqueue(2)
    assert Job.objects.get().options is None

    tasks.add.using(key="a", delete_on_success=True).enqueue(3)

    assert Job.objects.get().options == {"delete_on_success": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1"),
        ({"max_attempts": "3"}, "not '3'"),
        (
            {"timeout": -1},
            "timeout must be a number of seconds above 0 and below 315,360,000, not -1",
        ),
        ({"timeout": "5"}, "not '5'"),
        ({"on_lost": "ignore"}, "on_lost must be 'retry' or 'fail', not 'ignore'"),
        ({"delete_on_success": 1}, "must be True or False"),
        ({"backoff": 30}, "backoff must be callable"),
        ({"backoff": lambda error, result: 1}, "must be Constant, Linear or Exponential"),
        ({"concurrency": 3}, "concurrency must be a limit such as limit(2)"),
        ({"rate": "5/s"}, "rate must be a limit such as Rate"),
    ],
)
def test_invalid_option_is_refused_and_named(options, message):
    with pytest.raises(InvalidTask) as raised:
        tasks.add.using(**options)

    assert message in str(raised.value)


@pytest.mark.parametrize("options", [{"concurrency": limit(2)}, {"rate": Rate(3)}])
def test_limit_of_a_later_stage_is_refused(options):
    with pytest.raises(InvalidTask, match="cannot be set for one call"):
        pipeline(tasks.grind, tasks.pour.using(**options))


@pytest.mark.parametrize(
    "options",
    [
        [],
        "backoff",
        {"unknown": 1},
        {"backoff": {"quadratic": {}}},
        {"backoff": {"constant": {"delay": -1}}},
        {"backoff": {"constant": {}, "linear": {}}},
        {"backoff": 5},
        {"timeout": "soon"},
    ],
)
def test_unreadable_options_fail_the_job_with_the_reason(options):
    tasks.add.enqueue(1)
    Job.objects.update(options=options)

    drain()

    assert Job.objects.get().state == "failed"
    assert Execution.objects.get().message


def test_decorator_does_not_take_own_options():
    with pytest.raises(TypeError, match="own_options is not an option"):
        task(own_options=frozenset({"timeout"}))
