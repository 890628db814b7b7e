from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import connections, models
from django.db.models import Q
from django.db.models.sql import UpdateQuery
from django.utils.translation import gettext_lazy as _

from ..core.queue_selector import QueueSelector
from .document import DocumentField
from .expressions import Now, composed, now_plus
from .identifier import IdentifierField
from .primary import PrimaryQuerySet

# Seconds that a heartbeat may be later than the reader's time: statements wait for locks.
AHEAD = 60.0


def _random_id() -> int:
    # Up to 53 bits: JavaScript and JSON store such a number exactly.
    return 1 + secrets.randbelow(2**53 - 1)


def _heartbeat(dead_after: float, memory: int | None) -> dict[str, object]:
    return {"heartbeat_at": Now(), "expires_at": now_plus(dead_after), "memory": memory}


def _request(process: Process, asked: Mapping[int, str], before: str) -> str:
    """Return what is asked of a process: by its own row, or by that of its supervisor."""
    if own := asked.get(process.pk):
        return own
    if len(asked) < len({process.pk, process.supervisor_id or process.pk}):
        return before
    return Process.Request.QUIET if any(asked.values()) else ""


class ProcessQuerySet(PrimaryQuerySet["Process"]):
    """Processes: registration, heartbeats, and which are alive."""

    def register(self, process: Process) -> None:
        """Insert the row of a starting process.

        Not with save(), so that no receiver in the project can prevent it.
        """
        self.bulk_create([process])

    def erase(self) -> int:
        """Delete rows that match the filters at the time of the DELETE. Return their number.

        delete() would read them first and then delete by id, if the project has a receiver of
        pre_delete or post_delete.
        """
        return self._raw_delete(self.db)

    def beat(self, dead_after: float, memory: int | None = None) -> bool:
        """Send a heartbeat that is valid for ``dead_after`` seconds, with the memory in bytes.

        Return False if the processes have been declared dead: they own nothing then.
        """
        return bool(self.update(**_heartbeat(dead_after, memory)))

    def controllable(self) -> ProcessQuerySet:
        """Filter processes that obey quiet() and stop(): live workers and supervisors."""
        kinds = (Process.Kind.WORKER, Process.Kind.SUPERVISOR)
        return self.alive().filter(kind__in=kinds).exclude(request=Process.Request.STOP)

    def active(self) -> ProcessQuerySet:
        """Filter processes that can be asked to claim no more jobs."""
        return self.controllable().filter(request="")

    def quieted(self) -> ProcessQuerySet:
        """Filter live processes that were asked to claim no more jobs."""
        return self.controllable().filter(request=Process.Request.QUIET)

    def quiet(self) -> int:
        """Request that workers claim no more jobs, until resume(). Return the number of processes.

        Running jobs continue. For a supervisor, all its workers, and those that replace them.
        """
        return self.active().update(request=Process.Request.QUIET)

    def resume(self) -> int:
        """Let quiet workers claim again. Return the number of processes."""
        return self.quieted().update(request="")

    def stop(self) -> int:
        """Request that processes end as after SIGTERM. Return the number of processes.

        A worker finishes its jobs, and its supervisor starts another one. A supervisor ends with
        its ``runqueue``, as by SIGTERM.
        """
        return self.controllable().update(request=Process.Request.STOP)

    def request_of(self, process: Process, before: str = "") -> str:
        """Return what is asked of a process: by its own row, or by that of its supervisor.

        ``before`` is what was asked last. It holds while either row is missing: a process that was
        declared dead by mistake registers again, and a request ends only with resume().
        """
        return _request(process, dict(self._requests(process)), before)

    def beat_and_ask(
        self, process: Process, dead_after: float, memory: int | None, before: str = ""
    ) -> str | None:
        """Do ``beat()`` and ``request_of()`` for one process. Return None if it was declared dead.

        On PostgreSQL they are one statement: an idle worker sends little else.
        """
        own = self.filter(pk=process.pk)
        if connections[self.db].vendor != "postgresql":
            is_alive = own.beat(dead_after, memory)
            return self.request_of(process, before) if is_alive else None
        query: Any = own.query.chain(UpdateQuery)
        query.add_update_values(_heartbeat(dead_after, memory))
        update, changes = query.get_compiler(self.db).as_sql()
        select, ids = composed(self._requests(process))
        with connections[self.db].cursor() as cursor:
            cursor.execute(
                f"WITH beat AS ({update} RETURNING id), asked AS ({select}) "
                "SELECT asked.*, EXISTS (SELECT FROM beat) FROM asked",
                (*changes, *ids),
            )
            rows = cursor.fetchall()
        is_alive = bool(rows) and rows[0][-1]
        return _request(process, {pk: asked for pk, asked, _ in rows}, before) if is_alive else None

    def _requests(self, process: Process) -> models.QuerySet[Process, tuple[int, str]]:
        ids = {process.pk, process.supervisor_id or process.pk}
        return self.filter(pk__in=ids).values_list("pk", "request")

    def workers(self) -> ProcessQuerySet:
        """Filter live workers, with their supervisors."""
        return self.alive().filter(kind=Process.Kind.WORKER).select_related("supervisor")

    def silent(self) -> ProcessQuerySet:
        """Filter processes whose heartbeat is too old, by their own ``dead_after``.

        Includes heartbeats in the future: the database's clock was ahead, and a live process has
        sent another heartbeat since.
        """
        return self.filter(Q(expires_at__lt=Now()) | Q(heartbeat_at__gt=now_plus(AHEAD)))

    def seen(self) -> ProcessQuerySet:
        """Annotate with the database's time as ``seen_at``, for the age of heartbeats."""
        return self.annotate(seen_at=Now())

    def releases(self) -> set[str]:
        """Return the releases that live workers run."""
        workers = self.alive().filter(kind=Process.Kind.WORKER).exclude(release="")
        return set(workers.values_list("release", flat=True))

    def alive(self) -> ProcessQuerySet:
        """Filter processes with a valid heartbeat."""
        return self.filter(expires_at__gte=Now())


