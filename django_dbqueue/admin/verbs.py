"""What operators can do to rows, said once: for the button, the action, the permission, the question and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import router
from django.db.models import QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..models import Job, Queue
from ..wakeup import wake

Rows = QuerySet[Any]
Text = str | Promise


def themselves(rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True, kw_only=True)
class Verb:
    """Something that an operator may do to rows.

    name: the end of its URL, and its action's name.
    permission: it needs the page's ``has_<permission>_permission``.
    label: what its button says.
    means: what it does to a row, as said before a confirmation.
    done: what was done, before how many rows: "Discarded: 3 jobs."
    eligible: the rows, of those given, that it would change.
    act: changes them, and says how many.
    target: the rows that it is about, for those that the operator chose; a failure's verbs are about its jobs.
    asks_from: from how many rows on it asks first; None never.
    """

    name: str
    permission: str
    label: Text
    means: Text
    done: Text
    eligible: Callable[[Any], Rows]
    act: Callable[[Any], int]
    target: Callable[[Rows], Rows] = themselves
    asks_from: int | None = None

    def asks(self, number: int) -> bool:
        return self.asks_from is not None and number >= self.asks_from


# So many queues are woken at once; workers find the jobs of the others by themselves, within their poll interval.
SAMPLE = 1000


def _retry(jobs: Any) -> int:
    queues = set(jobs.retriable().order_by().values_list("queue", flat=True)[:SAMPLE])
    changed: int = jobs.retry()
    for queue in queues:
        wake(router.db_for_write(Job), queue)
    return changed


def _resume(queues: Any) -> int:
    names = list(queues.paused().values_list("name", flat=True)[:SAMPLE])
    changed: int = queues.resume()
    for queue in names:
        wake(router.db_for_write(Queue), queue)
    return changed


RETRY = Verb(
    name="retry",
    permission="retry",
    label=_("Retry"),
    means=_("A retried job is ready again, and runs as soon as a worker is free."),
    done=_("Ready to run again"),
    eligible=lambda jobs: jobs.retriable(),
    act=_retry,
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
PAUSE = Verb(
    name="pause",
    permission="pause",
    label=_("Pause"),
    means=_("No worker takes jobs from a paused queue until it is resumed. What runs already goes on."),
    done=_("Paused"),
    eligible=lambda queues: queues.unpaused(),
    act=lambda queues: queues.pause(),
    asks_from=2,
)
RESUME = Verb(
    name="resume",
    permission="pause",
    label=_("Resume"),
    means=_("Workers take jobs from a resumed queue again."),
    done=_("Resumed"),
    eligible=lambda queues: queues.paused(),
    act=_resume,
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
