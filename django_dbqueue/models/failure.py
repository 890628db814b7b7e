from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from django.db import models
from django.db.models import Case, Count, F, Value, When
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from ..core.error_reports import ErrorReport
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

    def mute(self) -> int:
        """Mute open failures: they are known, and stay muted however often they are seen again.

        Returns how many were open.
        """
        return self.open().update(state=Failure.State.MUTED)

    def resolve(self) -> int:
        """Resolve failures: they were fixed. A failure that is seen again is open again.

        Returns how many were not resolved before.
        """
        return self.unresolved().update(state=Failure.State.RESOLVED)

    def reopen(self) -> int:
        """Reopen failures. Returns how many were muted or resolved."""
        return self.closed().update(state=Failure.State.OPEN)

    def identify(self, reports: Mapping[str, ErrorReport]) -> dict[str, int]:
        """Return the group's id for each fingerprint. A new fingerprint gets a new group."""
        known = self._ids(reports)
        if missing := {key: report for key, report in reports.items() if key not in known}:
            groups = self._grouped(missing)
            prints = {key: report.fingerprint for key, report in groups.items()}
            found = self._ids(prints.values())
            new = {
                report.fingerprint: report
                for report in groups.values()
                if report.fingerprint not in found
            }
            if new:
                rows = [
                    Failure(
                        fingerprint=key,
                        error_type=r.type[:255],
                        message=r.message,
                        location=r.location,
                    )
                    for key, r in sorted(new.items())
                ]
                self.bulk_create(rows, ignore_conflicts=True)
                found = self._ids(prints.values())
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

    def record(self, ids: list[int]) -> None:
        """Count one more execution for each id. A resolved group that fails again is open again."""
        reopened = Case(
            When(state=Failure.State.RESOLVED, then=Value(Failure.State.OPEN)), default=F("state")
        )
        # In the order of ids, so that two workers that count the same groups do not deadlock.
        for pk, times in sorted(Counter(ids).items()):
            self.filter(pk=pk).update(count=F("count") + times, last_seen=Now(), state=reopened)

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
    error_type = models.CharField(_("error"), max_length=255)
    message = models.TextField(_("message"), help_text=_("The message of the first occurrence."))
    location = models.CharField(_("location"), max_length=255)
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.OPEN)
    count = models.PositiveBigIntegerField(_("occurrences"), default=0)
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