class Process(models.Model):
    """A running worker, dispatcher or supervisor.

    While it lives, it sends heartbeats and owns the jobs that it runs.
    """

    class Kind(models.TextChoices):
        SUPERVISOR = "supervisor", _("Supervisor")
        WORKER = "worker", _("Worker")
        DISPATCHER = "dispatcher", _("Dispatcher")

    class Request(models.TextChoices):
        """What an operator asks of a process, which reads it at each heartbeat."""

        QUIET = "quiet", _("Claim no more jobs")
        STOP = "stop", _("Stop")

    # Random: the id is part of an attempt's fencing token (see Fence), and a failover may lose
    # rows whose numbers a sequence has given out.
    id = models.BigIntegerField(primary_key=True, default=_random_id, editable=False)
    name = IdentifierField(_("name"), max_length=200, unique=True)
    kind = models.CharField(_("kind"), max_length=20, choices=Kind.choices)
    hostname = models.CharField(_("host"), max_length=150)
    pid = models.PositiveIntegerField(_("process id"))
    supervisor = models.ForeignKey(
        "self",
        verbose_name=_("supervisor"),
        null=True,
        blank=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="children",
    )
    release = IdentifierField(_("release"), max_length=100, blank=True, default="", db_default="")
    request = models.CharField(
        _("request"), max_length=5, choices=Request.choices, blank=True, default="", db_default=""
    )
    # The resident memory, in bytes.
    memory = models.PositiveBigIntegerField(_("memory"), null=True, blank=True)
    details = DocumentField(_("details"), default=dict)
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    expires_at = models.DateTimeField(_("expires at"))
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=Now())

    objects = ProcessQuerySet.as_manager()

    class Meta:
        verbose_name = _("process")
        verbose_name_plural = _("processes")
        default_permissions = ("view",)
        permissions = [("control_process", "Can quiet, resume and stop processes")]

    def __str__(self) -> str:
        return str(self.name)

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    @property
    def log_fields(self) -> dict[str, object]:
        """Structured fields of log records about the process."""
        return {"process_name": self.name}

    def serves(self, queue: str) -> bool:
        """Return True if this worker claims from a queue; False while it is quiet."""
        return not self.is_quiet and self.has(queue)

    def has(self, queue: str) -> bool:
        """Return True if this worker is there for a queue, if it is not quiet."""
        return QueueSelector(self.queues).position(queue) is not None

    @property
    def is_quiet(self) -> bool:
        """Whether an operator wants the process, or its supervisor, to claim no more jobs."""
        return bool(self.request or (self.supervisor and self.supervisor.request))

    @property
    def facts(self) -> dict[str, Any]:
        """What the process has said of itself; empty if its row was written by other means."""
        return self.details if isinstance(self.details, dict) else {}

    @property
    def queues(self) -> tuple[str, ...]:
        """The names and patterns of the queues that this worker serves."""
        return tuple(name.strip() for name in str(self.facts.get("queues", "*")).split(","))

    @property
    def threads(self) -> int:
        """The number of threads of this worker."""
        number = self.facts.get("threads")
        return number if isinstance(number, int) else 0

    def is_alive(self, now: datetime) -> bool:
        """Return True if the process counts as alive at this moment of the database's time."""
        return now <= self.expires_at
