"""Operations in the admin: their list and pages, their undo, and what runs by a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_dbqueue.contrib import operations
from django_dbqueue.models import Job, Operation
from django_dbqueue.testing import drain

from .conftest import VIEW, a_client, a_failure, a_job, act, press, states

LIST = reverse("admin:dbqueue_operation_changelist")
State = Job.State


def page(operation: Operation) -> str:
    return reverse("admin:dbqueue_operation_change", args=[operation.pk])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have operations on more than two jobs run by a job."""
    monkeypatch.setattr(operations, "AT_ONCE", 2)


def test_discard_can_be_undone_from_its_message(operator: Client, db: Any) -> None:
    jobs = [a_job(), a_job(state=State.SCHEDULED), a_job(state=State.FAILED)]
    before = states()

    act(operator, "discard", [job.pk for job in jobs], confirmed="yes", reason="Ticket 12")
    operation = Operation.objects.get()
    assert page(operation) in operator.get(reverse("admin:index")).text
    assert (operation.actor, operation.reason, operation.changed) == ("operator", "Ticket 12", 3)

    question = press(operator, "operation", "undo", operation.pk)
    assert "are you sure?" in question.text and "unchanged" in question.text
    assert states() == [State.DISCARDED] * 3
    done = press(operator, "operation", "undo", operation.pk, confirmed="yes")

    assert "Undone: 3 jobs." in done.text
    assert states() == before
    assert "undone by #" in operator.get(page(operation)).text
    assert "/undo/" not in operator.get(page(operation)).text
    assert LogEntry.objects.filter(content_type__model="operation").count() == 1


def test_undo_says_how_many_jobs_have_started_since(operator: Client, db: Any) -> None:
    started, _waits = a_job(), a_job()
    act(operator, "discard", [job.pk for job in Job.objects.all()], confirmed="yes")
    Job.objects.filter(pk=started.pk).update(attempt=1)

    done = press(operator, "operation", "undo", Operation.objects.get().pk, confirmed="yes")

    assert "Undone: 1 job. Unchanged, as they have started or changed since: 1." in done.text


@pytest.mark.django_db(transaction=True)
def test_undo_runs_each_part_in_a_transaction_of_its_own(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that waits for a row in a transaction that holds others can deadlock."""
    run_part, nested = operations.operations.run_part, []

    def observed(*args: Any) -> Operation:
        nested.append(connection.in_atomic_block)
        return run_part(*args)

    a_job()
    monkeypatch.setattr(operations.operations, "run_part", observed)
    act(operator, "discard", [Job.objects.get().pk], confirmed="yes")
    press(operator, "operation", "undo", Operation.objects.get().pk, confirmed="yes")

    assert states() == [State.READY]
    assert nested and not any(nested)


def test_second_undo_changes_nothing_and_says_so(operator: Client, db: Any) -> None:
    a_job()
    act(operator, "discard", [Job.objects.get().pk], confirmed="yes")
    operation = Operation.objects.get()
    press(operator, "operation", "undo", operation.pk, confirmed="yes")

    again = press(operator, "operation", "undo", operation.pk, confirmed="yes")

    assert "Nothing was changed." in again.text
    assert Operation.objects.count() == 2


def test_very_many_jobs_are_discarded_by_a_job_after_the_answer(
    operator: Client, many: None
) -> None:
    jobs = [a_job(queue="mail") for _ in range(3)]

    answer = act(
        operator, "discard", [jobs[0].pk], "?queue=mail", select_across="1", confirmed="yes"
    )
    operation = Operation.objects.get()

    assert answer.url == page(operation)
    shown = operator.get(page(operation)).text
    assert "Started: Discard #" in shown and "for 3 jobs." in shown
    assert "queue=mail" in shown and "Waiting for a worker" in shown
    assert "0 of 3" in shown
    Job.objects.filter(queue="mail").update(state=State.SCHEDULED, run_after="2099-01-01T00:00Z")
    drain()
    shown = operator.get(page(operation)).text
    assert "Done" in shown and "3 of 3" in shown
    assert Job.objects.filter(queue="mail", state=State.DISCARDED).count() == 3


def test_running_operation_is_stopped_by_its_button(operator: Client, many: None) -> None:
    jobs = [a_job() for _ in range(3)]
    act(operator, "discard", [job.pk for job in jobs], confirmed="yes")
    operation = Operation.objects.get()

    assert "Stop requested: 1 operation." in press(operator, "operation", "stop", operation.pk).text

    assert "Stopping" in operator.get(page(operation)).text
    Job.objects.filter(task="shop.tasks.send_invoice").update(
        state=State.SCHEDULED, run_after="2099-01-01T00:00Z"
    )
    drain()
    assert "Stopped" in operator.get(LIST).text
    assert not Job.objects.filter(state=State.DISCARDED).exists()


def test_operation_whose_job_was_lost_says_so_and_is_continued(
    operator: Client, many: None
) -> None:
    jobs = [a_job() for _ in range(3)]
    act(operator, "discard", [job.pk for job in jobs], confirmed="yes")
    operation = Operation.objects.get()
    Job.objects.filter(pk=operation.job).delete()

    assert "Its job has ended" in operator.get(LIST).text
    done = press(operator, "operation", "continue", operation.pk)

    assert "Continued: 1 operation." in done.text and "Waiting for a worker" in done.text


def test_retry_in_steps_asks_for_a_limit_and_runs_by_a_job(
    operator: Client, failed: Callable[..., Job]
) -> None:
    failure = a_failure()
    failed(failure)

    question = press(operator, "failure", "retry_in_steps", failure.pk)
    assert "Stop above (percent)" in question.text and "Three jobs first" in question.text
    refused = press(
        operator, "failure", "retry_in_steps", failure.pk, confirmed="yes", stop_above="100"
    )
    assert "less than or equal to 99" in refused.text
    done = press(
        operator, "failure", "retry_in_steps", failure.pk, confirmed="yes", stop_above="5", rate="2"
    )

    assert "stops if more than 5 % of its jobs fail again" in done.text
    assert "2 jobs per second" in done.text


def test_without_permission_for_operations_there_is_no_link_and_no_list(
    failed: Callable[..., Job],
) -> None:
    client = a_client("helper", [each for each in VIEW if each != "view_operation"])
    client_of_retries = a_client("retrier", ["view_job", "retry_job"])
    job = failed()

    done = press(client_of_retries, "job", "retry", job.pk)

    assert "Retried: 1 job." in done.text and "Details and undo" not in done.text
    assert client.get(LIST).status_code == 403


def test_scope_is_shown_as_text(operator: Client, db: Any) -> None:
    jobs = [a_job(queue="<b>mail</b>") for _ in range(2)]
    act(operator, "discard", [jobs[0].pk], "?queue=<b>mail</b>", select_across="1", confirmed="yes")

    shown = operator.get(LIST).text

    assert "&lt;b&gt;mail&lt;/b&gt;" in shown and "<b>mail" not in shown


def test_list_takes_few_queries(
    operator: Client, db: Any, django_assert_max_num_queries: Any
) -> None:
    for _ in range(30):
        act(operator, "discard", [a_job().pk], confirmed="yes")

    with django_assert_max_num_queries(8):
        operator.get(LIST)
