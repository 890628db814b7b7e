"""Steps of workers, dispatcher, supervisor, operator and client: each calls the engine once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from django_dbqueue.compat import task_backends
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import ClaimedJob, Job, Process, Slot
from django_dbqueue.models.enums import FINISHED, UNSUCCESSFUL, Fence, Lane, Outcome, State
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.worker.worker import Worker as Role

from .. import direct, tasks
from .database import Database, Violation
from .world import By, Claim, Fact, Worker, World, name_of, observe

LANE = Lane("default", 0)
DEAD_AFTER = 30
# Seconds that pass at once: longer than DEAD_AFTER, each retry delay, and a call's delay.
LATER, PUT_OFF = 40, 30
# The longest way to the end without faults: a lost attempt, two retries and a rerun.
ROUNDS = 8
Step = tuple[str, World]


@dataclass(frozen=True)
class Scenario:
    """Some jobs, and how often each event may happen."""

    enqueue: Callable[[], Any]
    may: dict[str, int]


class Model:
    def __init__(self, database: Database, scenario: Scenario) -> None:
        self.database, self.scenario = database, scenario
        self._checked: set[World] = set()

    def start(self) -> World:
        self.scenario.enqueue()
        workers = tuple(Worker(number, number * 10) for number in (1, 2))
        for worker in workers:
            self._register(worker.process)
        left = tuple(sorted(self.scenario.may.items()))
        return World(self.database.rows(), workers, (Fact(),) * Job.objects.count(), left=left)

    # Possible steps.

    def steps(self, world: World) -> Iterator[Callable[[], Step]]:
        for worker in world.workers:
            yield from self._steps_of(world, worker)
        jobs = self.database.jobs(world.rows)
        if world.crashed or any(worker.silent for worker in world.workers):
            yield partial(self.recover_silent, world)
            for process, _ago in world.crashed:
                for not_started in (False, True) if world.may("not started") else (False,):
                    yield partial(self.recover_killed, world, process, not_started)
        if self._any(world, State.SCHEDULED):
            yield partial(self.dispatch, world)
        if self._any(world, State.BLOCKED):
            yield partial(self.sweep, world)
        if world.may("time"):
            yield partial(self.wait, world.spend("time"))
            if world.may("silence"):
                for worker in world.workers:
                    yield partial(self.wait, world.spend("time").spend("silence"), worker.number)
        if world.may("stop") and any(job.runs for job in jobs):
            yield partial(self.stop, world.spend("stop"))
        if world.may("retry") and any(job.state in UNSUCCESSFUL for job in jobs):
            yield partial(self.retry, world.spend("retry"))
        if world.may("call"):
            for how in ("replace", "rerun"):
                yield partial(self.call, world.spend("call"), how)

    def _steps_of(self, world: World, worker: Worker) -> Iterator[Callable[[], Step]]:
        may_claim = (
            not worker.silent
            and not worker.in_doubt
            and (worker.number == 1 or not self._is_unused(world))
        )
        if may_claim and self._any(world, State.READY):
            yield from self._with_each_fault(world, partial(self.claim, number=worker.number))
        for claim in worker.claims:
            if not claim.end and world.may("release"):
                yield from self._with_each_fault(
                    world.spend("release"), partial(self.release, number=worker.number, claim=claim)
                )
            for end in self._ends(world, claim):
                yield from self._with_each_fault(
                    world.spend(end),
                    partial(self.settle, number=worker.number, claim=claim, end=end),
                )
        if worker.in_doubt:
            yield partial(self.release_unknown, world, worker.number)
        if worker.silent:
            yield partial(self.beat, world, worker.number)
        if world.may("crash") and (worker.claims or worker.in_doubt):
            yield partial(self.crash, world.spend("crash"), worker.number)

    def _is_unused(self, world: World) -> bool:
        """True while both workers are equal: then only the first one claims."""
        as_born = all(
            worker == Worker(worker.number, worker.number * 10) for worker in world.workers
        )
        return as_born and not any(job.attempt for job in self.database.jobs(world.rows))

    def _with_each_fault(
        self, world: World, step: Callable[..., Step]
    ) -> Iterator[Callable[[], Step]]:
        """A COMMIT succeeds; or its answer is lost; or a failover loses it after its answer."""
        yield partial(step, world)
        for how in ("no answer", "failover"):
            if world.may(how):
                yield partial(step, world.spend(how), how=how)

    def _ends(self, world: World, claim: Claim) -> list[str]:
        """Return the possible ends of an attempt; after a lost answer, the end that was sent."""
        row = self.database.jobs(world.rows)[claim.job]
        sees_stop = row.stop and (row.attempt, row.process) == (claim.attempt, claim.process)
        ends = [
            "success",
            *(end for end in ("failure", "interrupted") if world.may(end)),
            *(["stopped"] if sees_stop else []),
        ]
        return [claim.end] if claim.end else ends

    # Steps of workers.

    def claim(self, world: World, number: int, how: str = "") -> Step:
        worker = self._worker(world, number)
        process = Process(pk=worker.process, name=_name(worker.process))
        jobs, rows = self.database.do(
            world.rows, ("claim", worker.process), lambda: direct.claim(LANE, process, 1)
        )
        places = {pk: place for place, pk in enumerate(self.database.ids(rows))}
        given = tuple(
            Claim(
                world.serials + n,
                places[job.pk],
                job.attempt,
                worker.process,
                job.failures,
                job.max_attempts,
                row=job,
            )
            for n, job in enumerate(jobs, 1)
        )
        description = f"{worker} claims {_jobs(claim.job for claim in given) or 'nothing'}"
        facts = observe(self.database, world, rows, description, By(given=given))
        reached = world._replace(serials=world.serials + len(given))
        if how == "no answer":
            reached = reached._replace(rows=rows, facts=facts).with_worker(
                worker._replace(in_doubt=True)
            )
            return f"{description}; the COMMIT succeeds, its answer is lost", reached
        going_on, started = self._split_claims(reached, worker, given)
        if going_on:
            description = f"{description}, which it already runs: the run continues"
        claims = tuple(going_on.get(claim.row.fence, claim) for claim in worker.claims)
        reached = reached.with_worker(worker._replace(claims=(*claims, *started)))
        return (
            self._failover(description, reached)
            if how == "failover"
            else (description, reached._replace(rows=rows, facts=facts))
        )

    def _split_claims(
        self, world: World, worker: Worker, given: tuple[Claim, ...]
    ) -> tuple[dict[Fence, Claim], list[Claim]]:
        """Split claimed jobs as Worker does: running ones get the new claim, others start."""
        here = {claim.row.fence: claim for claim in worker.claims}
        role: Any = SimpleNamespace(
            _before=set(worker.lost), _going_on=set(), _held_fences=lambda: set(here)
        )
        begin: Sequence[ClaimedJob] = [claim.row for claim in given]
        if worker.lost:
            begin, behind = Role._not_held(role, begin)
            assert not behind, "No limit of the model has a group of jobs."
        started = [claim for claim in given if claim.row in begin]
        others = [claim for claim in given if claim.row not in begin]
        return {
            claim.row.fence: replace(here[claim.row.fence], serial=claim.serial) for claim in others
        }, started

    def release(self, world: World, number: int, claim: Claim, how: str = "") -> Step:
        worker = self._worker(world, number)
        key = ("release", claim.row.fence)
        _number, rows = self.database.do(world.rows, key, lambda: direct.release([claim.row]))
        description = f"{worker} releases job {name_of(claim.job)}, unstarted"
        return self._ends_claim(world, worker, claim, rows, description, how)

    def settle(self, world: World, number: int, claim: Claim, end: str, how: str = "") -> Step:
        worker = self._worker(world, number)
        key = ("settle", claim.row.fence, end, claim.is_last)
        status, rows = self.database.do(world.rows, key, lambda: _settle(claim, end))
        description = f"{worker} settles attempt {claim.attempt} of job {name_of(claim.job)} ({end}): {status}"
        if status == "written" and rows == world.rows and not claim.accepted:
            raise Violation(
                description,
                f"the result of {claim} was reported as written, but another claim's result was",
            )
        return self._ends_claim(world, worker, claim, rows, description, how, end)

    def _ends_claim(
        self,
        world: World,
        worker: Worker,
        claim: Claim,
        rows: Any,
        description: str,
        how: str,
        end: str = "",
    ) -> Step:
        facts = observe(self.database, world, rows, description, By(ends=claim))
        others = tuple(each for each in worker.claims if each.serial != claim.serial)
        if how == "no answer":
            # A result is sent again; a released job is forgotten, and found if still owned.
            again = replace(claim, end=end, accepted=claim.accepted or rows != world.rows)
            claims = (*others, again) if end else others
            world = world.with_worker(
                worker._replace(claims=claims, in_doubt=not end or worker.in_doubt)
            )
            return f"{description}; the answer is lost", world._replace(rows=rows, facts=facts)
        world = world.with_worker(worker._replace(claims=others))
        if how == "failover":
            return self._failover(description, world)
        return description, world._replace(rows=rows, facts=facts)

    def _failover(self, description: str, world: World) -> Step:
        """The last transaction is lost; all connections break, so workers check their jobs."""
        workers = tuple(worker._replace(in_doubt=True) for worker in world.workers)
        return f"{description}; the database fails over and loses this transaction", world._replace(
            workers=workers
        )

    def release_unknown(self, world: World, number: int) -> Step:
        """Release unknown jobs as Worker does once its connection is back."""
        worker = self._worker(world, number)
        here = {claim.row.fence for claim in worker.claims}

        def release_jobs() -> frozenset[Fence]:
            owned = ClaimedJob.objects.running().filter(process=worker.process)
            known = {job.fence for job in owned}
            role: Any = SimpleNamespace(
                _recent=deque(),
                _going_on=set(),
                _owned=lambda: owned,
                _held_fences=lambda: here,
                _release_owned=direct.release,
            )
            Role._release_unknown(role)
            return frozenset(role._before - known)

        key = ("release unknown", worker.process, frozenset(here))
        lost, rows = self.database.do(world.rows, key, release_jobs)
        description = f"{worker} reconnects and releases unknown jobs"
        facts = observe(self.database, world, rows, description, By(releases=worker))
        worker = worker._replace(in_doubt=False, lost=lost)
        return description, world.with_worker(worker)._replace(rows=rows, facts=facts)

    def beat(self, world: World, number: int) -> Step:
        """A process that was declared dead is replaced; it may settle its jobs late."""
        worker = self._worker(world, number)
        lives, rows = self.database.do(
            world.rows,
            ("beat", worker.process),
            lambda: Process.objects.filter(pk=worker.process).beat(DEAD_AFTER),
        )
        world = world._replace(rows=rows)
        if lives:
            return f"{worker} sends heartbeats again", world.with_worker(
                worker._replace(silent=False)
            )
        return self._restart(
            f"{worker} sends heartbeats again, and was declared dead", world, worker
        )

    def crash(self, world: World, number: int) -> Step:
        worker = self._worker(world, number)
        world = world._replace(crashed=(*world.crashed, (worker.process, 0)))
        return self._restart(f"{worker} dies", world, worker._replace(claims=()))

    def _restart(self, description: str, world: World, worker: Worker) -> Step:
        new = Worker(worker.number, worker.process + 1, claims=worker.claims)
        _none, rows = self.database.do(
            world.rows, ("register", new.process), lambda: self._register(new.process)
        )
        return f"{description}; a new process replaces it", world.with_worker(new)._replace(
            rows=rows
        )

    # Steps of other processes.

    def recover_killed(self, world: World, process: int, not_started: bool) -> Step:
        """The supervisor knows which jobs had started. The database may have been down since."""
        ago = dict(world.crashed)[process]

        def recover() -> None:
            ids = (
                frozenset(
                    Job.objects.running().filter(process=process).values_list("pk", flat=True)
                )
                if not_started
                else frozenset()
            )
            death = recovery.ExitReason(
                how="was killed", not_started=ids, clock=time.monotonic() - ago
            )
            _recover(Process.objects.filter(pk=process), death)

        known = ", not started" if not_started else ""
        description = f"the supervisor recovers the jobs of {_name(process)}{known}"
        return self._recovered(
            world.spend("not started") if not_started else world,
            ("recover", process, not_started, ago),
            recover,
            description,
        )

    def recover_silent(self, world: World) -> Step:
        def recover() -> None:
            _recover(Process.objects.silent(), recovery.ExitReason(how="was silent", silent=True))

        return self._recovered(
            world, "recover", recover, "a dispatcher recovers the jobs of silent processes"
        )

    def _recovered(
        self, world: World, key: Any, recover: Callable[[], None], description: str
    ) -> Step:
        _none, rows = self.database.do(world.rows, key, recover)
        facts = observe(self.database, world, rows, description, By(recovers=True))
        processes = self.database.processes(rows)
        crashed = tuple(each for each in world.crashed if each[0] in processes)
        return description, world._replace(rows=rows, facts=facts, crashed=crashed)

    def dispatch(self, world: World) -> Step:
        return self._changes(world, "a dispatcher makes due jobs ready", direct.dispatch)

    def sweep(self, world: World) -> Step:
        def sweep() -> None:
            direct.sweep(10)
            direct.unblock_orphans(10)

        return self._changes(world, "a dispatcher sweeps the limits", sweep)

    def wait(self, world: World, silent: int = 0) -> Step:
        """Live processes send heartbeats at the end; those of a silent one are lost."""
        quiet = {worker.number for worker in world.workers if worker.silent} | {silent}
        beating = [worker.process for worker in world.workers if worker.number not in quiet]

        def let_time_pass() -> None:
            self.database.later(LATER)
            Process.objects.filter(pk__in=beating).beat(DEAD_AFTER)

        description = f"{LATER} s pass" + (
            f"; worker {silent} lives, but its heartbeats are lost" if silent else ""
        )
        description, world = self._changes(world, description, let_time_pass, tuple(beating))
        workers = tuple(worker._replace(silent=worker.number in quiet) for worker in world.workers)
        running = [row.process not in dict(world.crashed) for row in self.database.jobs(world.rows)]
        facts = tuple(
            fact._replace(ran=fact.ran + LATER * lives, not_before=max(0, fact.not_before - LATER))
            for fact, lives in zip(world.facts, running, strict=True)
        )
        crashed = tuple((process, ago + LATER) for process, ago in world.crashed)
        return description, world._replace(workers=workers, facts=facts, crashed=crashed)

    def stop(self, world: World) -> Step:
        rows = self.database.jobs(world.rows)
        description, world = self._changes(
            world, "an operator stops all running jobs", Job.objects.all().stop
        )
        facts = [
            fact._replace(closed=fact.wanted, why="an operator stopped it")
            if row.runs and not row.stop
            else fact
            for fact, row in zip(world.facts, rows, strict=True)
        ]
        return description, world._replace(facts=tuple(facts))

    def retry(self, world: World) -> Step:
        rows = self.database.jobs(world.rows)
        description, world = self._changes(
            world, "an operator retries all failed jobs", Job.objects.all().retry
        )
        facts = [
            fact._replace(wanted=fact.wanted + 1, not_before=0)
            if row.state in UNSUCCESSFUL
            else fact
            for fact, row in zip(world.facts, rows, strict=True)
        ]
        return description, world._replace(facts=tuple(facts))

    def call(self, world: World, how: str) -> Step:
        """Enqueue with the key of job A, at once or with a delay."""
        (fact, *others), wait = world.facts, PUT_OFF if how == "replace" else 0
        key = tasks.index_document.using(
            key="A", on_conflict=how, run_after=timedelta(seconds=wait) if wait else None
        )
        description = (
            f"a client enqueues job A again, {f'{wait} s from now' if wait else 'at once'}"
        )
        description, world = self._changes(
            world, description, lambda: key.enqueue(f"call {fact.wanted + 1}"), fact.wanted
        )
        return description, world._replace(
            facts=(fact._replace(wanted=fact.wanted + 1, not_before=wait), *others)
        )

    def _changes(
        self, world: World, description: str, action: Callable[[], Any], key: Any = None
    ) -> Step:
        """Run a step that ends no attempt."""
        _none, rows = self.database.do(world.rows, (description, key), lambda: action() and None)
        return description, world._replace(
            rows=rows, facts=observe(self.database, world, rows, description)
        )

    # Liveness.

    def check_liveness(self, world: World) -> None:
        """Raise Violation, with all steps, if ROUNDS rounds without faults do not end all jobs."""
        seen, history = list[World](), list[str]()
        try:
            for _ in range(ROUNDS):
                world = world._replace(left=()).canonical()
                if world in self._checked:
                    break
                seen.append(world)
                if self._is_finished(world):
                    break
                world = self._round(world, history)
            else:
                states = ", ".join(
                    f"job {name_of(job)} is {row.state}"
                    for job, row in enumerate(self.database.jobs(world.rows))
                )
                raise Violation(f"after {ROUNDS} rounds without faults, {states}")
        except Violation as violation:
            raise Violation(*history, *violation.args) from None
        self._checked.update(seen)

    def _is_finished(self, world: World) -> bool:
        if any(worker.claims for worker in world.workers) or any(
            job.state not in FINISHED for job in self.database.jobs(world.rows)
        ):
            return False
        for job, fact in enumerate(world.facts):
            if fact.closed != fact.wanted:
                raise Violation(f"job {name_of(job)} has ended without a run of its last call")
        taken, _rows = self.database.do(world.rows, "taken", lambda: Slot.objects.taken().count())
        if taken:
            raise Violation("all jobs have ended, but a slot is taken")
        return True

    def _round(self, world: World, history: list[str]) -> World:
        """Let each role do all its pending work."""

        def then(step: Step) -> World:
            history.append(step[0])
            return step[1]

        for number in (1, 2):
            world = then(self.beat(world, number))
            if self._worker(world, number).in_doubt:
                world = then(self.release_unknown(world, number))
            for claim in self._worker(world, number).claims:
                world = then(self.settle(world, number, claim, claim.end or "success"))
        if world.crashed or self._any(world, State.SCHEDULED):
            world = then(self.wait(world))
            world = then(self.recover_silent(world))
        if self._any(world, State.SCHEDULED):
            world = then(self.dispatch(world))
        if self._any(world, State.BLOCKED):
            world = then(self.sweep(world))
        for number in (2, 1):
            if self._any(world, State.READY):
                world = then(self.claim(world, number))
        return world

    def _any(self, world: World, state: State) -> bool:
        return any(job.state == state for job in self.database.jobs(world.rows))

    # Helpers.

    @staticmethod
    def _worker(world: World, number: int) -> Worker:
        return world.workers[number - 1]

    @staticmethod
    def _register(process: int) -> None:
        row = Process(
            pk=process,
            name=_name(process),
            kind="worker",
            hostname="h",
            pid=process,
            expires_at=now_plus(DEAD_AFTER),
        )
        row.details = {"queues": "*"}
        Process.objects.register(row)


def _recover(dead: Any, death: recovery.ExitReason) -> None:
    recovery.recover(task_backends["default"], dead, death, list)


def _settle(claim: Claim, end: str) -> str:
    outcome, state = {
        "success": (Outcome.SUCCESSFUL, State.SUCCESSFUL),
        "failure": (Outcome.FAILED, State.FAILED if claim.is_last else State.READY),
        "interrupted": (Outcome.INTERRUPTED, State.READY),
        "stopped": (Outcome.DISCARDED, State.DISCARDED),
    }[end]
    settled = direct.settle([AttemptResult.of(claim.row, outcome, state)])
    return (
        "written"
        if settled.written
        else "lost, ran twice"
        if settled.twice
        else "lost"
        if settled.lost
        else "held"
    )


def _name(process: int) -> str:
    return f"worker {process // 10}" + (f" (process {process % 10 + 1})" if process % 10 else "")


def _jobs(places: Any) -> str:
    return " and ".join(f"job {name_of(place)}" for place in places)
