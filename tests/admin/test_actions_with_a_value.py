"""An action that asks for one value: it always asks, and takes only what its field takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django import forms
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_dbqueue.admin import actions, jobs
from django_dbqueue.models import Job

from .conftest import a_job, act, press


@pytest.fixture
def number(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs are retried with a number, which is noted."""
    given: list[Any] = []

    def note(rows: Any, value: int) -> int:
        given.append(value)
        return int(rows.count())

    field = forms.IntegerField(label="How many", help_text="At most nine.", max_value=9)
    action = replace(actions.RETRY, run=note, field=field, done="Noted %(value)s")
    monkeypatch.setattr(jobs.JobAdmin, "actions", (action,))
    return given


def test_it_asks_on_the_confirmation_page(
    operator: Client, number: list[Any], failed: Callable[..., Job]
) -> None:
    asked = act(operator, "retry", [failed().pk])

    assert "How many" in asked.text and "At most nine." in asked.text
    assert '<input type="number" name="value"' in asked.text
    assert number == []


def test_it_is_done_with_the_value(
    operator: Client, number: list[Any], failed: Callable[..., Job]
) -> None:
    done = act(operator, "retry", [failed().pk], confirmed="yes", value="7")

    assert done.status_code == 302
    assert number == [7]


@pytest.mark.parametrize(
    ("value", "said"),
    [("", "required"), ("ten", "whole number"), ("10", "less than or equal to 9")],
)
def test_it_asks_again_for_a_value_that_cannot_be(
    operator: Client, number: list[Any], failed: Callable[..., Job], value: str, said: str
) -> None:
    pk = failed().pk

    asked = act(operator, "retry", [pk], confirmed="yes", value=value)

    assert asked.status_code == 200
    assert said in asked.text
    assert f'name="_selected_action" value="{pk}"' in asked.text
    assert f'value="{value}"' in asked.text or not value
    assert number == []


def test_a_button_asks_too_and_the_history_names_the_value(
    operator: Client, number: list[Any], failed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, [action] = failed(), jobs.JobAdmin.actions
    # The URLs were made for the action as it was before this test.
    run = jobs.JobAdmin.run_action
    monkeypatch.setattr(
        jobs.JobAdmin,
        "run_action",
        lambda page, request, rows, _old, one=None: run(page, request, rows, action, one),
    )

    assert "How many" in press(operator, "job", "retry", job.pk).text
    assert (
        "Noted 3: 1 job."
        in press(operator, "job", "retry", job.pk, confirmed="yes", value="3").text
    )
    assert LogEntry.objects.get().change_message == "Noted 3: 1 job."


def test_an_action_without_a_value_is_not_asked_for_one(operator: Client, db: Any) -> None:
    asked = press(operator, "job", "discard", a_job().pk)

    assert "are you sure?" in asked.text
    assert 'name="value"' not in asked.text
