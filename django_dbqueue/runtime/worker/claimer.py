"""Claims ready jobs for one worker process, lane by lane in the worker's order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from django.db.models import Exists, Q

from ...compat import DEFAULT_TASK_QUEUE_NAME
from ...core.notify import parse_payload
from ...core.options import Options
from ...core.queue_selector import QueueSelector
from ...engine.claim import claim, claim_behind, queue_room
from ...engine.claim_fast_path import FastClaim, fast_claim
from ...engine.claim_size import Budget
from ...engine.slot_group import GroupSize, ungrouped
from ...models import ClaimedJob, Process, Queue, TaskState
from ...models.enums import Lane, Place
from ...models.job import JobQuerySet
from ...models.pausing import PAUSED
from ...registry import coroutine_tasks, decide_limits, unlimited_tasks
from .lane_cursors import LaneCursors, rests_until

DEFAULT = Options()


class Claimer:
    """Claims jobs, with a list of lanes that is cached for a second.

    With a cached list, a claim runs only its own statements.

    A lane rises by one priority for each ``ageing`` seconds that its oldest job has waited.
    """

    FRESH = 1.0
    # Seconds for which this worker does not claim jobs of a task that it does not know.
    LEFT = 30.0

    def __init__(
        self,
        database: str,
        process: Process,
        queues: QueueSelector,
        options: Options = DEFAULT,
        group_size: GroupSize = ungrouped,
    ) -> None:
        self._jobs = ClaimedJob.objects.using(database)
        self._queues = Queue.objects.using(database)
        self._tasks = TaskState.objects.using(database)
        self._process, self._selector, self._options, self._group_size = (
            process,
            queues,
            options,
            group_size,
        )
        # A client may send the names of very many queues.
        self._rank = lru_cache(maxsize=1000)(queues.position)
        self._lanes: list[Lane] = []
        self._seen: set[Lane] = set()
        # Seconds that the oldest job of each lane has waited. Read only with ``ageing``.
        self._waits: dict[Lane, float] = {}
        self._cursors = LaneCursors(database)
        self._order: dict[Lane, tuple[int, int]] = {}
        # Lanes that have had no job for this worker since the lanes were read.
        self._empty: set[Lane] = set()
        self._read_at = float("-inf")
        self._known: set[str] = set()
        # Queues with a concurrency limit, and the limit.
        self.limits: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._notified: set[Lane] = set()
        self._kind_rests_until = float("-inf")
        self._at_once = lru_cache(maxsize=64)(self._claim_at_once)
        # True if the last scan found no ready job in any of the worker's queues, including jobs
        # that may not be claimed now.
        self.idle = False
        self._paused_tasks: list[str] = []
        self._tasks_read_at = float("-inf")

    def warm_up(self) -> None:
        """Make the server plan a claim and load its catalogs.

        The first job then starts 3.5 ms earlier, of 8.6 ms.
        """
        self._at_once(Lane((self._selector.names() or [DEFAULT_TASK_QUEUE_NAME])[0], 0))(0)

    def on_notify(self, payload: str) -> bool:
        """Handle a NOTIFY of new jobs. Return whether this worker serves their queue."""
        queue, priority = parse_payload(payload)
        if self._rank(queue) is None:
            return False
        if priority is not None:
            self.note_ready(Lane(queue, priority))
        return True

    def note_ready(self, lane: Lane) -> None:
        """Note a lane that has a ready job. If the worker knows of no other, it claims there."""
        if self._rank(lane.queue) is not None:
            self._notified.add(lane)

    def claim(self, limit: int, held_bytes: int = 0) -> Iterator[list[ClaimedJob]]:
        """Claim up to ``limit`` jobs for the process, and yield them lane by lane.

        Jobs of one lane can start while the next lane is claimed. Fewer than ``limit`` jobs are
        claimed only if no lane has more, on the fast path after a NOTIFY, while scans are slow
        (see LaneCursors), or if more jobs would exceed ``prefetch_bytes``, of which ``held_bytes``
        are in use.
        """
        notified, self._notified = self._notified, set()
        if self._cursors.slow:
            self._seen |= notified
        elif (
            self.idle and not self._left and (jobs := self._claim_notified(tuple(notified), limit))
        ):
            yield jobs
            self._ensure_rows({job.queue for job in jobs})
            return
        budget = Budget(self._options.prefetch_bytes, held_bytes)
        known = self._lanes if time.monotonic() - self._read_at < self.FRESH else []
        to_the_end = {lane for lane in known if not self._cursors.of(lane)}
        room = limit
        for jobs in self._claim(known, limit, budget):
            room -= len(jobs)
            yield jobs
        if room > 0 and not budget.is_spent:
            done = to_the_end if self._read_lanes() else set(known)
            yield from self._claim([lane for lane in self._lanes if lane not in done], room, budget)
        # Round-robin among lanes of the same rank: a full lane must not starve the others.
        following = [
            lane for lane in [*self._lanes[1:], *self._lanes[:1]] if lane not in self._empty
        ]
        self._lanes = sorted(following, key=self._order.__getitem__)

    def claim_kind(
        self, limit: int, held_bytes: int, *, coroutines: bool
    ) -> Iterator[list[ClaimedJob]]:
        """Claim up to ``limit`` jobs of ``async def`` tasks, or of other tasks only.

        For a worker that has no room for the other kind. The claim steps over these jobs: if it
        finds fewer jobs than wanted, the next ones return none for a time.
        """
        if (began := time.monotonic()) < self._kind_rests_until:
            return
        names = coroutine_tasks(self._options.task_modules)
        of_kind = Q(task__in=names) if coroutines else ~Q(task__in=names)
        budget, room = Budget(self._options.prefetch_bytes, held_bytes), limit
        if names or not coroutines:
            self._read_lanes()
            for lane in self._lanes:
                if room <= 0 or budget.is_spent:
                    return
                if jobs := self._claim_lane(self._wanted().filter(of_kind), lane, room, budget):
                    room -= len(jobs)
                    yield jobs
        if room > 0:
            self._kind_rests_until = rests_until(began, at_least=self.FRESH)

    def claim_behind(
        self, member: ClaimedJob, limit: int, group_size: GroupSize
    ) -> list[ClaimedJob]:
        """Claim up to ``limit`` jobs that wait for the slot of a job that this process runs."""
        if self._options.of(member.queue).limit:
            return []
        held_back = self._queues.filter(PAUSED | Q(limit__isnull=False), name=member.queue)
        wanted = self._jobs.filter(~Exists(held_back))
        return claim_behind(
            wanted.exclude(task__in=self._tasks.paused().values("name")),
            self._process,
            member,
            limit,
            group_size,
        )

    def _claim_notified(self, lanes: Iterable[Lane], limit: int) -> list[ClaimedJob]:
        """Claim from the notified lanes without a scan.

        The fast path: the last scan found all lanes empty.
        """
        jobs: list[ClaimedJob] = []
        for lane in sorted(lanes, key=lambda lane: (self._rank(lane.queue), -lane.priority)):
            if len(jobs) < limit and not self._options.of(lane.queue).limit:
                jobs += self._at_once(lane)(limit - len(jobs))
        return jobs

    def _claim_at_once(self, lane: Lane) -> FastClaim:
        held_back = self._queues.filter(PAUSED | Q(limit__isnull=False), name=lane.queue)
        # A job that was enqueued by SQL may have limits that its first claim decides.
        without_limits = unlimited_tasks(self._options.task_modules)
        decided = Q(max_attempts__gt=0) | Q(options__isnull=True, task__in=without_limits)
        wanted = self._jobs.filter(
            decided, ~Exists(held_back), queue=lane.queue, priority=lane.priority
        )
        return fast_claim(
            wanted.exclude(task__in=self._tasks.paused().values("name")), self._process
        )

    def leave(self, task: str) -> None:
        """Leave the jobs of a task to other workers for ``LEFT`` seconds."""
        self._left[task] = time.monotonic() + self.LEFT

    def _wanted(self) -> JobQuerySet:
        now = time.monotonic()
        if now - self._tasks_read_at >= self.FRESH:
            self._paused_tasks, self._tasks_read_at = self._tasks.names_of_paused(), now
        if not self._left and not self._paused_tasks:
            return self._jobs.all()
        self._left = {task: end for task, end in self._left.items() if end > now}
        return self._jobs.exclude(task__in=[*self._left, *self._paused_tasks])

    def _claim(self, lanes: list[Lane], room: int, budget: Budget) -> Iterator[list[ClaimedJob]]:
        wanted = self._wanted() if lanes else self._jobs
        for lane in lanes:
            if room <= 0 or budget.is_spent:
                return
            jobs = self._claim_lane(wanted, lane, room, budget, self._cursors.of(lane))
            is_full = len(jobs) == room or budget.is_spent
            self._cursors.move(lane, jobs, full=is_full)
            if not is_full:
                self._empty.add(lane)
            room -= len(jobs)
            if jobs:
                yield jobs

    def _claim_lane(
        self, jobs: JobQuerySet, lane: Lane, room: int, budget: Budget, since: Place | None = None
    ) -> list[ClaimedJob]:
        limit = self.limits.get(lane.queue)
        queue_has = partial(queue_room, self._jobs.db, lane.queue, limit) if limit else None
        return claim(
            jobs,
            lane,
            self._process,
            room,
            self._group_size,
            since,
            budget,
            queue_has,
            decide_limits,
        )

    def _read_lanes(self) -> bool:
        """Refresh the lanes. Return whether this ran a scan.

        Without a scan, the list is the previous one, with the lanes of recent notifications.
        """
        if scanned := self._cursors.rested:
            self._seen = self._cursors.scan(lambda: self._jobs.lanes(self._selector.names()))
        ranks = {lane: self._rank(lane.queue) for lane in self._seen}
        served = {lane: (rank, -lane.priority) for lane, rank in ranks.items() if rank is not None}
        self.idle = scanned and not served
        paused = self._read_queues({lane.queue for lane in served})
        self._order = {lane: order for lane, order in served.items() if lane.queue not in paused}
        if self._options.ageing:
            self._waits = self._jobs.waits(self._order) if scanned else self._waits
            self._raise_old(self._options.ageing)
        self._lanes, self._empty = sorted(self._order, key=self._order.__getitem__), set()
        self._read_at = time.monotonic()
        return scanned

    def _ensure_rows(self, names: set[str]) -> None:
        """Insert rows for queues that this worker has not seen, so that operators see them."""
        if new := names - self._known:
            self._queues.ensure_rows(new)
            self._known |= new

    def _raise_old(self, ageing: float) -> None:
        """Raise the priority of lanes by ageing.

        The order of the queues still takes precedence: an operator chose it.
        """
        for lane, wait in self._waits.items():
            if lane in self._order:
                rank, depth = self._order[lane]
                self._order[lane] = (rank, depth - max(0, int(wait / ageing)))

    def _read_queues(self, names: set[str]) -> set[str]:
        """Read the limits of these queues. Return the paused ones."""
        self._ensure_rows(names)
        rows = list(self._queues.filter(name__in=names).seen()) if names else []
        limits = {row.name: row.limit or self._options.of(row.name).limit for row in rows}
        self.limits = {name: limit for name, limit in limits.items() if limit}
        return {row.name for row in rows if row.is_paused(row.seen_at)}
