"""Queries and operations on jobs. Every operation filters by state first."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import OperationalError, connections, models
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When

from .. import limits
from ..core.notify import notify_queues
from ..core.transactions import is_conflict, writing
from . import keyed, walking
from .alike import COLUMNS, LazyJobs, rows_behind
from .batch_share import BatchShare, EndedRun
from .claim_size import Budget
from .expressions import Among, NotBefore, Now, after, by_index
from .lanes import lanes
from .locking import delete, lock, lock_first, locked_parts
from .operated import OperatedJobs
from .process import Process
from .semaphore import Semaphore
from .semaphores import Pruned
from .series import InARow, alone
from .states import FINISHED, UNSUCCESSFUL, EnqueueStatus, Lane, Place, State
from .writing import create, insert, set_json

if TYPE_CHECKING:
    from .job import Job
    from .settlement import AttemptResult


# The number of times that a claim continues behind jobs that find no slot.
ROUNDS = 50


# Stopped, and not enqueued again since.
_WAS_STOPPED = Q(stop_asked_at__isnull=False, asked_again=False)
# The changes of a release. MySQL sets one column after the other: each expression reads only
# columns that are set after it.
_RELEASED: dict[str, Any] = {
    "state": Case(
        When(_WAS_STOPPED, then=Value(State.DISCARDED)),
        When(run_after__gt=Now(), then=Value(State.SCHEDULED)),
        default=Value(State.READY),
    ),
    "finished_at": Case(When(_WAS_STOPPED, then=Now()), default=None, output_field=models.DateTimeField()),
    "failures": Case(When(asked_again=True, then=Value(0)), default=F("failures"), output_field=models.PositiveIntegerField()),
    "attempts_before": Case(When(asked_again=True, then=F("attempt")), default=F("attempts_before")),
    "stop_asked_at": Case(When(asked_again=True, then=None), default=F("stop_asked_at")),
    "asked_again": False,
    "process": None,
    "started_at": None,
}


class JobQuerySet(OperatedJobs):
    def ready(self) -> JobQuerySet:
        return self.filter(state=State.READY)

    def of_lane(self, lane: Lane) -> JobQuerySet:
        """Return the lane's ready jobs, in the order in which they are claimed."""
        rows = self.filter(state=State.READY, queue=lane.queue, priority=lane.priority).order_by("run_after", "id")
        return by_index(rows, "dbqueue_job_lane")

    def running(self) -> JobQuerySet:
        return self.filter(state=State.RUNNING)

    def failed(self) -> JobQuerySet:
        return self.filter(state=State.FAILED)

    def due(self) -> JobQuerySet:
        return self.filter(state=State.SCHEDULED, run_after__lte=Now())

    def orphaned(self) -> JobQuerySet:
        """Return the running jobs whose process is gone."""
        return self.running().filter(~Exists(Process.objects.using(self.db).filter(pk=OuterRef("process_id"))))

    def overdue(self, grace: float = 0.0) -> JobQuerySet:
        """Return the jobs that have run past their timeout by at least ``grace`` seconds."""
        end = models.ExpressionWrapper(F("started_at") + F("timeout"), output_field=models.DateTimeField())
        return self.running().filter(timeout__isnull=False).annotate(end=end).filter(end__lt=after(-grace))  # type: ignore[no-any-return]

    def asked_to_stop(self) -> JobQuerySet:
        return self.running().filter(stop_asked_at__isnull=False)

    def owned(self, job: Job) -> JobQuerySet:
        """Return the job, if it still belongs to the process that claimed it: see Fence."""
        return self.running().filter(pk=job.pk, attempt=job.attempt, process=job.process_id)

    def begin(self, job: Job) -> bool:
        """Record that a claimed job starts, for a job that must not run twice.

        Returns False if the job belongs to another process now.
        """
        return bool(self.owned(job).update(has_begun=True))

    def save_policy(self, job: Job) -> None:
        """Store the policy of a job that was enqueued by SQL.

        A row that was re-enqueued meanwhile has the policy of that call.
        """
        rows = self.owned(job).filter(max_attempts=0, asked_again=False)
        rows.update(max_attempts=job.max_attempts, on_lost=job.on_lost, timeout=job.timeout)

    def save_metadata(self, job: Job) -> bool:
        """Store the metadata that the job's attempt has set.

        Returns False if the job belongs to another process now. The metadata of a job that was
        re-enqueued meanwhile is dropped: its row already belongs to the next run.
        """
        noted = models.Case(
            models.When(asked_again=True, then=F("metadata")), default=models.Value(job.metadata, models.JSONField())
        )
        return bool(self.owned(job).update(metadata=noted))

    def write(self, jobs: Sequence[Job]) -> None:
        """Write new jobs without keys, all or none.

        They have the times of the first job, which the database may set.
        """
        limited = [] if isinstance(jobs, LazyJobs) else [job for job in jobs if job.limits]
        if limited:
            Semaphore.objects.using(self.db).block_surplus(limited)
        first = jobs[0]
        with writing(self.db, savepoint=False) if len(jobs) > 1 else nullcontext():
            create(self, first, keyed.TIMES)
            insert(self, COLUMNS, rows_behind(first, jobs))

    def merge(self, jobs: Sequence[Job], how: keyed.UniquePolicy) -> list[tuple[Job, EnqueueStatus]]:
        """Upsert jobs with keys, each into the one row of its key.

        Returns that row, and the effect of the call on it.
        """
        return keyed.merge(self, jobs, how)

    def lanes(self, queues: Iterable[str] | None = None) -> list[Lane]:
        """Return the lanes that have ready jobs, of these queues or of all.

        Each step is one lookup in the lane index.
        """
        if connections[self.db].vendor == "postgresql" and not self.query.where:
            return lanes(self.db, self.model._meta.db_table, queues)
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

    def claim(
        self,
        lane: Lane,
        process: Process,
        limit: int,
        in_a_row: InARow = alone,
        since: Place | None = None,
        budget: Budget | None = None,
        room: Callable[[], int] | None = None,
    ) -> list[Job]:
        """Claim up to ``limit`` of the lane's jobs for the process, oldest first.

        Jobs that find no slot become BLOCKED. ``since`` is the position in the lane to start from.
        ``budget`` is the number of bytes of arguments that may be loaded; None is any number.
        ``room`` returns in each of the claim's transactions how many more jobs may run.

        A limited job is followed by the next waiters for its slot: the process runs one job of a
        series at a time.
        """
        claimed: list[Job] = []
        for _ in range(ROUNDS):
            wanted = limit - len(claimed)
            # Each round has its own transaction: it locks semaphores in the order of their keys,
            # and only once.
            try:
                more, jobs = self._claim(lane, process, wanted, in_a_row, since, budget, room)
            except Pruned:
                continue
            except OperationalError as error:
                # Others have claimed some of these jobs first, and nothing has changed here.
                if connections[self.db].in_atomic_block or not is_conflict(error):
                    raise
                continue
            claimed += jobs
            if not more or len(claimed) >= limit:
                break
        return claimed

    def _claim(
        self,
        lane: Lane,
        process: Process,
        limit: int,
        in_a_row: InARow,
        since: Place | None,
        budget: Budget | None,
        room: Callable[[], int] | None,
    ) -> tuple[bool, list[Job]]:
        """Run one round of a claim. Returns whether more jobs may be left, and the claimed jobs."""
        with writing(self.db, savepoint=False):
            if room and (limit := min(limit, room())) <= 0:
                return False, []
            waiting = self.of_lane(lane).filter(NotBefore(*since)) if since else self.of_lane(lane)
            # A process that was declared dead claims nothing, even if it has not noticed: its clock
            # may have stood still.
            owner = Process.objects.using(self.db).filter(pk=process.pk)
            found: list[Any] = []
            for part in locked_parts(waiting.filter(Exists(owner)).annotate(db_now=Now()), limit):
                rows = part[: limit - len(found)]
                found += budget.take(rows, self.model.objects.using(self.db)) if budget else rows
                if len(found) == limit or (budget and budget.is_spent):
                    break
            jobs = found
            if unreadable := [job for job in found if job.limits and not limits.are_readable(job.limits)]:
                self._call_off(unreadable)
            if any(job.limits for job in found):
                jobs = Semaphore.objects.using(self.db).acquire(found, limit, in_a_row)
            if jobs:
                now = jobs[0].db_now
                # The rows are locked. Found by primary key alone: MariaDB might find them by their
                # state, and lock others.
                self.filter(Among([job.id for job in jobs])).update(
                    state=State.RUNNING,
                    process=process,
                    attempt=F("attempt") + 1,
                    started_at=now,
                    has_begun=False,
                )
        clock = time.monotonic()
        for job in jobs:
            job.attempt += 1
            job.belong_to(process, now, clock)
        return len(found) == limit, jobs

    def _call_off(self, unreadable: Sequence[Job]) -> None:
        """Mark jobs with unreadable limits, to be discarded when they start.

        They must not stop their lane.
        """
        self.filter(pk__in=[job.pk for job in unreadable]).update(limits=None)
        for job in unreadable:
            job.limits, job.called_off = None, "Its limits cannot be read."

    def release(self, jobs: Sequence[Job]) -> set[UUID]:
        """Release claimed jobs that were not started, without spending an attempt.

        Nothing is recorded of them. A job that an operator has stopped meanwhile is DISCARDED. A
        job that was enqueued again meanwhile waits for the time of that call. A job whose row
        another transaction has locked is left unchanged. Returns the ids of all others.
        """
        if not jobs:
            return set()
        fences = {job.fence for job in jobs}
        with writing(self.db, savepoint=False):
            # In the order in which a settlement locks them, and found by primary key alone.
            rows = lock(self.filter(Among([job.id for job in jobs])).order_by("pk"))
            seen = list(rows.values_list("pk", "attempt", "process_id"))
            # A job that has a process is running.
            if owned := [row[0] for row in seen if row in fences]:
                self.filter(Among(owned)).update(**_RELEASED)
        notify_queues(self.db, (job.queue for job in jobs))
        return {row[0] for row in seen}

    def apply_outcomes(self, outcomes: Sequence[AttemptResult], again: set[Any]) -> None:
        """Move settled jobs out of RUNNING, by the outcomes of their attempts.

        The jobs of ``again`` were re-enqueued while they ran.
        """
        anew = defaultdict(list)
        for outcome in outcomes:
            if outcome.fence[0] in again:
                anew[outcome.wait].append(outcome.fence[0])
        ended = [o for o in outcomes if o.fence[0] in again and (o.state in FINISHED or o.then)]
        if runs := [EndedRun(o.fence[0], o.state, attempt=o.fence[1]) for o in ended]:
            BatchShare.objects.using(self.db).let_go(runs)
        for wait, ids in anew.items():
            keyed.restart_run(self.filter(pk__in=ids), wait)
        outcomes = [outcome for outcome in outcomes if outcome.fence[0] not in again]
        if moves := [(outcome.fence[0], outcome.then) for outcome in outcomes if outcome.then]:
            walking.walk(self, moves)
        if children := [child for outcome in outcomes for child in outcome.children]:
            self.write(children)
        alike = defaultdict(list)
        for outcome in outcomes:
            if not outcome.then:
                alike[outcome.state, outcome.wait, outcome.is_failure].append(outcome.fence[0])
        for (state, wait, failed), ids in alike.items():
            changes: dict[str, Any] = {"failures": F("failures") + 1} if failed else {}
            changes |= {"finished_at": Now()} if state in FINISHED else {"run_after": after(wait)}
            self.filter(Among(ids)).update(state=state, process=None, **changes)
        results = {outcome.fence[0]: outcome.result for outcome in outcomes if outcome.result is not None}
        set_json(self, "result", results)

    def dispatch(self, limit: int = 1000) -> list[str]:
        """Make scheduled jobs ready that are due. Returns the queue of each."""
        with writing(self.db):
            due = dict(lock_first(self.due().order_by("run_after").values_list("pk", "queue"), limit))
            self.filter(pk__in=list(due), state=State.SCHEDULED).update(state=State.READY)
        return list(due.values())

    def scheduled_in(self, limit: int = 1) -> list[float]:
        """Return the seconds until the first scheduled jobs that are not yet due."""
        later = self.filter(state=State.SCHEDULED, run_after__gt=Now()).order_by("run_after").values_list("run_after", Now())
        return [(run_after - now).total_seconds() for run_after, now in later[:limit]]

    def waits(self, lanes: Iterable[Lane]) -> dict[Lane, float]:
        """Return the seconds since the oldest job of each lane could have run.

        One lookup in the lane index for each lane.
        """
        found = {}
        for lane in lanes:
            if times := self.of_lane(lane).values_list("run_after", Now()).first():
                found[lane] = (times[1] - times[0]).total_seconds()
        return found

    def ahead_of(self, job: Job) -> JobQuerySet:
        """Return the ready jobs of a job's queue that are claimed before it."""
        sooner = Q(run_after__lt=job.run_after) | Q(run_after=job.run_after, pk__lt=job.pk)
        ahead = Q(priority__gt=job.priority) | Q(sooner, priority=job.priority)
        return self.ready().filter(ahead, queue=job.queue).exclude(pk=job.pk)

    def blocked_by_others(self) -> JobQuerySet:
        """Return the jobs that wait for others to end, and not for a time assigned by a rate."""
        timed = Semaphore.objects.using(self.db).filter(pk=OuterRef("blocked_by"), every__isnull=False)
        return self.filter(state=State.BLOCKED).exclude(Exists(timed))

    def in_line_before(self, job: Job) -> JobQuerySet:
        """Return the blocked jobs that get the next slot of a job's semaphore before it."""
        sooner = Q(priority__gt=job.priority) | Q(priority=job.priority, pk__lt=job.pk)
        return self.filter(sooner, state=State.BLOCKED, blocked_by=job.blocked_by)

    def waiting_for(self, semaphore: Any) -> JobQuerySet:
        """Return the blocked jobs of a semaphore, in the order in which they get its slots."""
        return self.filter(state=State.BLOCKED, blocked_by=semaphore).order_by("-priority", "id")

    def prune(self, states: Sequence[str], older_than: float, limit: int) -> int:
        """Delete jobs finished over ``older_than`` seconds ago, with all rows that refer to them.

        Returns how many.
        """
        with writing(self.db):
            old = self.filter(state__in=states, finished_at__lt=after(-older_than)).order_by("finished_at")
            found = lock_first(old.values_list("pk", "state", "batch"), limit)
            if failed := [EndedRun(*row) for row in found if row[1] in UNSUCCESSFUL]:
                BatchShare.objects.using(self.db).let_go(failed)
            return self.erase([row[0] for row in found])

    def erase(self, ids: list[Any]) -> int:
        """Delete jobs with their attempts.

        One statement for each table: nothing is loaded to be deleted.
        """
        if not ids:
            return 0
        for each in self.model._meta.related_objects:
            if each.related_model._meta.app_label == self.model._meta.app_label:
                rows = each.related_model._base_manager.using(self.db)
                delete(rows.filter(**{f"{each.field.name}__in": ids}))
        return delete(self.filter(pk__in=ids))

    def count_running(self) -> dict[int, int]:
        """Count the jobs that each process runs, or holds to run next."""
        return dict(self.running().values_list("process").annotate(number=models.Count("pk")))

    def recent_keyed_tasks(self, sample: int = 2000) -> set[str]:
        """Return the tasks whose keys the newest jobs have."""
        return {key.partition(" ")[0] for key in self.order_by("-pk").values_list("key", flat=True)[:sample] if key}

    def recent_tasks(self, sample: int = 2000) -> list[str]:
        """Return the tasks of the newest jobs.

        Only these are cheap to find in a large table, whose ids are in order of time.
        """
        return sorted(set(self.order_by("-pk").values_list("task", flat=True)[:sample]))
