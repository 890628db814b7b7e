"""Workflows of an operator in the admin, in a real browser."""

from __future__ import annotations

import pytest
from django.db import connection
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.models import Job, Operation, Queue, RecurringTask

from .. import tasks
from ..conftest import a_process, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Pages are the same on every database: one run is enough.",
    ),
]


@pytest.fixture
def failed_jobs():
    for number in range(3):
        tasks.fail.enqueue(f"order {number} is <script>gone</script>")
    tasks.add.enqueue(1)
    testing.drain()


def test_each_page_opens_without_console_errors(operator, failed_jobs):
    a_process("worker@web1:1:abc")
    assert "Jobs now" in operator.open("/admin/dbqueue/overview/")
    for model in [
        "job",
        "failure",
        "hangedjob",
        "queue",
        "taskstate",
        "process",
        "recurringtask",
        "batch",
        "semaphore",
        "operation",
    ]:
        assert "Job queue" in operator.open(f"/admin/dbqueue/{model}/")
    assert operator.open(f"/admin/dbqueue/job/{Job.objects.first().pk}/change/")

    assert operator.console_errors() == []


def test_jobs_are_retried_from_the_page_of_their_failure(operator, failed_jobs):
    assert "ValueError" in operator.open("/admin/dbqueue/failure/")
    operator.browser.find_element("css selector", "#result_list tbody th a").click()
    page = operator.text()
    assert "order 0 is <script>gone</script>" in page

    assert "3 jobs" in operator.press("Retry all jobs now")
    assert "3 jobs" in operator.press("Retry all jobs now")

    assert Job.objects.ready().count() == 3


def test_queue_is_paused_and_resumed(operator):
    Queue.objects.ensure_rows(["mail"])
    operator.open("/admin/dbqueue/queue/mail/change/?backend=default")

    operator.press("Pause")
    assert Queue.objects.paused().exists()

    operator.press("Resume")
    assert not Queue.objects.paused().exists()


def test_recurring_task_is_added_run_and_disabled(operator):
    operator.open("/admin/dbqueue/recurringtask/add/")
    for name, text in {
        "name": "report",
        "task": "tests.tasks.nothing",
        "cron": "0 9 * * mon",
        "timezone": "Europe/Berlim",
    }.items():
        operator.browser.find_element("name", name).send_keys(text)
    assert "Did you mean 'Europe/Berlin'?" in operator.press("Save and continue editing")
    zone = operator.browser.find_element("name", "timezone")
    zone.clear()
    zone.send_keys("Europe/Berlin")

    assert "Next runs" in operator.press("Save and continue editing")
    assert "Enqueued: 1 recurring task" in operator.press("Run now")

    assert Job.objects.get().task == "tests.tasks.nothing"
    assert operator.console_errors() == []
    operator.press("Disable")
    assert not RecurringTask.objects.get().is_enabled


def test_discard_is_undone_from_its_message(operator, failed_jobs):
    operator.open("/admin/dbqueue/job/?state=failed")
    operator.browser.find_element("css selector", "#result_list tbody th a").click()
    operator.press("Discard")
    operator.press("Discard: 1 job")
    assert Job.objects.failed().count() == 2

    assert "Ran for" not in operator.press("Details and undo")
    operator.press("Undo")
    assert "Undone: 1 job." in operator.press("Undo: 1 operation")

    assert Job.objects.failed().count() == 3
    assert operator.console_errors() == []


def test_page_of_an_operation_follows_it_without_a_reload(operator, failed_jobs):
    given = {"verb": "discard", "total": 40, "job": Job.objects.first().pk}
    operation = Operation.objects.create(**given, done=10, changed=10)
    assert "10 of 40" in operator.open(
        f"/admin/dbqueue/operation/{operation.pk}/change/?backend=default"
    )
    page = operator.browser.find_element("tag name", "html")

    Operation.objects.update(done=20, changed=20)
    until(lambda: "20 of 40" in operator.text())
    Operation.objects.update(done=40, changed=40, finished_at=timezone.now())
    until(lambda: "40 of 40" in operator.text() and "Done" in operator.text())

    assert "UNDO" in operator.text().upper() and "STOP" not in operator.text().upper()
    assert page.is_enabled()  # It is still the same page.
    assert not operator.browser.find_elements("css selector", "[data-dbq-live]")
    assert operator.console_errors() == []


def test_overview_follows_the_queue_and_keeps_what_is_open(operator, failed_jobs):
    operator.open("/admin/dbqueue/overview/?backend=default")
    operator.browser.find_element("css selector", ".dbq-problems summary").click()
    tasks.add.enqueue_many([(1,)] * 7)

    # In one step: an element that is found may be replaced before its text is read.
    ask = operator.browser.execute_script
    until(lambda: "7" in ask("return document.querySelector('.dbq-tiles').textContent"))

    assert operator.browser.find_element("css selector", ".dbq-problems details[open]")
    assert ask("return document.activeElement.tagName") == "SUMMARY"
    assert operator.console_errors() == []
