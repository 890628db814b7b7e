"""Of all that is asked for with one key there is one row, and what was asked for last is what is run last."""

from __future__ import annotations

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.db import connection
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from django_dbqueue import pipeline
from django_dbqueue.models import Job
from django_dbqueue.models.enums import FINISHED, WAITING

from .. import tasks
from .machine_actors import AGAIN, State, actors, ends, queues
from .machine_jobs import Jobs

# Without limits, of a limited task, whose limit depends on the call, and of a pipeline.
KINDS = {"plain": tasks.add, "limited": tasks.charge, "walks": pipeline(tasks.grind, tasks.pour)}
PATHS = {"plain": "tests.tasks.add", "limited": "tests.tasks.charge", "walks": "tests.tasks.grind"}
# Mostly one, and some that a database may take for it.
KEYS = ["k"] * 5 + ["K", "k ", "\u1e31", "k\u0301"]


class Wish(NamedTuple):
    """``newer``: by how much the version is above the newest; None for a call without."""

    kind: str
    key: str
    on_conflict: str
    newer: int | None
    wait: int | None
    expires: int | None


wishes = st.builds(
    Wish,
    kind=st.sampled_from(list(KINDS)),
    key=st.sampled_from(KEYS),
    on_conflict=st.sampled_from(["rerun", "rerun", "skip", "replace"]),
    newer=st.sampled_from([None, None, -1, 0, 1, 2]),
    wait=st.sampled_from([None, None, 60]),
    expires=st.sampled_from([None, None, 600]),
)
# What is done to a job while it runs, and when the run that is asked for is to begin; how that attempt ends, to run again.
MEANWHILE = [["stop"], ["ask"], ["ask"], ["stop", "ask"], ["ask", "stop"]]
interruptions = st.tuples(st.sampled_from(MEANWHILE), st.sampled_from([None, 60, 60]))
INTERRUPTED = ["released", "killed", *AGAIN]
INTERRUPT = {
    "actor": actors,
    "call": wishes,
    "ends": st.permutations(INTERRUPTED),
    "how": st.tuples(*[interruptions] * 4),
}


