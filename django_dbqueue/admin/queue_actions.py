"""Operator actions on queues, and on tasks as a whole."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from ..core.queue_selector import check_name
from ..models.queue import clear
from .actions import Verb, themselves
from .config import backend
from .formatting import duration

QUARTER = 900


class Length(timedelta):
    """A duration with the text format of the pages."""

    def __str__(self) -> str:
        return duration(self)


class QueueField(forms.CharField):
    """Form field for the name of a queue that the first backend serves, or may serve."""

    def clean(self, value: Any) -> str:
        name: str = super().clean(value)
        first = backend()
        names = sorted(first.queues) if first else []
        try:
            check_name(name)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None
        if names and name not in names:
            raise forms.ValidationError(
                _("There is no queue %(name)s. There are: %(names)s."),
                params={"name": name, "names": ", ".join(names)},
            )
        return name


PAUSE = Verb(
    name="pause",
    permission="pause",
    label=_("Pause"),
    means=_("No worker takes its jobs until it is resumed. What runs already goes on."),
    done=_("Paused"),
    eligible=lambda rows: rows.pausable(),
    act=lambda rows: rows.pause(),
    asks_from=2,
)
RESUME = Verb(
    name="resume",
    permission="pause",
    label=_("Resume"),
    means=_("Workers take its jobs again."),
    done=_("Resumed"),
    eligible=lambda rows: rows.paused(),
    act=lambda rows: rows.resume(),
)
PAUSE_FOR = Verb(
    name="pause_for",
    permission="pause",
    label=_("Pause for a while"),
    means=_(
        "No worker takes its jobs for that long, or until it is resumed. What runs already goes on."
    ),
    done=_("Paused for %(value)s"),
    eligible=themselves,
    act=lambda rows, length: rows.pause(until=length),
    field=forms.TypedChoiceField(
        label=_("For how long?"),
        choices=[
            (QUARTER, _("15 minutes")),
            (4 * QUARTER, _("1 hour")),
            (16 * QUARTER, _("4 hours")),
            (96 * QUARTER, _("1 day")),
        ],
        coerce=lambda seconds: Length(seconds=int(seconds)),
        initial=4 * QUARTER,
    ),
)
CLEAR = Verb(
    name="clear",
    permission="discard",
    label=_("Discard all that wait"),
    means=_(
        "All jobs that wait in the queue are discarded: they do not run, unless they are retried. What runs already goes on."
    ),
    done=_("Discarded"),
    target=lambda queues: queues.waiting(),  # type: ignore[attr-defined]
    eligible=themselves,
    act=clear,
    asks_from=1,
)
RESTRICT = Verb(
    name="restrict",
    permission="restrict",
    label=_("Set limit"),
    means=_(
        "So many of its jobs run at a time, over all hosts; what runs already goes on. Empty: as the settings say."
    ),
    done=_("Given the limit %(value)s"),
    eligible=themselves,
    act=lambda queues, limit: queues.restrict(limit),
    field=forms.IntegerField(
        label=_("How many at a time?"), min_value=1, max_value=999_999, required=False
    ),
)
MOVE = Verb(
    name="move",
    permission="move",
    label=_("Move to another queue"),
    means=_(
        "A job that waits then waits in the other queue. What runs or has ended stays where it is."
    ),
    done=_("Moved to “%(value)s”"),
    eligible=lambda jobs: jobs.waiting(),
    act=lambda jobs, queue: jobs.move(queue),
    field=QueueField(
        label=_("To which queue?"),
        max_length=100,
        help_text=_("Its name. See that a worker serves it."),
    ),
)
