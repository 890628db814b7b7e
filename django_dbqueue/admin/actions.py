"""All operator actions, each with its permission, its texts, and the change that it makes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone
from django.utils.functional import lazy
from django.utils.translation import gettext_lazy as _

from ..backend import DatabaseBackend
from ..core.queue_selector import check_name
from ..core.time_values import LONGEST_WAIT
from ..engine.recurring import run_now
from ..models import Execution, Operation
from ..models.enums import HIGHEST_PRIORITY, UNSUCCESSFUL, State
from ..recurrence.target import enqueue
from .base_actions import Action, all_of, no_warning
from .config import alias, backend
from .formatting import duration, kept_times
from .operating import go_on


class Length(timedelta):
    """A duration with the text format of the pages."""

    def __str__(self) -> str:
        return duration(self)


class QueueField(forms.CharField):
    """Form field for the name of a queue that a backend accepts: by default, that of the page."""

    backend: DatabaseBackend | None = None

    def clean(self, value: object) -> str:
        name: str = super().clean(value)
        if not name:
            return name
        first = self.backend or backend()
        names = sorted(first.queues) if first else []
        try:
            check_name(name)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None
        if names and name not in names:
            raise forms.ValidationError(
                _("Unknown queue %(name)s. Give one of %(names)s."),
                params={"name": name, "names": ", ".join(names)},
            )
        return name


# Each database stores times until its end.
LAST_YEAR = 9000


def _zone() -> str:
    return _("Time zone: %s.") % timezone.get_current_timezone_name()


class TimeField(forms.DateTimeField):
    """Form field for a time in the future, in the current time zone."""

    widget = forms.DateTimeInput({"type": "datetime-local"})
    zone = lazy(_zone, str)()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"help_text": self.zone, **kwargs})

    def clean(self, value: object) -> datetime | None:
        time: datetime | None = super().clean(value)
        now = timezone.now()
        if time is not None and (time.year > LAST_YEAR or time - now > LONGEST_WAIT):
            raise forms.ValidationError(
                _("%(time)s is too far ahead. Give an earlier time."), params={"time": value}
            )
        if time is not None and time <= now:
            raise forms.ValidationError(
                _("%(time)s is in the past. Give a later time."), params={"time": value}
            )
        return time


def _length(*choices: tuple[int, Any]) -> forms.TypedChoiceField:
    """Return a field for a duration, with these choices in seconds."""
    return forms.TypedChoiceField(
        label=_("Duration"),
        choices=choices,
        coerce=lambda seconds: Length(seconds=int(seconds)),
        initial=3600,
    )


# Jobs.

RETRY = Action(
    name="retry",
    permission="retry_job",
    label=_("Retry"),
    short_description=_("Retry selected %(verbose_name_plural)s"),
    effect=_(
        "A retried job becomes ready, and runs as soon as a worker is free. "
        "A job whose time has not come is scheduled for it again."
    ),
    done=_("Retried"),
    eligible=lambda jobs: jobs.retriable(),
    warning=kept_times,
    verb=Operation.Verb.RETRY,
    confirm_from=2,
)
DISCARD = Action(
    name="discard",
    permission="discard_job",
    label=_("Discard"),
    short_description=_("Discard selected %(verbose_name_plural)s"),
    effect=_("A discarded job does not run unless it is retried."),
    done=_("Discarded"),
    eligible=lambda jobs: jobs.discardable(),
    verb=Operation.Verb.DISCARD,
    confirm_from=1,
)
STOP = Action(
    name="stop",
    permission="stop_job",
    label=_("Stop"),
    short_description=_("Stop selected %(verbose_name_plural)s"),
    effect=_(
        "A running job is interrupted and discarded. "
        "If it cannot be interrupted, its process is terminated."
    ),
    done=_("Stop requested"),
    eligible=lambda jobs: jobs.stoppable(),
    verb=Operation.Verb.STOP,
    confirm_from=1,
)
STOP_AND_RETRY = replace(
    STOP,
    name="stop_and_retry",
    label=_("Stop and run again"),
    short_description=_("Stop selected %(verbose_name_plural)s and run them again"),
    effect=_(
        "A running job is interrupted, and becomes ready with all its attempts. "
        "If it cannot be interrupted, its process is terminated."
    ),
    done=_("Stop requested, to run again"),
    verb=Operation.Verb.STOP_AND_RETRY,
)
REPRIORITISE = Action(
    name="reprioritise",
    permission="reprioritise_job",
    label=_("Set priority"),
    short_description=_("Set priority of selected %(verbose_name_plural)s"),
    effect=_("Within a queue, jobs with a higher priority run first."),
    done=_("Priority set to %(value)s"),
    eligible=lambda jobs: jobs.waiting(),
    verb=Operation.Verb.REPRIORITISE,
    field=forms.IntegerField(
        label=_("Priority"),
        min_value=-HIGHEST_PRIORITY,
        max_value=HIGHEST_PRIORITY,
        help_text=_("From -100 to 100."),
    ),
)
MOVE = Action(
    name="move",
    permission="move_job",
    label=_("Move to another queue"),
    short_description=_("Move selected %(verbose_name_plural)s to another queue"),
    effect=_("Waiting jobs move to the other queue. Running and finished jobs stay in theirs."),
    done=_("Moved to “%(value)s”"),
    eligible=lambda jobs: jobs.waiting(),
    verb=Operation.Verb.MOVE,
    field=QueueField(
        label=_("Queue"), max_length=100, help_text=_("Name of a queue that a worker serves.")
    ),
)

RUN_JOB_NOW = Action(
    name="run_now",
    permission="reschedule_job",
    label=_("Run now"),
    short_description=_("Run selected %(verbose_name_plural)s now"),
    effect=_("A scheduled job becomes ready: it waits neither for its time nor for its retry."),
    done=_("Ready to run"),
    eligible=lambda jobs: jobs.scheduled(),
    verb=Operation.Verb.RUN_NOW,
    confirm_from=2,
)
RESCHEDULE = Action(
    name="reschedule",
    permission="reschedule_job",
    label=_("Reschedule"),
    short_description=_("Reschedule selected %(verbose_name_plural)s"),
    effect=_("Waiting jobs run from that time. Jobs that would expire before are unchanged."),
    done=_("Scheduled for %(value)s"),
    eligible=lambda jobs: jobs.waiting(),
    verb=Operation.Verb.RESCHEDULE,
    field=TimeField(label=_("Time")),
)

# Failures, and their jobs.

RETRY_AFFECTED = replace(
    RETRY,
    label=_("Retry all jobs now"),
    short_description=_("Retry all jobs of selected %(verbose_name_plural)s now"),
    effect=_(
        "Failed jobs become ready, with all their attempts. "
        "Jobs that wait for a retry become ready now."
    ),
    target=Execution.objects.affected_jobs,
    # One condition: PostgreSQL would scan all jobs for two, each with the failure's attempts.
    eligible=lambda jobs: jobs.filter(state__in=[*UNSUCCESSFUL, State.SCHEDULED]),
    verb=Operation.Verb.RETRY_NOW,
    warning=no_warning,
    confirm_from=1,
)
RETRY_IN_STEPS = replace(
    RETRY_AFFECTED,
    name="retry_in_steps",
    label=_("Retry in steps"),
    short_description=_("Retry jobs of selected %(verbose_name_plural)s in steps"),
    effect=_(
        "Three jobs first, then one percent, then the others, as long as they do not fail again."
    ),
    in_steps=True,
)
DISCARD_AFFECTED = replace(
    DISCARD,
    label=_("Discard all jobs"),
    short_description=_("Discard all jobs of selected %(verbose_name_plural)s"),
    effect=_("Failed jobs, and jobs that wait for a retry, do not run unless they are retried."),
    target=Execution.objects.affected_jobs,
)
MUTE = Action(
    name="mute",
    permission="triage_failure",
    label=_("Mute"),
    short_description=_("Mute selected %(verbose_name_plural)s"),
    effect=_("A muted failure stays muted when it occurs again."),
    done=_("Muted"),
    eligible=lambda failures: failures.open(),
    run=lambda failures: failures.mute(),
    recorded=Operation.Verb.MUTE,
)
MUTE_FOR = replace(
    MUTE,
    name="mute_for",
    label=_("Mute for a while"),
    short_description=_("Mute selected %(verbose_name_plural)s for a while"),
    effect=_(
        "A muted failure stays muted when it occurs again, and is open again after this time."
    ),
    done=_("Muted for %(value)s"),
    run=lambda failures, length: failures.mute(timezone.now() + length),
    field=_length((3600, _("1 hour")), (24 * 3600, _("1 day")), (7 * 24 * 3600, _("1 week"))),
)
RESOLVE = Action(
    name="resolve",
    permission="triage_failure",
    label=_("Resolve"),
    short_description=_("Resolve selected %(verbose_name_plural)s"),
    effect=_("A resolved failure is reopened when it occurs again."),
    done=_("Resolved"),
    eligible=lambda failures: failures.unresolved(),
    run=lambda failures: failures.resolve(),
    recorded=Operation.Verb.RESOLVE,
)
REOPEN = Action(
    name="reopen",
    permission="triage_failure",
    label=_("Reopen"),
    short_description=_("Reopen selected %(verbose_name_plural)s"),
    effect=_("A reopened failure is listed as open again."),
    done=_("Reopened"),
    eligible=lambda failures: failures.closed(),
    run=lambda failures: failures.reopen(),
    recorded=Operation.Verb.REOPEN,
)

# Recurring tasks.

ENABLE = Action(
    name="enable",
    permission="enable_recurringtask",
    label=_("Enable"),
    short_description=_("Enable selected %(verbose_name_plural)s"),
    effect=_("An enabled task runs again, from its next scheduled time."),
    done=_("Enabled"),
    eligible=lambda tasks: tasks.disabled(),
    run=lambda tasks: tasks.enable(),
    recorded=Operation.Verb.ENABLE,
)
DISABLE = Action(
    name="disable",
    permission="enable_recurringtask",
    label=_("Disable"),
    short_description=_("Disable selected %(verbose_name_plural)s"),
    effect=_("A disabled task is not enqueued until it is enabled. Its enqueued jobs still run."),
    done=_("Disabled"),
    eligible=lambda tasks: tasks.enabled(),
    run=lambda tasks: tasks.disable(),
    recorded=Operation.Verb.DISABLE,
    confirm_from=2,
)
RUN_NOW = Action(
    name="run",
    permission="run_recurringtask",
    label=_("Run now"),
    short_description=_("Run selected %(verbose_name_plural)s now"),
    effect=_("The task is enqueued immediately, in addition to its schedule."),
    done=_("Enqueued"),
    eligible=all_of,
    run=lambda tasks: run_now(tasks, lambda row, wait: enqueue(row, wait, alias())),
    recorded=Operation.Verb.RUN,
    confirm_from=2,
)

# Queues and tasks.

PAUSE = Action(
    name="pause",
    permission="pause_queue",
    label=_("Pause"),
    short_description=_("Pause selected %(verbose_name_plural)s"),
    effect=_("Workers claim none of its jobs until it is resumed. Running jobs continue."),
    done=_("Paused"),
    eligible=lambda rows: rows.pausable(),
    run=lambda rows: rows.pause(),
    recorded=Operation.Verb.PAUSE,
    confirm_from=2,
)
RESUME = Action(
    name="resume",
    permission="pause_queue",
    label=_("Resume"),
    short_description=_("Resume selected %(verbose_name_plural)s"),
    effect=_("Workers claim its jobs again."),
    done=_("Resumed"),
    eligible=lambda rows: rows.paused(),
    run=lambda rows: rows.resume(),
    recorded=Operation.Verb.RESUME,
)
PAUSE_FOR = Action(
    name="pause_for",
    permission="pause_queue",
    label=_("Pause for a while"),
    short_description=_("Pause selected %(verbose_name_plural)s for a while"),
    effect=_(
        "Workers claim none of its jobs for this duration, or until it is resumed. "
        "Running jobs continue."
    ),
    done=_("Paused for %(value)s"),
    eligible=all_of,
    # Some drivers write the value as its text.
    run=lambda rows, length: rows.pause(until=timedelta(seconds=length.total_seconds())),
    recorded=Operation.Verb.PAUSE,
    field=_length(
        (900, _("15 minutes")),
        (3600, _("1 hour")),
        (4 * 3600, _("4 hours")),
        (24 * 3600, _("1 day")),
    ),
)
CLEAR = Action(
    name="clear",
    permission="discard_job",
    label=_("Discard all waiting jobs"),
    short_description=_("Discard all waiting jobs of selected %(verbose_name_plural)s"),
    effect=_("Discarded jobs do not run unless they are retried. Running jobs continue."),
    done=_("Discarded"),
    target=lambda queues: queues.waiting(),
    eligible=all_of,
    verb=Operation.Verb.DISCARD,
    confirm_from=1,
)
RESTRICT = Action(
    name="restrict",
    permission="restrict_queue",
    label=_("Set limit"),
    short_description=_("Set limit of selected %(verbose_name_plural)s"),
    effect=_("The limit applies to all hosts together. Running jobs continue."),
    done=_("Limit set to %(value)s"),
    eligible=all_of,
    run=lambda queues, limit: queues.restrict(limit),
    recorded=Operation.Verb.RESTRICT,
    field=forms.IntegerField(
        label=_("Maximum number of jobs that run at a time"),
        min_value=1,
        max_value=999_999,
        required=False,
        help_text=_("Empty: the limit from the settings."),
    ),
)

# Processes.

QUIET = Action(
    name="quiet",
    permission="control_process",
    label=_("Quiet"),
    short_description=_("Quiet selected %(verbose_name_plural)s"),
    effect=_(
        "A quiet worker claims no more jobs until it is resumed. Running jobs continue, and jobs "
        "that have not started are released. Of a supervisor: all its workers."
    ),
    done=_("Quieted within seconds"),
    eligible=lambda processes: processes.active(),
    run=lambda processes: processes.quiet(),
    recorded=Operation.Verb.QUIET,
    confirm_from=2,
)
RESUME_PROCESS = Action(
    name="resume",
    permission="control_process",
    label=_("Resume"),
    short_description=_("Resume selected %(verbose_name_plural)s"),
    effect=_("Quiet workers claim jobs again."),
    done=_("Resumed within seconds"),
    eligible=lambda processes: processes.quieted(),
    run=lambda processes: processes.resume(),
    recorded=Operation.Verb.WAKE,
)
STOP_PROCESS = Action(
    name="stop",
    permission="control_process",
    label=_("Stop"),
    short_description=_("Stop selected %(verbose_name_plural)s"),
    effect=_(
        "A worker ends when its running jobs have ended, and its supervisor starts another one. A "
        "supervisor ends with all its processes, as after SIGTERM: jobs that run for longer than "
        "shutdown_timeout are interrupted and run again. What has started it may start it again."
    ),
    done=_("Stop requested"),
    eligible=lambda processes: processes.controllable(),
    run=lambda processes: processes.stop(),
    recorded=Operation.Verb.END,
    confirm_from=1,
)

# Operations.

STOP_OPERATION = Action(
    name="stop",
    permission="stop_operation",
    label=_("Stop"),
    short_description=_("Stop selected %(verbose_name_plural)s"),
    effect=_("A stopped operation changes no more jobs. What it has changed stays, until an undo."),
    done=_("Stop requested"),
    eligible=lambda operations: operations.stoppable(),
    run=lambda operations: operations.stop(),
)
CONTINUE = Action(
    name="continue",
    permission="stop_operation",
    label=_("Continue"),
    short_description=_("Continue selected %(verbose_name_plural)s"),
    effect=_("A new job goes on with the operation."),
    done=_("Continued"),
    eligible=lambda operations: operations.stalled(),
    run=go_on,
)
UNDO = Action(
    name="undo",
    permission="undo_operation",
    label=_("Undo"),
    short_description=_("Undo selected %(verbose_name_plural)s"),
    effect=_(
        "Its jobs become what they were before. Jobs that have started, moved or ended since then "
        "are unchanged."
    ),
    done=_("Undone"),
    eligible=lambda operations: operations.undoable(),
    confirm_from=1,
)

# The jobs of batches.

RETRY_BATCH = replace(
    RETRY,
    label=_("Retry all failed jobs"),
    short_description=_("Retry all failed jobs of selected %(verbose_name_plural)s"),
    confirm_from=1,
    effect=_(
        "A retried job becomes ready. The callbacks of a finished batch are not enqueued again."
    ),
    target=lambda batches: batches.jobs().failed(),
)
DISCARD_BATCH = replace(
    DISCARD,
    label=CLEAR.label,
    short_description=CLEAR.short_description,
    effect=_(
        "Discarded jobs do not run unless they are retried. "
        "Running jobs continue, and the batch finishes when they have ended."
    ),
    target=lambda batches: batches.jobs().waiting(),
)
