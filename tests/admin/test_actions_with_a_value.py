"""An action with a value always shows a form, and accepts only values that its field accepts."""

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
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the retry action a number field, and record the submitted values."""
    values: list[Any] = []

    def record(rows: Any, value: int) -> int:
        values.append(value)
        return int(rows.count())

    field = forms.IntegerField(label="How many", help_text="At most nine.", max_value=9)
    action = replace(actions.RETRY, verb="", run=record, field=field, done="Noted %(value)s")
    monkeypatch.setattr(jobs.JobAdmin, "actions", (action,))
    return values


def test_confirmation_page_has_a_field_for_the_value(
    operator: Client, recorded: list[Any], failed: Callable[..., Job]
) -> None:
    confirmation = act(operator, "retry", [failed().pk])

    assert "How many" in confirmation.text and "At most nine." in confirmation.text
    assert '<input type="number" name="value"' in confirmation.text
    assert recorded == []


def test_action_runs_with_the_submitted_value(
    operator: Client, recorded: list[Any], failed: Callable[..., Job]
) -> None:
    done = act(operator, "retry", [failed().pk], confirmed="yes", value="7")

    assert done.status_code == 302
    assert recorded == [7]


@pytest.mark.parametrize(
    ("value", "error"),
    [("", "required"), ("ten", "whole number"), ("10", "less than or equal to 9")],
)
def test_invalid_value_shows_the_form_again_with_an_error(
    operator: Client, recorded: list[Any], failed: Callable[..., Job], value: str, error: str
) -> None:
    pk = failed().pk

    confirmation = act(operator, "retry", [pk], confirmed="yes", value=value)

    assert confirmation.status_code == 200
    assert error in confirmation.text
    assert f'name="_selected_action" value="{pk}"' in confirmation.text
    assert f'value="{value}"' in confirmation.text or not value
    assert recorded == []


def test_button_shows_the_form_and_history_records_the_value(
    operator: Client,
    recorded: list[Any],
    failed: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, [action] = failed(), jobs.JobAdmin.actions
    # The URL patterns hold the original action: call the view with the patched one.
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


def test_action_without_field_shows_no_value_input(operator: Client, db: Any) -> None:
    confirmation = press(operator, "job", "discard", a_job().pk)

    assert "are you sure?" in confirmation.text
    assert 'name="value"' not in confirmation.text
