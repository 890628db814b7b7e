from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from django.db import models
from django.db.models import Case, Count, F, Q, Value, When
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from ..core.error_reports import ErrorReport
from ..core.transactions import TRIES
from .expressions import Now, now_plus
from .identifier import IdentifierField
from .primary import PrimaryQuerySet

# The largest number of groups of one exception at one location; and the message pattern of all
# further ones, which no message has.
MOST_ALIKE = 20
FURTHER = "\0"


class FailureQuerySet(PrimaryQuerySet["Failure"]):
    """Failures: filters, triage, and their counting."""

    def open(self) -> FailureQuerySet:
        """Filter failures that are neither muted nor resolved."""
        return self.filter(state=Failure.State.OPEN)

    def unresolved(self) -> FailureQuerySet:
        """Filter open and muted failures."""
        return self.exclude(state=Failure.State.RESOLVED)

    def closed(self) -> FailureQuerySet:
        """Filter muted and resolved failures."""
        return self.exclude(state=Failure.State.OPEN)

    def seen_within(self, seconds: float) -> FailureQuerySet:
        """Filter failures that were seen in the last ``seconds``."""
        return self.filter(last_seen__gte=now_plus(-seconds))

    def mute(self, until: datetime | None = None) -> int:
        """Mute open failures: they are known, and stay muted however often they are seen again.

        With ``until``, they are open again from then on. Returns how many were open.
        """
        return self.update_in_parts(
            FailureQuerySet.open, state=Failure.State.MUTED, muted_until=until
        )

    def unmute(self) -> int:
        """Reopen failures that were muted until now. Returns how many."""
        over = Q(state=Failure.State.MUTED, muted_until__lt=Now())
        return self.update_in_parts(
            lambda failures: failures.filter(over), state=Failure.State.OPEN, muted_until=None
        )

    def resolve(self) -> int:
        """Resolve failures: they were fixed. A failure that is seen again is open again.

        Returns how many were not resolved before.
        """
        return self.update_in_parts(
            FailureQuerySet.unresolved,
            state=Failure.State.RESOLVED,
            reopened_at=None,
            muted_until=None,
        )

    def reopen(self) -> int:
        """Reopen failures. Returns how many were muted or resolved."""
        return self.update_in_parts(
            FailureQuerySet.closed, state=Failure.State.OPEN, muted_until=None
        )

    def identify(self, seen: Mapping[str, tuple[ErrorReport, str]]) -> dict[str, int]:
        """Return the group's id for each fingerprint. A new fingerprint gets a new group.

        ``seen`` are reports with the release in which they were seen, by fingerprint.
        """
        known = self._ids(seen)
        if missing := {key: report for key, (report, _release) in seen.items() if key not in known}:
            groups = self._grouped(missing)
            prints = {key: report.fingerprint for key, report in groups.items()}
            new = {
                report.fingerprint: Failure(
                    fingerprint=report.fingerprint,
                    error_type=report.type[:255],
                    message=report.message,
                    location=report.location,
                    release=seen[key][1],
                )
                for key, report in groups.items()
            }
            found = self._ids(new)
            # Again, if a dispatcher deletes the row of another worker before it is read here.
            for _ in range(TRIES):
                if not (absent := sorted(new.keys() - found)):
                    break
                self.bulk_create([new[key] for key in absent], ignore_conflicts=True)
                found = self._ids(new)
            known |= {key: found[fingerprint] for key, fingerprint in prints.items()}
        return known

    def _grouped(self, new: Mapping[str, ErrorReport]) -> dict[str, ErrorReport]:
        """Group all further messages of a location that already has many message patterns.

        The words of such messages are values.
        """
        rows = self.filter(location__in={report.location for report in new.values()}).order_by()
        counts = Counter(
            {
                tuple(place): n
                for *place, n in rows.values_list("error_type", "location").annotate(Count("pk"))
            }
        )
        groups = {}
        for key, report in sorted(new.items()):
            place = report.type[:255], report.location
            counts[place] += 1
            groups[key] = (
                report if counts[place] <= MOST_ALIKE else replace(report, pattern=FURTHER)
            )
        return groups

    def record(self, seen: Sequence[tuple[int, str]]) -> None:
        """Count one more execution for each id, in its release.

        A resolved group that fails again is open again.
        """
        resolved = models.Q(state=Failure.State.RESOLVED)
        releases = dict(seen)
        # In the order of ids, so that two workers that count the same groups do not deadlock.
        for pk, times in sorted(Counter(pk for pk, _release in seen).items()):
            self.filter(pk=pk).update(
                count=F("count") + times,
                last_seen=Now(),
                last_release=releases[pk],
                # Before the state, which MySQL would read as it is already set.
                reopened_at=Case(When(resolved, then=Now()), default=F("reopened_at")),
                state=Case(When(resolved, then=Value(Failure.State.OPEN)), default=F("state")),
            )

    def _ids(self, fingerprints: Iterable[str]) -> dict[str, int]:
        return dict(
            self.filter(fingerprint__in=list(fingerprints)).values_list("fingerprint", "pk")
        )


class Failure(models.Model):
    """A group of executions that failed alike.

    They have the same exception, the same location in the project's code, and the same message
    pattern.
    """

    class State(models.TextChoices):
        OPEN = "open", _("Open")
        MUTED = "muted", _("Muted")
        RESOLVED = "resolved", _("Resolved")

    fingerprint = IdentifierField(_("fingerprint"), max_length=32, unique=True)
    error_type = IdentifierField(_("error"), max_length=255)
    message = models.TextField(_("message"), help_text=_("The message of the first occurrence."))
    location = IdentifierField(_("location"), max_length=255)
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.OPEN)
    count = models.PositiveBigIntegerField(_("occurrences"), default=0)
    release = IdentifierField(
        _("first release"), max_length=100, blank=True, default="", db_default=""
    )
    last_release = IdentifierField(
        _("last release"), max_length=100, blank=True, default="", db_default=""
    )
    muted_until = models.DateTimeField(_("muted until"), null=True, blank=True)
    reopened_at = models.DateTimeField(
        _("seen again"),
        null=True,
        blank=True,
        help_text=_("The failure was resolved, and was seen again at this time."),
    )
    first_seen = models.DateTimeField(_("first seen"), db_default=Now())
    last_seen = models.DateTimeField(_("last seen"), db_default=Now())

    objects = FailureQuerySet.as_manager()

    class Meta:
        verbose_name = _("failure")
        verbose_name_plural = _("failures")
        default_permissions = ("view",)
        permissions = [("triage_failure", "Can mute, resolve and reopen failures")]

    def __str__(self) -> str:
        return f"{self.error_type.rpartition('.')[2]}: {Truncator(self.message.strip()).chars(100)}"