class Keys(Jobs):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)
        self.asked_at = timezone.now()

    @rule(actor=actors, wish=wishes)
    def ask(self, actor, wish):
        before = _row(wish)
        result = self._ask(self.actors[actor], wish, before).result(30)
        self._answered(wish, before, result)

    @precondition(lambda self: connection.vendor == "postgresql")
    @rule(key=st.sampled_from([None, *KEYS]), queue=queues, actor=actors, first=st.none() | wishes)
    def ask_by_sql(self, key, queue, actor, first):
        """The job that its key has, if any, may have been asked for first with what the function does not know."""
        if key and first:
            self.ask(actor, first._replace(kind="plain", key=key))
        wish = Wish("plain", key, "rerun", None, None, None)
        before, number = key and _row(wish), next(self.calls)
        with connection.cursor() as cursor:
            call = "SELECT dbqueue_enqueue(%s, to_jsonb(%s::int[]), queue => %s, key => %s)"
            cursor.execute(call, [PATHS["plain"], [number], queue, key])
            result = SimpleNamespace(
                id=str(cursor.fetchone()[0]), args=[number], enqueued=_fate(wish, before)
            )
        # The worker takes its policy from the task and the queue.
        assert Job.objects.get(pk=result.id).max_attempts == 0
        if key:
            self._answered(wish, before, result)
        else:
            self._asked(result)

    def _answered(self, wish, before, result):
        after = _row(wish)
        assert result.enqueued == _fate(wish, before)
        if result.enqueued == "ignored":
            assert after == before
            return
        self._asked(result, stage=_stage(wish))
        self._put_off(result, wish, before and before["state"])
        assert after["version"] == _version(wish, before)
        assert (after["expires_at"] is None) == (wish.expires is None)
        if before and before["state"] == State.RUNNING:
            same = ("state", "process_id", "attempt", "started_at")
            assert [after[name] for name in same] == [before[name] for name in same]
        else:
            assert after["state"] in WAITING and not after["failures"]

    @rule(wishes=st.tuples(wishes, wishes), kind=st.sampled_from(list(KINDS)))
    def ask_together(self, wishes, kind):
        """The one of the higher version is what stands, whoever came first."""
        wishes = [wish._replace(kind=kind, key=wishes[0].key) for wish in wishes]
        before = _row(wishes[0])
        asked = [
            (self._ask(actor, wish, before), wish)
            for actor, wish in zip(self.actors, wishes, strict=False)
        ]
        told = [(future.result(30), wish) for future, wish in asked]
        accepted = [(result, wish) for result, wish in told if result.enqueued != "ignored"]
        after = _row(wishes[0])
        if not accepted:
            assert after == before
            return
        self.not_before.pop(accepted[0][0].id, None)
        (winner,) = [(result, wish) for result, wish in accepted if result.args == after["args"]]
        self._asked(winner[0], stage=_stage(winner[1]))
        versions = [_version(wish, before) for _result, wish in accepted]
        assert after["version"] == max(
            (each for each in versions if each is not None), default=None
        )
        if all(wish.newer is not None for _result, wish in accepted):
            assert winner[1].newer == max(wish.newer for _result, wish in accepted)

    @rule(actor=actors, wish=wishes, ends=ends)
    def ask_while_it_is_settled(self, actor, wish, ends):
        if not (keyed := self._keyed()):
            return self.ask(actor, wish)
        holder, job = keyed[0]
        asker = self.actors[actor] if self.actors[actor] is not holder else self.actors[actor - 1]
        kind, key = _kind_and_key(job)
        wish = wish._replace(kind=kind, key=key)
        holder.held = [job, *(each for each in holder.held if each is not job)]
        settling = self._ask_settle(holder, 1, ends)
        result = self._ask(asker, wish, _row(wish)).result(30)
        settled = settling[2].result(30)
        # One that the call found to have ended, it has made a new run of.
        if result.enqueued == "created":
            self._told(*settling)
        if result.enqueued != "ignored":
            self._asked(result, stage=_stage(wish))
        if result.enqueued != "created":
            self._told(*settling)
        if result.enqueued != "ignored":
            self._put_off(result, wish, None)
        if result.enqueued != "ignored" and settled.written:
            assert _row(wish)["state"] in WAITING

    @rule(actor=actors, wish=wishes, limit=st.integers(1, 5))
    def ask_while_it_is_claimed(self, actor, wish, limit):
        claimer, asker = self.actors[actor], self.actors[actor - 1]
        claiming = self._ask_claim(claimer, limit)
        result = self._ask(asker, wish, _row(wish)).result(30)
        jobs = claiming.result(30)
        was_first = any((str(job.pk), job.args) == (result.id, result.args) for job in jobs)
        if not was_first:
            self._got(claimer, jobs)
        if result.enqueued != "ignored":
            self._asked(result, stage=_stage(wish))
            self._put_off(result, wish, None)
        if was_first:
            self._got(claimer, jobs)

    def interrupt_what_was_stopped_or_asked_for_again(self, actor, call, ends, how):
        for kind, end, (meanwhile, wait) in zip(itertools.cycle(KINDS), ends, how, strict=False):
            wish = call._replace(kind=kind, on_conflict="rerun", newer=None, wait=None)
            self.ask(actor, wish)
            self.claim(actor, 50)
            if not (job := self._held(actor, wish)):
                continue
            for what in meanwhile:
                if what == "stop":
                    self._stop(Job.objects.filter(pk=job.pk))
                else:
                    self.ask(actor - 1, wish._replace(on_conflict=call.on_conflict, wait=wait))
            if end == "released":
                self.release(actor, 1)
            elif end == "killed":
                self.kill(actor, False, False)
            else:
                self.settle(actor, 1, [end])

    @invariant()
    def there_is_one_row_for_a_key(self):
        keys = {job.pk: job.key for job in self.jobs if job.key}
        assert len(keys) == len(set(keys.values()))
        self.of_keys |= set(map(str, keys))

    def _put_off(self, result, wish, state):
        """Until then it does not start. ``state`` is that before the call, None if that is not known."""
        if wish.wait and (wish.on_conflict == "replace" or state in (State.RUNNING, *FINISHED)):
            self.not_before[result.id] = self.asked_at + timedelta(seconds=wish.wait)
        else:
            self.not_before.pop(result.id, None)

    def _ask(self, actor, wish, before):
        task, args = self._call(wish, before)
        self.asked_at = timezone.now()
        return actor.begin(task.enqueue, *args)

    def _call(self, wish, before):
        number = next(self.calls)
        version = None if wish.newer is None else _newest(before) + wish.newer
        wait, expires = (
            seconds and timedelta(seconds=seconds) for seconds in (wish.wait, wish.expires)
        )
        task = KINDS[wish.kind].using(
            key=wish.key,
            version=version,
            on_conflict=wish.on_conflict,
            run_after=wait,
            expires=expires,
        )
        return task, ("aA"[number % 2], number) if wish.kind == "limited" else (number,)

    def _held(self, actor, wish):
        """The job of a key, if that actor holds it: it is the next that it ends."""
        held = self.actors[actor].held
        found = [job for job in held if job.key == _key(wish) and self._runs(job)]
        held.sort(key=lambda job: job not in found)
        return found[0] if found else None

    def _keyed(self):
        return [(actor, job) for actor in self.actors for job in actor.held if job.key]


def _row(wish: Wish) -> dict[str, Any] | None:
    return Job.objects.filter(key=_key(wish)).values().first()


def _key(wish: Wish) -> str:
    return f"{PATHS[wish.kind]} {wish.key}"


def _kind_and_key(job: Any) -> tuple[str, str]:
    path, _space, key = job.key.partition(" ")
    return next(kind for kind in PATHS if PATHS[kind] == path), key


def _stage(wish: Wish) -> int | None:
    return 0 if wish.kind == "walks" else None


def _newest(row: dict[str, Any] | None) -> int:
    return (row and row["version"]) or 0


def _version(wish: Wish, before: dict[str, Any] | None) -> int | None:
    if wish.newer is None:
        return before and before["version"]
    return _newest(before) + wish.newer


def _fate(wish: Wish, before: dict[str, Any] | None) -> str:
    if before is None:
        return "created"
    if wish.newer is not None and before["version"] is not None and wish.newer < 0:
        return "ignored"
    if before["state"] in FINISHED:
        return "created"
    return "ignored" if wish.on_conflict == "skip" else "merged"
