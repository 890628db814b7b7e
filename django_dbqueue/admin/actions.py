"""Operator actions on rows: button, admin action, permission, question and answer in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..engine.recurring import run_now
from ..models.enums import HIGHEST_PRIORITY
from ..recurrence.target import enqueue
from .config import alias_for

Rows = QuerySet[Any]
Text = str | Promise


def themselves(rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True, kw_only=True)
class Verb:
    """An operator action on rows.

    name: the end of its URL, and the name of its admin action.
    permission: suffix of the required permission, the page's ``has_<permission>_permission``.
    label: text of its button.
    means: its effect on a row, shown before a confirmation.
    done: text of its result, before the number of rows: "Discarded: 3 jobs." The text may contain
        the value, as ``%(value)s``.
    eligible: the given rows that the action would change.
    act: changes the rows and returns their number. With ``field``, it takes the value too:
        ``act(rows, value)``.
    target: the affected rows for the selected ones. The actions of a failure affect its jobs.
    asks_from: number of rows from which the action asks first; None: never.
    field: input that the action requires. It then always asks, and accepts only valid input.
    """

    name: str
    permission: str
    label: Text
    means: Text
    done: Text
    eligible: Callable[[Any], Rows]
    act: Callable[..., int]
    target: Callable[[Rows], Rows] = themselves
    asks_from: int | None = None
    field: forms.Field | None = None

    def asks(self, number: int) -> bool:
        return self.field is not None or (self.asks_from is not None and number >= self.asks_from)

    def form(self, data: Any = None) -> forms.Form | None:
        """Return the form for its value, bound to ``data`` if there is any."""
        if self.field is None:
            return None
        form = type("ValueForm", (forms.Form,), {"value": self.field})
        return form(data)  # type: ignore[no-any-return]


RETRY = Verb(
    name="retry",
    permission="retry",
    label=_("Retry"),
    means=_("A retried job is ready again, and runs as soon as a worker is free."),
    done=_("Ready to run again"),
    eligible=lambda jobs: jobs.retriable(),
    act=lambda jobs: jobs.retry(),
    asks_from=2,
)
DISCARD = Verb(
    name="discard",
    permission="discard",
    label=_("Discard"),
    means=_("A discarded job does not run, unless it is retried."),
    done=_("Discarded"),
    eligible=lambda jobs: jobs.discardable(),
    act=lambda jobs: jobs.discard(),
    asks_from=1,
)
STOP = Verb(
    name="stop",
    permission="stop",
    label=_("Stop"),
    means=_(
        "A running job is interrupted, and is then discarded. If it does not let itself be interrupted, its process is ended."
    ),
    done=_("Being stopped"),
    eligible=lambda jobs: jobs.stoppable(),
    act=lambda jobs: jobs.stop(),
    asks_from=1,
)
REPRIORITISE = Verb(
    name="reprioritise",
    permission="reprioritise",
    label=_("Set priority"),
    means=_("Of the jobs of a queue, the one with the highest priority runs first."),
    done=_("Given priority %(value)s"),
    eligible=lambda jobs: jobs.waiting(),
    act=lambda jobs, priority: jobs.reprioritise(priority),
    field=forms.IntegerField(
        label=_("Priority"),
        min_value=-HIGHEST_PRIORITY,
        max_value=HIGHEST_PRIORITY,
        help_text=_("From -100 to 100."),
    ),
)
MUTE = Verb(
    name="mute",
    permission="triage",
    label=_("Mute"),
    means=_("A muted failure stays muted, however often it is seen again."),
    done=_("Muted"),
    eligible=lambda failures: failures.open(),
    act=lambda failures: failures.mute(),
)
RESOLVE = Verb(
    name="resolve",
    permission="triage",
    label=_("Resolve"),
    means=_("A resolved failure is open again as soon as it is seen again."),
    done=_("Resolved"),
    eligible=lambda failures: failures.unresolved(),
    act=lambda failures: failures.resolve(),
)
REOPEN = Verb(
    name="reopen",
    permission="triage",
    label=_("Reopen"),
    means=_("A reopened failure is listed as open again."),
    done=_("Open again"),
    eligible=lambda failures: failures.closed(),
    act=lambda failures: failures.reopen(),
)
ENABLE = Verb(
    name="enable",
    permission="enable",
    label=_("Enable"),
    means=_("An enabled task runs again, from its next time on."),
    done=_("Enabled"),
    eligible=lambda tasks: tasks.disabled(),
    act=lambda tasks: tasks.enable(),
)
DISABLE = Verb(
    name="disable",
    permission="enable",
    label=_("Disable"),
    means=_(
        "A disabled task is not enqueued until it is enabled. Jobs that it has enqueued already run."
    ),
    done=_("Disabled"),
    eligible=lambda tasks: tasks.enabled(),
    act=lambda tasks: tasks.disable(),
    asks_from=2,
)
RUN_NOW = Verb(
    name="run",
    permission="run",
    label=_("Run now"),
    means=_("It is enqueued once more, at once; its next time stays."),
    done=_("Enqueued"),
    eligible=themselves,
    act=lambda tasks: run_now(tasks, lambda row, wait: enqueue(row, wait, alias_for(row))),
    asks_from=2,
)
