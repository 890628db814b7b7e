from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple

from django.db import models, transaction
from django.db.models import Exists, F, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from ..ids import uuid7
from .expressions import Now, PartialIndex, after, lock
from .process import Process


class Lane(NamedTuple):
    """The ready jobs of one queue and one priority: what one claim reads, in the order of one index."""

    queue: str
    priority: int


class State(models.TextChoices):
    # Waits for its time.
    SCHEDULED = "scheduled", _("Scheduled")
    # Waits for a slot of its concurrency key.
    BLOCKED = "blocked", _("Blocked")
    # May be claimed.
    READY = "ready", _("Ready")
    # Is owned by a process.
    RUNNING = "running", _("Running")
    # Came to its end.
    SUCCESSFUL = "successful", _("Successful")
    # Will not be tried again by itself.
    FAILED = "failed", _("Failed")
    # Was called off.
    DISCARDED = "discarded", _("Discarded")


WAITING = [State.SCHEDULED, State.BLOCKED, State.READY]
FINISHED = [State.SUCCESSFUL, State.FAILED, State.DISCARDED]
UNSUCCESSFUL = [State.FAILED, State.DISCARDED]


class JobQuerySet(models.QuerySet["Job"]):
    def ready(self) -> JobQuerySet:
        return self.filter(state=State.READY)

    def running(self) -> JobQuerySet:
        return self.filter(state=State.RUNNING)

    def failed(self) -> JobQuerySet:
        return self.filter(state=State.FAILED)

    def due(self) -> JobQuerySet:
        return self.filter(state=State.SCHEDULED, run_after__lte=Now())

    def orphaned(self) -> JobQuerySet:
        """Running, for a process that is gone."""
        return self.running().filter(~Exists(Process.objects.using(self.db).filter(pk=OuterRef("process_id"))))

    def hanged(self, *, after_seconds: float) -> JobQuerySet:
        """Running for longer than jobs should, or for a process that does not beat any more."""
        beating = Process.objects.using(self.db).alive().filter(pk=OuterRef("process_id"))
        return self.running().filter(Q(started_at__lt=after(-after_seconds)) | ~Exists(beating))

    def lanes(self, queues: Iterable[str] | None = None) -> list[Lane]:
        """The lanes that have ready jobs, of these queues or of all. Each step is one look into the lane index."""
        found = []
        for queue in self._ready_queues() if queues is None else queues:
            rows = self.ready().filter(queue=queue).order_by("priority").values_list("priority", flat=True)
            priority = rows.first()
            while priority is not None:
                found.append(Lane(queue, priority))
                priority = rows.filter(priority__gt=priority).first()
        return found

    def _ready_queues(self) -> Iterable[str]:
        rows = self.ready().order_by("queue").values_list("queue", flat=True)
        queue = rows.first()
        while queue is not None:
            yield queue
            queue = rows.filter(queue__gt=queue).first()

    def claim(self, lane: Lane, process: Process, limit: int) -> list[Job]:
        """Make up to ``limit`` of the lane's jobs the process's own, oldest first."""
        with transaction.atomic(using=self.db):
            waiting = self.ready().filter(queue=lane.queue, priority=lane.priority).order_by("run_after", "id")
            jobs = list(lock(waiting).annotate(db_now=Now())[:limit])
            if jobs:
                now = jobs[0].db_now  # type: ignore[attr-defined]
                self.ready().filter(pk__in=[job.pk for job in jobs]).update(
                    state=State.RUNNING, process=process, attempt=F("attempt") + 1, started_at=now
                )
        clock = time.monotonic()
        for job in jobs:
            job.state, job.process, job.started_at = State.RUNNING, process, now
            job.claimed_at, job.clock = now, clock
            job.attempt += 1
        return jobs

    def release(self, jobs: Iterable[Job]) -> int:
        """Give back claimed jobs that were not started: they count no attempt, and nothing is recorded of them."""
        released = 0
        for attempt, group in groupby(sorted(jobs, key=lambda job: job.attempt), key=lambda job: job.attempt):
            owned = self.running().filter(attempt=attempt, pk__in=[job.pk for job in group])
            released += owned.update(state=State.READY, process=None, started_at=None)
        return released

    def dispatch(self, limit: int = 1000) -> list[str]:
        """Make jobs ready whose time has come. Returns the queue of each."""
        with transaction.atomic(using=self.db):
            due = dict(lock(self.due().order_by("run_after")).values_list("pk", "queue")[:limit])
            self.filter(pk__in=list(due), state=State.SCHEDULED).update(state=State.READY)
        return list(due.values())

    def retriable(self) -> JobQuerySet:
        return self.filter(state__in=UNSUCCESSFUL)

    def retry(self) -> int:
        """Make failed and discarded jobs ready again, with all their attempts before them. Returns how many."""
        return self.retriable().update(state=State.READY, run_after=Now(), failures=0, started_at=None, finished_at=None)

    def discardable(self) -> JobQuerySet:
        return self.filter(state__in=[*WAITING, State.FAILED])

    def discard(self) -> int:
        """Call off jobs that wait or have failed; what runs or has ended stays as it is. Returns how many."""
        return self.discardable().update(state=State.DISCARDED, finished_at=Now())

    def ahead_of(self, job: Job) -> JobQuerySet:
        """The ready jobs of a job's queue that are claimed before it."""
        sooner = Q(run_after__lt=job.run_after) | Q(run_after=job.run_after, pk__lt=job.pk)
        ahead = Q(priority__gt=job.priority) | Q(sooner, priority=job.priority)
        return self.ready().filter(ahead, queue=job.queue).exclude(pk=job.pk)

    def count_running(self) -> dict[int, int]:
        """How many jobs each process runs, or holds to run next."""
        return dict(self.running().values_list("process").annotate(number=models.Count("pk")))

    def recent_tasks(self, sample: int = 2000) -> list[str]:
        """The tasks of the newest jobs: all that is cheap to know of a large table, whose ids are in order of time."""
        return sorted(set(self.order_by("-pk").values_list("task", flat=True)[:sample]))


