"""Pauses, limits and triage are operations: listed with their user and reason, and undone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Failure, Operation, Process, Queue, TaskState

from .conftest import a_failure, a_recurring_task, act, press

OPERATIONS = reverse("admin:dbqueue_operation_changelist")


@pytest.fixture
def mail(db: Any) -> Queue:
    return Queue.objects.create(name="mail", limit=4)


def undo(client: Client, **filters: Any) -> str:
    operation = Operation.objects.get(**filters)
    return str(press(client, "operation", "undo", operation.pk, confirmed="yes").text)


def test_pause_is_listed_with_its_reason_and_can_be_undone(operator: Client, mail: Queue) -> None:
    answer = act(
        operator,
        "pause_for",
        ["mail"],
        page="queue",
        value="3600",
        reason="SMTP is down",
        confirmed="yes",
    )
    assert "Details and undo" in operator.get(answer.url).text
    listed = operator.get(OPERATIONS).text
    assert "Pause: <bdi>1 h</bdi>" in listed and "SMTP is down" in listed and "operator" in listed
    page = operator.get(
        reverse("admin:dbqueue_operation_change", args=[Operation.objects.get().pk])
    )
    assert "resume_at" in page.text

    assert "Undone: 1 change." in undo(operator, verb="pause")

    mail.refresh_from_db()
    assert (mail.paused_at, mail.resume_at, mail.limit) == (None, None, 4)
    assert not Operation.objects.undoable().filter(verb="pause").exists()


def test_undo_of_a_resume_restores_the_end_of_the_pause(operator: Client, mail: Queue) -> None:
    until = timezone.now() + timedelta(hours=3)
    Queue.objects.pause(until)
    before = Queue.objects.values("paused_at", "resume_at").get()
    press(operator, "queue", "resume", "mail")
    assert not Queue.objects.paused().exists()

    undo(operator, verb="resume")

    assert Queue.objects.values("paused_at", "resume_at").get() == before


def test_undo_leaves_a_row_that_was_changed_since(operator: Client, mail: Queue) -> None:
    press(operator, "queue", "restrict", "mail", value="9", confirmed="yes")
    Queue.objects.restrict(2)

    text = undo(operator, verb="restrict")

    assert "Unchanged, as they have started or changed since: 1." in text
    assert Queue.objects.get().limit == 2
    Queue.objects.restrict(9)
    assert "Undone: 1 change." in undo(operator, verb="restrict")
    assert Queue.objects.get().limit == 4


def test_undo_of_a_limit_leaves_a_pause_of_another_time(operator: Client, mail: Queue) -> None:
    press(operator, "queue", "restrict", "mail", value="9", confirmed="yes")
    press(operator, "queue", "pause", "mail")

    undo(operator, verb="restrict")

    mail.refresh_from_db()
    assert mail.limit == 4 and mail.paused_at is not None


def test_second_undo_changes_nothing(operator: Client, mail: Queue) -> None:
    press(operator, "queue", "pause", "mail")
    undo(operator, verb="pause")
    Queue.objects.pause()

    assert "Nothing was changed." in undo(operator, verb="pause")
    assert Queue.objects.paused().exists()


def test_undo_of_a_deleted_row_changes_nothing(operator: Client, db: Any) -> None:
    TaskState.objects.create(name="shop.tasks.send")
    press(operator, "taskstate", "pause", "shop.tasks.send")
    TaskState.objects.all().delete()

    assert "Unchanged" in undo(operator, verb="pause")


@pytest.mark.parametrize(
    ("page", "action", "verb"),
    [
        ("failure", "mute", "mute"),
        ("failure", "resolve", "resolve"),
        ("recurringtask", "disable", "disable"),
        ("process", "quiet", "quiet"),
        ("process", "stop", "end"),
    ],
)
def test_other_actions_are_listed_and_have_an_action_that_reverts_them(
    operator: Client, process: Process, page: str, action: str, verb: str
) -> None:
    row = {"failure": a_failure, "recurringtask": a_recurring_task, "process": lambda: process}
    pk = row[page]().pk

    press(operator, page, action, pk, confirmed="yes")

    operation = Operation.objects.get()
    assert (operation.verb, operation.actor, operation.changed) == (verb, "operator", 1)
    assert not Operation.objects.undoable().exists()
    address = reverse("admin:dbqueue_operation_change", args=[operation.pk])
    assert operator.get(address).status_code == 200
    assert operator.get(OPERATIONS).status_code == 200


def test_action_that_changes_nothing_is_not_listed(operator: Client, mail: Queue) -> None:
    Queue.objects.pause()

    act(operator, "pause", ["mail"], page="queue", confirmed="yes")
    a_failure(state=Failure.State.MUTED)
    act(operator, "mute", [Failure.objects.get().pk], page="failure")

    assert not Operation.objects.exists()


def test_undo_of_a_pause_leaves_the_longer_pause_of_another(operator: Client, mail: Queue) -> None:
    press(operator, "queue", "pause", "mail")
    press(operator, "queue", "pause_for", "mail", value="3600", confirmed="yes")

    first = Operation.objects.order_by("pk").first()
    text = press(operator, "operation", "undo", first.pk, confirmed="yes").text

    assert "Unchanged" in text
    mail.refresh_from_db()
    assert mail.paused_at is not None and mail.resume_at is not None
