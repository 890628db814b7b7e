"""The state beside the rows (the workers' memory, and what clients were told), and the properties that are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from django_dbqueue.models import ClaimedJob
from django_dbqueue.models.enums import FAILURES, FINISHED, Fence, Outcome
from django_dbqueue.runtime.recovery import LEAST_ATTEMPTS

from .database import Database, Row, Rows, Violation


@dataclass(frozen=True)
class Claim:
    """A claim as the worker that made it has it in memory.

    serial: the claims of all workers are counted, whatever the database knows of them.
    end: the outcome that was sent to the database, if no answer came. accepted: whether it was accepted then.
    """

    serial: int
    job: int
    attempt: int
    process: int
    failures: int
    most: int
    end: str = ""
    accepted: bool = False
    row: ClaimedJob = field(compare=False, default_factory=ClaimedJob)

    @property
    def is_last(self) -> bool:
        """Whether the job is not tried again if this attempt fails."""
        return self.failures + 1 >= self.most

    def __str__(self) -> str:
        return f"claim #{self.serial} of job {name_of(self.job)}"


class Worker(NamedTuple):
    """silent: its heartbeats do not arrive. in_doubt: its connection broke, so it may own jobs that it does not know.
    lost: the attempts that it knew after that, and the database did not.
    """

    number: int
    process: int
    silent: bool = False
    in_doubt: bool = False
    claims: tuple[Claim, ...] = ()
    lost: frozenset[Fence] = frozenset()

    def __str__(self) -> str:
        return f"worker {self.number}"


class Fact(NamedTuple):
    """What the outside was told of a job, and what it may rely on.

    wanted: how often a run of it was asked for. serving: which of these the last claim serves. closed: which of these needs no
    more runs, and why. owner: the claim that the database gave last; None once the attempt has ended. ran: for how many seconds
    the process of that claim has lived since. not_before: seconds until the time that the last call named.
    """

    wanted: int = 1
    serving: int = 0
    closed: int = 0
    why: str = ""
    owner: int | None = None
    ran: int = 0
    failures: int = 0
    last: str = ""
    not_before: int = 0


class World(NamedTuple):
    """crashed: processes that died, whose rows are there yet, and how many seconds ago."""

    rows: Rows
    workers: tuple[Worker, ...]
    facts: tuple[Fact, ...]
    crashed: tuple[tuple[int, int], ...] = ()
    serials: int = 0
    left: tuple[tuple[str, int], ...] = ()

    def may(self, what: str) -> bool:
        return dict(self.left).get(what, 0) > 0

    def spend(self, what: str) -> World:
        return self._replace(
            left=tuple((name, number - (name == what)) for name, number in self.left)
        )

    def with_worker(self, worker: Worker) -> World:
        return self._replace(
            workers=tuple(worker if each.number == worker.number else each for each in self.workers)
        )

    def canonical(self) -> World:
        """Worlds that differ only by the numbers of their claims are one."""
        claims = [claim.serial for worker in self.workers for claim in worker.claims]
        used = sorted({*claims, *(fact.owner for fact in self.facts if fact.owner is not None)})
        if used == list(range(1, self.serials + 1)):
            return self
        rank = {serial: place for place, serial in enumerate(used, 1)}
        workers = tuple(
            each._replace(
                claims=tuple(
                    Claim(**{**vars(claim), "serial": rank[claim.serial]}) for claim in each.claims
                )
            )
            for each in self.workers
        )
        facts = tuple(each._replace(owner=rank.get(each.owner)) for each in self.facts)
        return self._replace(workers=workers, facts=facts, serials=len(used))


def name_of(job: int) -> str:
    return "ABC"[job]


class By(NamedTuple):
    """Who changes the rows: claims that are given, a claim that ends, a worker that gives back, or recovery."""

    given: tuple[Claim, ...] = ()
    ends: Claim | None = None
    gives_back: Worker | None = None
    recovers: bool = False


NOBODY = By()


def observe(
    database: Database, world: World, rows: Rows, said: str, by: By = NOBODY
) -> tuple[Fact, ...]:
    """What the outside knows once the rows have changed. Raises Violation, with what was done, if they may not change so."""
    try:
        return _observe(database, world, rows, by)
    except Violation as violation:
        raise Violation(said, *violation.args) from None


def _observe(database: Database, world: World, rows: Rows, by: By) -> tuple[Fact, ...]:
    before, after = database.jobs(world.rows), database.jobs(rows)
    if len(before) != len(after):
        raise Violation("a job is gone, or is there twice")
    if (number := database.limited_and_running(rows)) > 1:
        raise Violation(f"{number} jobs run under a limit of 1")
    old = database.executions(world.rows)
    new = {
        fence: outcome for fence, outcome in database.executions(rows).items() if fence not in old
    }
    facts = list(world.facts)
    for job, (was, now, pk) in enumerate(zip(before, after, database.ids(rows), strict=True)):
        if was.runs and not (now.runs and now.attempt == was.attempt):
            facts[job] = _ended(world, job, was, now, new.get((pk, was.attempt)), by)
        if now.runs and not was.runs:
            (claim,) = [claim for claim in by.given if claim.job == job]
            facts[job] = _given(facts[job], claim, now)
    return tuple(facts)


def _given(fact: Fact, claim: Claim, row: Row) -> Fact:
    """The database gives a claim: the job is to run."""
    name = name_of(claim.job)
    if fact.closed == fact.wanted:
        raise Violation(f"job {name} runs again, though {fact.why} and nobody asked for it again")
    if fact.not_before > 0:
        raise Violation(f"job {name} runs {fact.not_before} s before the time that was asked for")
    failures = fact.failures if fact.serving == fact.wanted else 0
    most = max(LEAST_ATTEMPTS, claim.most) if fact.last == Outcome.LOST else claim.most
    if failures >= most:
        raise Violation(
            f"job {name} runs again after {failures} failed attempts, of which it has {most}"
        )
    if '"call' in row.args and f'"call {fact.wanted}"' not in row.args:
        raise Violation(f"job {name} runs as {row.args}, but call {fact.wanted} was the last")
    return fact._replace(owner=claim.serial, serving=fact.wanted, ran=0, failures=failures)


def _ended(world: World, job: int, was: Row, now: Row, outcome: str | None, by: By) -> Fact:
    """An attempt has ended, with an outcome or without: its job was given back."""
    fact, name = world.facts[job], name_of(job)
    held = {claim.serial for worker in world.workers for claim in worker.claims}
    # A process whose second claim was committed without an answer runs the job once, for both.
    is_own = by.ends and by.ends.process == was.process and fact.owner not in held
    if by.ends and by.ends.serial != fact.owner and not is_own:
        raise Violation(
            f"the outcome of {by.ends} was accepted for claim #{fact.owner}, which another has made"
        )
    if by.gives_back and fact.owner in held:
        raise Violation(f"{by.gives_back} gave back job {name}, which still runs")
    alive = {worker.process for worker in world.workers if not worker.silent}
    if by.recovers and was.process in alive:
        raise Violation(f"job {name} was taken from a worker that is alive and beats")
    if not (by.ends or by.gives_back or by.recovers):
        raise Violation(f"the attempt at job {name} ended, and nobody has ended it")
    if by.recovers and outcome == Outcome.TIMED_OUT and fact.ran <= TIMEOUT:
        raise Violation(
            f"job {name} has timed out after {fact.ran} s; it may run {TIMEOUT} s, and its host was dead since"
        )
    fact = fact._replace(owner=None)
    if fact.serving != fact.wanted:
        return fact
    if outcome in FAILURES:
        fact = fact._replace(failures=fact.failures + 1, last=outcome)
    if now.state in FINISHED and fact.closed != fact.wanted:
        return fact._replace(closed=fact.wanted, why=f"it was {now.state}")
    return fact


# Of jobs that have one, in seconds.
TIMEOUT = 5