class Job(models.Model):
    """One call of a task."""

    State = State

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    task = models.CharField(_("task"), max_length=255)
    queue = models.CharField(_("queue"), max_length=100)
    priority = models.SmallIntegerField(_("priority"), default=0)
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.READY)
    args = models.JSONField(_("arguments"), default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), default=dict, blank=True)
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)
    run_after = models.DateTimeField(_("run after"), db_default=Now())
    attempt = models.PositiveIntegerField(_("attempt"), default=0, help_text=_("How often it was claimed."))
    failures = models.PositiveIntegerField(_("failures"), default=0, help_text=_("How many of its attempts failed."))
    max_attempts = models.PositiveSmallIntegerField(
        _("most attempts"), default=1, help_text=_("After so many failures it is tried no more.")
    )
    process = models.ForeignKey(
        Process,
        verbose_name=_("process"),
        null=True,
        blank=True,
        on_delete=models.DO_NOTHING,
        # No constraint: it would lock the process's row, which beats, at every claim.
        db_constraint=False,
        db_index=False,
        related_name="jobs",
    )
    result = models.JSONField(_("result"), null=True, blank=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), db_default=Now())
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    objects = JobQuerySet.as_manager()

    # Of a job that this process has claimed: the database's time and this process's clock at that moment.
    claimed_at: datetime
    clock: float

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        # Nobody writes jobs by hand: these, and those of the verbs below, are all that can be allowed.
        default_permissions = ("view",)
        constraints = [
            models.CheckConstraint(name="dbqueue_job_state", condition=Q(state__in=State.values)),
            models.CheckConstraint(
                name="dbqueue_job_running_is_owned",
                condition=Q(state=State.RUNNING, process__isnull=False) | ~Q(state=State.RUNNING) & Q(process__isnull=True),
            ),
            models.CheckConstraint(
                name="dbqueue_job_finished_is_dated",
                condition=Q(state__in=FINISHED, finished_at__isnull=False) | ~Q(state__in=FINISHED) & Q(finished_at__isnull=True),
            ),
            models.CheckConstraint(name="dbqueue_job_priority", condition=Q(priority__gte=-100, priority__lte=100)),
            models.CheckConstraint(name="dbqueue_job_failures", condition=Q(failures__lte=F("attempt"))),
        ]
        indexes = [
            PartialIndex(name="dbqueue_job_lane", states=[State.READY], fields=["queue", "priority", "run_after", "id"]),
            PartialIndex(name="dbqueue_job_due", states=[State.SCHEDULED], fields=["run_after"]),
            PartialIndex(name="dbqueue_job_running", states=[State.RUNNING], fields=["process"]),
            PartialIndex(name="dbqueue_job_finished", states=FINISHED, fields=["finished_at"]),
        ]
        permissions = [
            ("retry_job", "Can retry jobs"),
            ("discard_job", "Can discard jobs"),
            ("pause_queue", "Can pause and resume queues"),
        ]

    def __str__(self) -> str:
        return f"{self.task.rpartition('.')[2]} {self.pk}"

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a line of the log about it, once it is claimed, says to machines."""
        process = self.process.log_fields if self.process else {}
        return {"job_id": str(self.pk), "task": self.task, "queue": self.queue, "attempt": self.attempt, **process}

    def now(self) -> datetime:
        """The database's time, for whoever has claimed this job: as of the claim, and by the monotonic clock since."""
        return self.claimed_at + timedelta(seconds=time.monotonic() - self.clock)
