"""The last lines that were logged during an attempt, kept with it."""

from __future__ import annotations

import json
import logging
import re

import pytest
from django.db import DataError

from django_dbqueue import testing
from django_dbqueue.core.options import Options
from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker import executor, log_capture
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.settler import Settler
from django_dbqueue.runtime.worker.task_call import ThreadCall

from ... import tasks, timely
from ...conftest import until

pytestmark = pytest.mark.django_db

KEEPS = {"keep_log": 3, "database": "default"}


@pytest.fixture
def keeping(settings):
    """Run tasks with the option, and return what was kept of each, by the order of their jobs."""

    def keeping(**options):
        given = {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "QUEUES": [],
            "OPTIONS": {**KEEPS, **options},
        }
        settings.TASKS = {"default": given}
        testing.drain()
        return list(Execution.objects.order_by("job").values_list("log", flat=True))

    yield keeping
    logging.getLogger().removeHandler(log_capture._listener)


def said(log):
    return [line.partition(": ")[2] for line in log.splitlines()]


def test_the_last_lines_are_kept_with_their_time_level_and_logger(keeping):
    timely.talk.enqueue("Ada", 5)

    (log,) = keeping()

    assert said(log) == ["Ada says 2", "Ada says 3", "Ada says 4"]
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z WARNING shop\.orders: Ada says 2\n", log
    )


def test_the_time_is_the_databases(keeping):
    timely.talk.enqueue("Ada")

    (log,) = keeping()

    execution = Execution.objects.get()
    before, after = (
        f"{time:%Y-%m-%d %H:%M:%S}" for time in (execution.started_at, execution.finished_at)
    )
    assert before <= log[:19] <= after


def test_what_failed_has_them_too(keeping):
    timely.talk.enqueue("Ada", fail=True)

    assert said(keeping()[0]) == ["Ada says 0"]


def test_each_attempt_has_its_own(keeping):
    (
        timely.talk.enqueue("Ada"),
        timely.talk_async.enqueue("Bob"),
        tasks.nothing.enqueue(),
        timely.talk_across.enqueue("Cyd"),
    )

    logs = [said(log) for log in keeping()]

    assert logs == [
        ["Ada says 0"],
        ["Bob says 0", "Bob beside", "Bob in a thread says 0"],
        [],
        ["Cyd beside"],
    ]


def test_a_thread_that_the_task_starts_itself_is_not_heard(keeping):
    timely.talk_in_a_thread_of_its_own.enqueue()

    assert "the task says 0" in said(keeping()[0])


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("nul", "a \ufffd and a \\ud800 <script>alert(1)</script>"),
        ("broken", "WARNING shop.orders: '%d' <it could not be formatted: TypeError"),
        ("error", "it was caught\nTraceback (most recent call last):"),
        ("long", "xxx[…]"),
    ],
)
def test_whatever_is_logged_can_be_kept(keeping, how, found, monkeypatch):
    monkeypatch.setattr(
        logging, "raiseExceptions", False
    )  # Pytest's own handler must not fail the broken one.
    timely.talk_at_length.enqueue(how)

    (log,) = keeping()

    assert found in log
    assert len(log) <= log_capture.LONGEST_LINE


def test_it_is_bounded_whatever_is_asked_for(keeping):
    timely.talk_at_length.enqueue("many")

    (log,) = keeping(keep_log=1000)

    assert 18_000 < len(log) <= log_capture.LONGEST_LOG
    assert said(log)[-1].startswith("99 y")


def test_it_is_for_a_queue_of_its_own_and_off_by_default(keeping):
    timely.talk.using(queue_name="loud").enqueue("Ada"), timely.talk.enqueue("Bob")

    loud, quiet = keeping(keep_log=0, per_queue={"loud": {"keep_log": 1}})

    assert (said(loud), quiet) == (["Ada says 0"], "")
    assert Options().keep_log == 0


def test_without_it_nothing_listens(keeping):
    timely.talk.enqueue("Ada")

    assert keeping(keep_log=0) == [""]
    assert log_capture._listener not in logging.getLogger().handlers


def test_what_the_projects_levels_hold_back_is_not_kept(keeping):
    timely.talk_at_length.enqueue("quiet")

    assert keeping() == [""]


def test_what_nobody_handles_is_still_shown_on_stderr(keeping, capsys):
    logger = logging.getLogger("shop.orders")
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    timely.talk.enqueue("Ada")
    root.handlers[:] = []
    try:
        keeping()
        logger.warning("and after it")
        logger.info("not this")
    finally:
        root.handlers[:] = before

    assert capsys.readouterr().err.splitlines() == ["Ada says 0", "and after it"]


def test_a_later_attempt_does_not_load_it(backend, keeping, django_assert_num_queries):
    timely.talk.enqueue("Ada")
    keeping()

    loaded = Execution.objects.of_this_run(Job.objects.get()).get()

    assert "log" in loaded.get_deferred_fields()


@pytest.mark.django_db(transaction=True)
def test_text_that_the_database_refuses_costs_no_job_its_result(claim, backend, monkeypatch):
    """As on a database whose character set is not Unicode."""
    settle = settler_module.settle

    def refuse(database, outcomes):
        if any(not (o.log + (o.progress.note if o.progress else "")).isascii() for o in outcomes):
            raise DataError("Incorrect string value")
        return settle(database, outcomes)

    tasks.add.enqueue(1)
    (job,) = claim()
    outcome = executor.run(ThreadCall(job), backend)
    outcome.log = "a ☃"
    monkeypatch.setattr(settler_module, "settle", refuse)

    assert Settler("default", Options(), lambda: True)._write([outcome]) == []

    assert (Job.objects.get().state, Job.objects.get().result) == ("successful", 1)
    assert Execution.objects.get().log == "a \\u2603"


@pytest.mark.django_db(transaction=True)
def test_through_a_worker_many_at_a_time_and_each_has_its_own(runqueue):
    options = json.dumps({**KEEPS, "keep_log": 10})
    results = {}
    for number in range(8):
        results[timely.talk.enqueue(f"thread {number}", 3).id] = f"thread {number}"
        results[timely.talk_async.enqueue(f"coroutine {number}", 3).id] = f"coroutine {number}"

    runqueue("--embedded", DBQUEUE_OPTIONS=options)

    until(lambda: Execution.objects.count() == 16)
    for execution in Execution.objects.all():
        name, log = results[str(execution.job_id)], said(execution.log)
        more = [f"{name} beside", f"{name} in a thread says 0"] if "coroutine" in name else []
        assert log == [f"{name} says {each}" for each in range(3)] + more
