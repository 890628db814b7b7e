"""Alerts: from what the checks find to what is sent to a target.

Several dispatchers may do this at a time: each change depends on the state that it was derived
from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from enum import Enum
from operator import itemgetter
from typing import Any, Protocol

from django.db.models import F, Q

from ..core.alert_targets import AlertTarget
from ..models import Alert
from ..models.alert import AlertQuerySet
from ..models.expressions import Now, now_plus
from ..models.locking import delete

# Seconds for which a problem has to be absent before it is over.
SETTLED = 60.0
# Seconds that a process has for a try to send.
LEASE = 60.0
# Seconds before the second try, which double with each further one, and the longest.
FIRST_RETRY, LONGEST_RETRY = 15.0, 900.0
# Days that an alert is kept after its problem was last found.
KEPT = timedelta(days=90)


class Problem(Protocol):
    """What a check finds: see doctor/finding.py."""

    @property
    def what(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def remedy(self) -> str: ...
    @property
    def severity(self) -> Enum: ...
    @property
    def is_event(self) -> bool: ...


# Problems by the names of their check and of their subject.
Problems = Mapping[tuple[str, str], Problem]


def note(
    database: str,
    target: AlertTarget,
    found: Problems,
    unknown: Collection[str] = (),
    further: Collection[tuple[str, str]] = (),
) -> None:
    """Update the target's alerts by what the checks find now.

    ``unknown`` are the checks that could not run: the problems that they found may last.
    ``further`` are problems that are found, but counted together in another one.
    """
    alerts = Alert.objects.using(database)
    named = Q(check_name__in={key[0] for key in found}, subject__in={key[1] for key in found})
    rows: Any = alerts.filter(Q(ended_at=None) | named, target=target.name).annotate(seen_at=Now())
    known = {(row.check_name, row.subject): row for row in rows}
    new = [
        Alert(
            target=target.name,
            check_name=check,
            subject=subject,
            due_at=now_plus(0.0 if problem.is_event else target.after),
            **_columns(problem),
        )
        # In order: other dispatchers insert the same ones.
        for (check, subject), problem in sorted(found.items(), key=itemgetter(0))
        if (check, subject) not in known
    ]
    alerts.bulk_create(new, ignore_conflicts=True)
    for key, row in known.items():
        if problem := found.get(key):
            _note_found(alerts.filter(pk=row.pk), row, target, problem)
        elif key in further:
            alerts.filter(pk=row.pk, ended_at=None).update(found_at=Now())
        elif row.check_name not in unknown and not row.is_over:
            _note_absent(alerts.filter(pk=row.pk), row, target)


def _note_found(alert: AlertQuerySet, row: Any, target: AlertTarget, problem: Problem) -> None:
    was_found = row.found_at >= row.seen_at - timedelta(seconds=SETTLED)
    # If no check ran for a while, a problem that was not sent yet has to last anew.
    if not row.is_over and (was_found or row.is_sent or problem.is_event):
        alert.filter(ended_at=None).update(found_at=Now(), **_columns(problem))
    elif problem.is_event:
        # It was sent, and is not sent again.
        alert.update(found_at=Now())
    else:
        opened_at, due_at = row.seen_at, row.seen_at + timedelta(seconds=target.after)
        if row.sent_at:
            # Else it would count as sent, if the last problem was sent in the same millisecond.
            opened_at = max(opened_at, row.sent_at + timedelta(milliseconds=1))
            due_at = max(due_at, row.sent_at + timedelta(seconds=target.cooldown))
        alert.filter(ended_at__isnull=not row.is_over).update(
            ended_at=None,
            opened_at=opened_at,
            found_at=Now(),
            due_at=due_at,
            tries=0,
            error="",
            **_columns(problem),
        )


def _note_absent(alert: AlertQuerySet, row: Any, target: AlertTarget) -> None:
    """End an alert whose problem is absent, unless it is being sent.

    If it was sent, once the problem has been absent for a while; else at once.
    """
    is_being_sent = row.sending_until is not None and row.sending_until > row.seen_at
    # What has happened is still to be sent.
    if is_being_sent or (row.is_event and not row.is_sent):
        return
    is_resolved = row.is_sent and target.send_resolved and not row.is_event
    absent = {"found_at__lt": now_plus(-SETTLED)} if row.is_sent else {}
    alert.filter(ended_at=None, **absent).update(
        ended_at=Now(), due_at=Now() if is_resolved else None, tries=0, error=""
    )


def _columns(problem: Problem) -> dict[str, Any]:
    names = ("what", "why", "remedy", "is_event")
    own = {name: getattr(problem, name) for name in names}
    return {"severity": problem.severity.value, **own}


def take_due(database: str, target: AlertTarget) -> list[Alert]:
    """Return the alerts that this process is to send now. No other process gets them meanwhile."""
    alerts = Alert.objects.using(database).filter(target=target.name)
    found: list[Any] = list(alerts.due().order_by("severity", "opened_at", "pk"))
    taken: list[Alert] = []
    for alert in found:
        # A problem has to be there still when its time has come. SQLite stores milliseconds.
        lasts = alert.found_at >= alert.due_at - timedelta(milliseconds=1)
        if not (lasts or alert.is_event or alert.is_over):
            continue
        # A process that dies leaves them to another one.
        due_at = now_plus(LEASE)
        mine = alerts.due().filter(pk=alert.pk, ended_at__isnull=not alert.is_over)
        if mine.update(due_at=due_at, sending_until=due_at, tries=F("tries") + 1):
            taken.append(alert)
    return taken


def note_sent(database: str, sent: list[Alert]) -> None:
    """Record that alerts were sent."""
    for each in sent:
        alert = Alert.objects.using(database).filter(pk=each.pk)
        # It may have opened again meanwhile.
        alert.filter(ended_at__isnull=not each.is_over).update(due_at=None, tries=0, error="")
        alert.update(sent_at=Now(), sending_until=None)


def note_unsent(database: str, unsent: list[Alert], error: str) -> None:
    """Record that alerts could not be sent, and when to try again: later and later."""
    tries = max(each.tries for each in unsent)
    pause = min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(tries, 10))
    for each in unsent:
        alert = Alert.objects.using(database).filter(pk=each.pk)
        alert.filter(ended_at__isnull=not each.is_over).update(due_at=now_plus(pause), error=error)
        alert.update(sending_until=None)


def prune_alerts(database: str) -> int:
    """Delete alerts whose problem was last found long ago. Return their number."""
    old = Alert.objects.using(database).filter(found_at__lt=now_plus(-KEPT))
    return delete(old)
