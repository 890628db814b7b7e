"""The last log lines of an attempt, stored with its execution."""

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
def stored_logs(settings):
    """Drain with ``keep_log`` and return the stored logs in the order of their jobs."""

    def stored_logs(**options):
        given = {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "QUEUES": [],
            "OPTIONS": {**KEEPS, **options},
        }
        settings.TASKS = {"default": given}
        testing.drain()
        return list(Execution.objects.order_by("job").values_list("log", flat=True))

    yield stored_logs
    logging.getLogger().removeHandler(log_capture._listener)


def messages(log):
    return [line.partition(": ")[2] for line in log.splitlines()]


def test_last_lines_are_kept_with_time_level_and_logger(stored_logs):
    timely.talk.enqueue("Ada", 5)

    (log,) = stored_logs()

    assert messages(log) == ["Ada says 2", "Ada says 3", "Ada says 4"]
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z WARNING shop\.orders: Ada says 2\n", log
    )


def test_time_of_log_line_is_database_time(stored_logs):
    timely.talk.enqueue("Ada")

    (log,) = stored_logs()

    execution = Execution.objects.get()
    before, after = (
        f"{time:%Y-%m-%d %H:%M:%S}" for time in (execution.started_at, execution.finished_at)
    )
    assert before <= log[:19] <= after


def test_failed_attempt_keeps_its_log(stored_logs):
    timely.talk.enqueue("Ada", fail=True)

    assert messages(stored_logs()[0]) == ["Ada says 0"]


def test_each_attempt_has_its_own_log(stored_logs):
    (
        timely.talk.enqueue("Ada"),
        timely.talk_async.enqueue("Bob"),
        tasks.nothing.enqueue(),
        timely.talk_across.enqueue("Cyd"),
    )

    logs = [messages(log) for log in stored_logs()]

    assert logs == [
        ["Ada says 0"],
        ["Bob says 0", "Bob beside", "Bob in a thread says 0"],
        [],
        ["Cyd beside"],
    ]


def test_task_that_starts_a_thread_keeps_its_own_log(stored_logs):
    timely.talk_in_a_thread_of_its_own.enqueue()

    assert "the task says 0" in messages(stored_logs()[0])


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("nul", "a \ufffd and a \\ud800 <script>alert(1)</script>"),
        ("broken", "WARNING shop.orders: %d <it could not be formatted: TypeError"),
        ("without a text", "<str() of it raised RuntimeError> <it could not be formatted"),
        ("error", "it was caught\nTraceback (most recent call last):"),
        ("long", "xxx[…]"),
    ],
)
def test_unusual_log_lines_are_stored(stored_logs, how, found, monkeypatch):
    # Else pytest's own handler fails on the broken line.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    timely.talk_at_length.enqueue(how)

    (log,) = stored_logs()

    assert found in log
    assert len(log) <= log_capture.LONGEST_LINE


def test_log_size_is_bounded(stored_logs):
    timely.talk_at_length.enqueue("many")

    (log,) = stored_logs(keep_log=1000)

    assert 18_000 < len(log) <= log_capture.LONGEST_LOG
    assert messages(log)[-1].startswith("99 y")


def test_keep_log_is_per_queue_and_off_by_default(stored_logs):
    timely.talk.using(queue_name="loud").enqueue("Ada"), timely.talk.enqueue("Bob")

    loud, quiet = stored_logs(keep_log=0, per_queue={"loud": {"keep_log": 1}})

    assert (messages(loud), quiet) == (["Ada says 0"], "")
    assert Options().keep_log == 0


def test_no_handler_is_installed_without_keep_log(stored_logs):
    timely.talk.enqueue("Ada")

    assert stored_logs(keep_log=0) == [""]
    assert log_capture._listener not in logging.getLogger().handlers


def test_records_below_logger_level_are_not_kept(stored_logs):
    timely.talk_at_length.enqueue("quiet")

    assert stored_logs() == [""]


def test_unhandled_records_still_go_to_stderr(stored_logs, capsys):
    logger = logging.getLogger("shop.orders")
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    timely.talk.enqueue("Ada")
    root.handlers[:] = []
    try:
        stored_logs()
        logger.warning("and after it")
        logger.info("not this")
    finally:
        root.handlers[:] = before

    assert capsys.readouterr().err.splitlines() == ["Ada says 0", "and after it"]


def test_later_attempt_defers_log_column(backend, stored_logs, django_assert_num_queries):
    timely.talk.enqueue("Ada")
    stored_logs()

    loaded = Execution.objects.of_this_run(Job.objects.get()).get()

    assert "log" in loaded.get_deferred_fields()


@pytest.mark.django_db(transaction=True)
def test_job_keeps_result_if_database_refuses_log_text(claim, backend, monkeypatch):
    """A database whose character set is not Unicode refuses such text."""
    settle = settler_module.settle

    def refuse(database, outcomes, *args):
        if any(not (o.log + (o.progress.note if o.progress else "")).isascii() for o in outcomes):
            raise DataError("Incorrect string value")
        return settle(database, outcomes, *args)

    tasks.add.enqueue(1)
    (job,) = claim()
    outcome = executor.run(ThreadCall(job), backend)
    outcome.log = "a ☃"
    monkeypatch.setattr(settler_module, "settle", refuse)

    assert Settler("default", Options())._write([outcome]) == []

    assert (Job.objects.get().state, Job.objects.get().result) == ("successful", 1)
    assert Execution.objects.get().log == "a \\u2603"


@pytest.mark.django_db(transaction=True)
def test_concurrent_attempts_keep_separate_logs(runqueue):
    options = json.dumps({**KEEPS, "keep_log": 10})
    results = {}
    for number in range(8):
        results[timely.talk.enqueue(f"thread {number}", 3).id] = f"thread {number}"
        results[timely.talk_async.enqueue(f"coroutine {number}", 3).id] = f"coroutine {number}"

    runqueue("--embedded", DBQUEUE_OPTIONS=options)

    until(lambda: Execution.objects.count() == 16)
    for execution in Execution.objects.all():
        name, log = results[str(execution.job_id)], messages(execution.log)
        more = [f"{name} beside", f"{name} in a thread says 0"] if "coroutine" in name else []
        assert log == [f"{name} says {each}" for each in range(3)] + more
