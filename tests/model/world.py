"""The state beside the rows (memory of workers, answers to clients), and the checked properties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from django_dbqueue.models import ClaimedJob
from django_dbqueue.models.enums import FAILURES, FINISHED, Fence, Outcome
from django_dbqueue.runtime.recovery import LEAST_ATTEMPTS

from .database import Database, Row, Rows, Violation


@dataclass(frozen=True)
class Claim:
    """A claim in the memory of its worker.

    serial: the number of the claim, counted over all workers.
    end: the result that was sent, if no answer came. accepted: whether that result was accepted.
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
        """True if a failure of this attempt is not retried."""
        return self.failures + 1 >= self.most

    def __str__(self) -> str:
        return f"claim #{self.serial} of job {name_of(self.job)}"


class Worker(NamedTuple):
    """silent: its heartbeats are lost. in_doubt: its connection broke, so it may own unknown jobs.
    lost: attempts that it had when the connection broke, and that the database does not have.
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
    """The answers about a job, and what follows from them.

    wanted: the number of calls. serving: the call that the last claim serves. closed: the last call
    that needs no more runs, and why. owner: the last claim; None once its attempt has ended.
    ran: seconds that the process of that claim has lived since. not_before: seconds until the time
    of the last call.
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
    """crashed: dead processes that still have a row, and the seconds since they died."""

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
        """Renumber claims: worlds that differ only by these numbers are equal."""
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
    """The cause of a change: new claims, a claim that ends, a worker that releases, or recovery."""

    given: tuple[Claim, ...] = ()
    ends: Claim | None = None
    releases: Worker | None = None
    recovers: bool = False


NO_CAUSE = By()


def observe(
    database: Database, world: World, rows: Rows, description: str, by: By = NO_CAUSE
) -> tuple[Fact, ...]:
    """Return the facts after a change of rows. Raise Violation, with the step, if it is wrong."""
    try:
        return _observe(database, world, rows, by)
    except Violation as violation:
        raise Violation(description, *violation.args) from None


def _observe(database: Database, world: World, rows: Rows, by: By) -> tuple[Fact, ...]:
    before, after = database.jobs(world.rows), database.jobs(rows)
    if len(before) != len(after):
        raise Violation("a job is missing or duplicated")
    if (number := database.count_limited_running(rows)) > 1:
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
            facts[job] = _claimed(facts[job], claim, now)
    return tuple(facts)


def _claimed(fact: Fact, claim: Claim, row: Row) -> Fact:
    """The database accepts a claim: the job may run."""
    name = name_of(claim.job)
    if fact.closed == fact.wanted:
        raise Violation(f"job {name} runs again, though {fact.why}, without a new call")
    if fact.not_before > 0:
        raise Violation(f"job {name} runs {fact.not_before} s before the time of its call")
    failures = fact.failures if fact.serving == fact.wanted else 0
    most = max(LEAST_ATTEMPTS, claim.most) if fact.last == Outcome.LOST else claim.most
    if failures >= most:
        raise Violation(f"job {name} runs again after {failures} failed attempts of at most {most}")
    if '"call' in row.args and f'"call {fact.wanted}"' not in row.args:
        raise Violation(f"job {name} runs as {row.args}, but call {fact.wanted} was the last")
    return fact._replace(owner=claim.serial, serving=fact.wanted, ran=0, failures=failures)


def _ended(world: World, job: int, was: Row, now: Row, outcome: str | None, by: By) -> Fact:
    """An attempt has ended, with an outcome, or without one by a release."""
    fact, name = world.facts[job], name_of(job)
    held = {claim.serial for worker in world.workers for claim in worker.claims}
    # A second claim of the same process without an answer: the job runs once, for both.
    is_own = by.ends and by.ends.process == was.process and fact.owner not in held
    if by.ends and by.ends.serial != fact.owner and not is_own:
        raise Violation(f"the result of {by.ends} was accepted for another claim, #{fact.owner}")
    if by.releases and fact.owner in held:
        raise Violation(f"{by.releases} released job {name}, which still runs")
    alive = {worker.process for worker in world.workers if not worker.silent}
    if by.recovers and was.process in alive:
        raise Violation(f"job {name} was taken from a live worker with heartbeats")
    if not (by.ends or by.releases or by.recovers):
        raise Violation(f"the attempt at job {name} ended without a cause")
    if by.recovers and outcome == Outcome.TIMED_OUT and fact.ran <= TIMEOUT:
        raise Violation(
            f"job {name} has timed out after {fact.ran} s of run time; its timeout is {TIMEOUT} s"
        )
    fact = fact._replace(owner=None)
    if fact.serving != fact.wanted:
        return fact
    if outcome in FAILURES:
        fact = fact._replace(failures=fact.failures + 1, last=outcome)
    if now.state in FINISHED and fact.closed != fact.wanted:
        return fact._replace(closed=fact.wanted, why=f"it was {now.state}")
    return fact


# Timeout of the scenarios' jobs, in seconds.
TIMEOUT = 5
