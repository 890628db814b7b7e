"""What workers, a dispatcher, a supervisor, an operator and a client do: each step is one call of the engine's own functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from django_dbqueue.compat import task_backends
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import ClaimedJob, Job, Process, Slot
from django_dbqueue.models.enums import FINISHED, UNSUCCESSFUL, Fence, Lane, Outcome, State
from django_dbqueue.models.expressions import after
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.worker.worker import Worker as Role

from .. import direct, tasks
from .database import Database, Violation
from .world import By, Claim, Fact, Worker, World, name_of, observe

LANE = Lane("default", 0)
DEAD_AFTER = 30
# So much time passes at once, in seconds: more than DEAD_AFTER, each wait for a retry, and what a call puts off.
LATER, PUT_OFF = 40, 30
# The longest way to the end if all goes well from now on: a lost attempt, two retries, the run that was asked for again.
ROUNDS = 8
Step = tuple[str, World]


@dataclass(frozen=True)
class Scenario:
    """Some jobs, and how often each thing may happen to them."""

    enqueue: Callable[[], Any]
    may: dict[str, int]


class Model:
    def __init__(self, database: Database, scenario: Scenario) -> None:
        self.database, self.scenario = database, scenario
        self._ends_well: set[World] = set()

    def start(self) -> World:
        self.scenario.enqueue()
        workers = tuple(Worker(number, number * 10) for number in (1, 2))
        for worker in workers:
            self._register(worker.process)
        left = tuple(sorted(self.scenario.may.items()))
        return World(self.database.rows(), workers, (Fact(),) * Job.objects.count(), left=left)

    # Which steps there are.

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
            and (worker.number == 1 or not self._is_untouched(world))
        )
        if may_claim and self._any(world, State.READY):
            yield from self._in_each_way(world, partial(self.claim, number=worker.number))
        for claim in worker.claims:
            if not claim.end and world.may("release"):
                yield from self._in_each_way(
                    world.spend("release"), partial(self.release, number=worker.number, claim=claim)
                )
            for end in self._ends(world, claim):
                yield from self._in_each_way(
                    world.spend(end),
                    partial(self.settle, number=worker.number, claim=claim, end=end),
                )
        if worker.in_doubt:
            yield partial(self.give_back_unknown, world, worker.number)
        if worker.silent:
            yield partial(self.beat, world, worker.number)
        if world.may("crash") and (worker.claims or worker.in_doubt):
            yield partial(self.crash, world.spend("crash"), worker.number)

    def _is_untouched(self, world: World) -> bool:
        """Whether both workers are alike yet: then the first one is the one that claims first."""
        as_born = all(
            worker == Worker(worker.number, worker.number * 10) for worker in world.workers
        )
        return as_born and not any(job.attempt for job in self.database.jobs(world.rows))

    def _in_each_way(self, world: World, step: Callable[..., Step]) -> Iterator[Callable[[], Step]]:
        """A transaction commits and says so; or commits, and the answer is lost; or says so, and a failover loses it."""
        yield partial(step, world)
        for how in ("no answer", "failover"):
            if world.may(how):
                yield partial(step, world.spend(how), how=how)

    def _ends(self, world: World, claim: Claim) -> list[str]:
        """How an attempt may end now; one whose outcome had no answer, as it has ended."""
        row = self.database.jobs(world.rows)[claim.job]
        sees_stop = row.stop and (row.attempt, row.process) == (claim.attempt, claim.process)
        ends = [
            "success",
            *(end for end in ("failure", "interrupted") if world.may(end)),
            *(["stopped"] if sees_stop else []),
        ]
        return [claim.end] if claim.end else ends

    # What workers do.

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
        said = f"{worker} claims {_jobs(claim.job for claim in given) or 'nothing'}"
        facts = observe(self.database, world, rows, said, By(given=given))
        told = world._replace(serials=world.serials + len(given))
        if how == "no answer":
            told = told._replace(rows=rows, facts=facts).with_worker(worker._replace(in_doubt=True))
            return f"{said}; the COMMIT succeeds, and its answer is lost", told
        going_on, started = self._sorted(told, worker, given)
        if going_on:
            said = f"{said}, which it runs already: it goes on"
        claims = tuple(going_on.get(claim.row.fence, claim) for claim in worker.claims)
        told = told.with_worker(worker._replace(claims=(*claims, *started)))
        return (
            self._failover(said, told)
            if how == "failover"
            else (said, told._replace(rows=rows, facts=facts))
        )

    def _sorted(
        self, world: World, worker: Worker, given: tuple[Claim, ...]
    ) -> tuple[dict[Fence, Claim], list[Claim]]:
        """As Worker passes on what it has claimed: what goes on under the new claim, by its token, and what begins."""
        here = {claim.row.fence: claim for claim in worker.claims}
        role: Any = SimpleNamespace(
            _before=set(worker.lost), _going_on=set(), _held_fences=lambda: set(here)
        )
        begin = (
            [claim.row for claim in given]
            if not worker.lost
            else Role._not_held(role, [claim.row for claim in given])
        )
        started = [claim for claim in given if claim.row in begin]
        others = [claim for claim in given if claim.row not in begin]
        return {
            claim.row.fence: replace(here[claim.row.fence], serial=claim.serial) for claim in others
        }, started

    def release(self, world: World, number: int, claim: Claim, how: str = "") -> Step:
        worker = self._worker(world, number)
        key = ("release", claim.row.fence)
        _number, rows = self.database.do(world.rows, key, lambda: direct.release([claim.row]))
        said = f"{worker} gives back job {name_of(claim.job)}, unbegun"
        return self._ends_claim(world, worker, claim, rows, said, how)

    def settle(self, world: World, number: int, claim: Claim, end: str, how: str = "") -> Step:
        worker = self._worker(world, number)
        key = ("settle", claim.row.fence, end, claim.is_last)
        fate, rows = self.database.do(world.rows, key, lambda: _settle(claim, end))
        said = (
            f"{worker} settles attempt {claim.attempt} of job {name_of(claim.job)} ({end}): {fate}"
        )
        if fate == "written" and rows == world.rows and not claim.accepted:
            raise Violation(
                said,
                f"the outcome of {claim} was taken for written, and was not: another claim's was",
            )
        return self._ends_claim(world, worker, claim, rows, said, how, end)

    def _ends_claim(
        self,
        world: World,
        worker: Worker,
        claim: Claim,
        rows: Any,
        said: str,
        how: str,
        end: str = "",
    ) -> Step:
        facts = observe(self.database, world, rows, said, By(ends=claim))
        others = tuple(each for each in worker.claims if each.serial != claim.serial)
        if how == "no answer":
            # It is tried again; what was given back is not known any more, and is found if it is still the worker's.
            again = replace(claim, end=end, accepted=claim.accepted or rows != world.rows)
            claims = (*others, again) if end else others
            world = world.with_worker(
                worker._replace(claims=claims, in_doubt=not end or worker.in_doubt)
            )
            return f"{said}; the answer is lost", world._replace(rows=rows, facts=facts)
        world = world.with_worker(worker._replace(claims=others))
        if how == "failover":
            return self._failover(said, world)
        return said, world._replace(rows=rows, facts=facts)

    def _failover(self, said: str, world: World) -> Step:
        """The last transaction is lost with the server; each connection has broken, so each worker looks what it owns."""
        workers = tuple(worker._replace(in_doubt=True) for worker in world.workers)
        return f"{said}; the database fails over, and has lost this transaction", world._replace(
            workers=workers
        )

    def give_back_unknown(self, world: World, number: int) -> Step:
        """As Worker does once its connection is back."""
        worker = self._worker(world, number)
        here = {claim.row.fence for claim in worker.claims}

        def give_back() -> frozenset[Fence]:
            owned = ClaimedJob.objects.running().filter(process=worker.process)
            known = {job.fence for job in owned}
            role: Any = SimpleNamespace(
                _recent=(),
                _going_on=set(),
                _owned=lambda: owned,
                _held_fences=lambda: here,
                _release=direct.release,
            )
            Role._release_unknown(role)
            return frozenset(role._before - known)

        key = ("give back", worker.process, frozenset(here))
        lost, rows = self.database.do(world.rows, key, give_back)
        said = f"{worker} has its connection back, and gives back what it does not know"
        facts = observe(self.database, world, rows, said, By(gives_back=worker))
        worker = worker._replace(in_doubt=False, lost=lost)
        return said, world.with_worker(worker)._replace(rows=rows, facts=facts)

    def beat(self, world: World, number: int) -> Step:
        """One that was declared dead ends, and another is started; what it runs, it may settle late."""
        worker = self._worker(world, number)
        lives, rows = self.database.do(
            world.rows,
            ("beat", worker.process),
            lambda: Process.objects.filter(pk=worker.process).beat(DEAD_AFTER),
        )
        world = world._replace(rows=rows)
        if lives:
            return f"{worker} beats again", world.with_worker(worker._replace(silent=False))
        return self._begin_anew(f"{worker} beats again, and was declared dead", world, worker)

    def crash(self, world: World, number: int) -> Step:
        worker = self._worker(world, number)
        world = world._replace(crashed=(*world.crashed, (worker.process, 0)))
        return self._begin_anew(f"{worker} dies", world, worker._replace(claims=()))

    def _begin_anew(self, said: str, world: World, worker: Worker) -> Step:
        new = Worker(worker.number, worker.process + 1, claims=worker.claims)
        _none, rows = self.database.do(
            world.rows, ("register", new.process), lambda: self._register(new.process)
        )
        return f"{said}; a new process takes its place", world.with_worker(new)._replace(rows=rows)

    # What others do.

    def recover_killed(self, world: World, process: int, not_started: bool) -> Step:
        """Its supervisor sees it dead, and knows whether what it had claimed had begun. The database may have been away since."""
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

        known = " and had not begun" if not_started else ""
        said = f"the supervisor recovers what {_name(process)} ran{known}"
        return self._recovered(
            world.spend("not started") if not_started else world,
            ("recover", process, not_started, ago),
            recover,
            said,
        )

    def recover_silent(self, world: World) -> Step:
        def recover() -> None:
            _recover(Process.objects.silent(), recovery.ExitReason(how="was silent", silent=True))

        return self._recovered(
            world, "recover", recover, "a dispatcher recovers what silent processes ran"
        )

    def _recovered(self, world: World, key: Any, recover: Callable[[], None], said: str) -> Step:
        _none, rows = self.database.do(world.rows, key, recover)
        facts = observe(self.database, world, rows, said, By(recovers=True))
        processes = self.database.processes(rows)
        crashed = tuple(each for each in world.crashed if each[0] in processes)
        return said, world._replace(rows=rows, facts=facts, crashed=crashed)

    def dispatch(self, world: World) -> Step:
        return self._changes(world, "a dispatcher makes due jobs ready", direct.dispatch)

    def sweep(self, world: World) -> Step:
        def sweep() -> None:
            direct.sweep(10)
            direct.unblock_orphans(10)

        return self._changes(world, "a dispatcher sweeps the limits", sweep)

    def wait(self, world: World, silent: int = 0) -> Step:
        """All others beat at the end of that time; none of a silent one's heartbeats arrives."""
        quiet = {worker.number for worker in world.workers if worker.silent} | {silent}
        beating = [worker.process for worker in world.workers if worker.number not in quiet]

        def pass_by() -> None:
            self.database.later(LATER)
            Process.objects.filter(pk__in=beating).beat(DEAD_AFTER)

        said = f"{LATER} s pass" + (f"; worker {silent} lives, and is not heard" if silent else "")
        said, world = self._changes(world, said, pass_by, tuple(beating))
        workers = tuple(worker._replace(silent=worker.number in quiet) for worker in world.workers)
        running = [row.process not in dict(world.crashed) for row in self.database.jobs(world.rows)]
        facts = tuple(
            fact._replace(ran=fact.ran + LATER * lives, not_before=max(0, fact.not_before - LATER))
            for fact, lives in zip(world.facts, running, strict=True)
        )
        crashed = tuple((process, ago + LATER) for process, ago in world.crashed)
        return said, world._replace(workers=workers, facts=facts, crashed=crashed)

    def stop(self, world: World) -> Step:
        rows = self.database.jobs(world.rows)
        said, world = self._changes(world, "an operator stops what runs", Job.objects.all().stop)
        facts = [
            fact._replace(closed=fact.wanted, why="an operator has stopped it")
            if row.runs and not row.stop
            else fact
            for fact, row in zip(world.facts, rows, strict=True)
        ]
        return said, world._replace(facts=tuple(facts))

    def retry(self, world: World) -> Step:
        rows = self.database.jobs(world.rows)
        said, world = self._changes(
            world, "an operator retries what has failed", Job.objects.all().retry
        )
        facts = [
            fact._replace(wanted=fact.wanted + 1, not_before=0)
            if row.state in UNSUCCESSFUL
            else fact
            for fact, row in zip(world.facts, rows, strict=True)
        ]
        return said, world._replace(facts=tuple(facts))

    def call(self, world: World, how: str) -> Step:
        """A call with the key of job A, at once or put off."""
        (fact, *others), wait = world.facts, PUT_OFF if how == "replace" else 0
        key = tasks.index_document.using(
            key="A", on_conflict=how, run_after=timedelta(seconds=wait) if wait else None
        )
        said = f"a client calls job A again, {f'{wait} s from now' if wait else 'at once'}"
        said, world = self._changes(
            world, said, lambda: key.enqueue(f"call {fact.wanted + 1}"), fact.wanted
        )
        return said, world._replace(
            facts=(fact._replace(wanted=fact.wanted + 1, not_before=wait), *others)
        )

    def _changes(self, world: World, said: str, action: Callable[[], Any], key: Any = None) -> Step:
        """A step that ends no attempt."""
        _none, rows = self.database.do(world.rows, (said, key), lambda: action() and None)
        return said, world._replace(rows=rows, facts=observe(self.database, world, rows, said))

    # What must come of it.

    def ends_well(self, world: World) -> None:
        """Raises Violation, with all that is done, if some rounds in which all do their part do not lead to an end."""
        seen, told = list[World](), list[str]()
        try:
            for _ in range(ROUNDS):
                world = world._replace(left=()).canonical()
                if world in self._ends_well:
                    break
                seen.append(world)
                if self._is_over(world):
                    break
                world = self._round(world, told)
            else:
                states = ", ".join(
                    f"job {name_of(job)} is {row.state}"
                    for job, row in enumerate(self.database.jobs(world.rows))
                )
                raise Violation(f"all do their part for {ROUNDS} rounds, and {states}")
        except Violation as violation:
            raise Violation(*told, *violation.args) from None
        self._ends_well.update(seen)

    def _is_over(self, world: World) -> bool:
        if any(worker.claims for worker in world.workers) or any(
            job.state not in FINISHED for job in self.database.jobs(world.rows)
        ):
            return False
        for job, fact in enumerate(world.facts):
            if fact.closed != fact.wanted:
                raise Violation(
                    f"job {name_of(job)} has ended, and has not run as it was asked for last"
                )
        taken, _rows = self.database.do(world.rows, "taken", lambda: Slot.objects.taken().count())
        if taken:
            raise Violation("all jobs have ended, and a slot is taken")
        return True

    def _round(self, world: World, told: list[str]) -> World:
        """Each does all that it has to do."""

        def then(step: Step) -> World:
            told.append(step[0])
            return step[1]

        for number in (1, 2):
            world = then(self.beat(world, number))
            if self._worker(world, number).in_doubt:
                world = then(self.give_back_unknown(world, number))
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

    # How.

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
            expires_at=after(DEAD_AFTER),
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
        else "lost, and run twice"
        if settled.twice
        else "lost"
        if settled.lost
        else "held"
    )


def _name(process: int) -> str:
    return f"worker {process // 10}" + (f" (process {process % 10 + 1})" if process % 10 else "")


def _jobs(places: Any) -> str:
    return " and ".join(f"job {name_of(place)}" for place in places)
