"""Keys: each key has one row, and its latest call runs last."""

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
from .machine_actors import RETRIED_ENDS, State, actors, ends, queues
from .machine_jobs import Jobs

# Without limits; with a limit that depends on the call; as a pipeline.
KINDS = {"plain": tasks.add, "limited": tasks.charge, "pipeline": pipeline(tasks.grind, tasks.pour)}
PATHS = {
    "plain": "tests.tasks.add",
    "limited": "tests.tasks.charge",
    "pipeline": "tests.tasks.grind",
}
# Mostly one key, and some that a collation may take for equal.
KEYS = ["k"] * 5 + ["K", "k ", "\u1e31", "k\u0301"]


class KeyedCall(NamedTuple):
    """A call with a key. ``newer``: added to the newest version; None without a version."""

    kind: str
    key: str
    on_conflict: str
    newer: int | None
    wait: int | None
    expires: int | None


keyed_calls = st.builds(
    KeyedCall,
    kind=st.sampled_from(list(KINDS)),
    key=st.sampled_from(KEYS),
    on_conflict=st.sampled_from(["rerun", "rerun", "skip", "once", "replace"]),
    newer=st.sampled_from([None, None, -1, 0, 1, 2]),
    wait=st.sampled_from([None, None, 60]),
    expires=st.sampled_from([None, None, 600]),
)
# Operations on a running job, and the delay of the new call; how its attempt ends.
CONCURRENT = [["stop"], ["enqueue"], ["enqueue"], ["stop", "enqueue"], ["enqueue", "stop"]]
interruptions = st.tuples(st.sampled_from(CONCURRENT), st.sampled_from([None, 60, 60]))
INTERRUPTED = ["released", "killed", *RETRIED_ENDS]
INTERRUPT = {
    "actor": actors,
    "call": keyed_calls,
    "ends": st.permutations(INTERRUPTED),
    "how": st.tuples(*[interruptions] * 4),
}


class Keys(Jobs):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)
        self.called_at = timezone.now()

    @rule(actor=actors, keyed_call=keyed_calls)
    def enqueue_key(self, actor, keyed_call):
        before = _row(keyed_call)
        result = self._start_enqueue(self.actors[actor], keyed_call, before).result(30)
        self._record_call(keyed_call, before, result)

    @precondition(lambda self: connection.vendor == "postgresql")
    @rule(
        key=st.sampled_from([None, *KEYS]),
        queue=queues,
        actor=actors,
        first=st.none() | keyed_calls,
        on_conflict=st.sampled_from(["rerun", "rerun", "skip", "once", "replace"]),
    )
    def enqueue_key_by_sql(self, key, queue, actor, first, on_conflict):
        """Enqueue with the SQL function, also onto a job with options unknown to it."""
        on_conflict = on_conflict if key else "rerun"
        if key and first:
            self.enqueue_key(actor, first._replace(kind="plain", key=key))
        keyed_call = KeyedCall("plain", key, on_conflict, None, None, None)
        before, number = key and _row(keyed_call), next(self.calls)
        with connection.cursor() as cursor:
            call = (
                "SELECT dbqueue_enqueue("
                "%s, to_jsonb(%s::int[]), queue => %s, key => %s, on_conflict => %s)"
            )
            cursor.execute(call, [PATHS["plain"], [number], queue, key, on_conflict])
            result = SimpleNamespace(
                id=str(cursor.fetchone()[0]),
                args=[number],
                enqueued=_expected_status(keyed_call, before),
            )
        # 0: the worker applies the policy of the task and the queue.
        if result.enqueued != "ignored":
            assert Job.objects.get(pk=result.id).max_attempts == 0
        if key:
            self._record_call(keyed_call, before, result)
        else:
            self._record_enqueued(result)

    def _record_call(self, keyed_call, before, result):
        after = _row(keyed_call)
        assert result.enqueued == _expected_status(keyed_call, before)
        if result.enqueued == "ignored":
            assert after == before
            return
        self._record_enqueued(result, stage=_stage(keyed_call))
        self._record_not_before(result, keyed_call, before)
        assert after["version"] == _version(keyed_call, before)
        assert (after["expires_at"] is None) == (keyed_call.expires is None)
        if before and before["state"] == State.RUNNING:
            same = ("state", "process_id", "attempt", "started_at")
            assert [after[name] for name in same] == [before[name] for name in same]
        else:
            assert after["state"] in WAITING and not after["failures"]

    @rule(keyed_calls=st.tuples(keyed_calls, keyed_calls), kind=st.sampled_from(list(KINDS)))
    def enqueue_key_concurrently(self, keyed_calls, kind):
        """Two concurrent calls: the row has the call with the higher version, in any order."""
        keyed_calls = [
            keyed_call._replace(kind=kind, key=keyed_calls[0].key) for keyed_call in keyed_calls
        ]
        before = _row(keyed_calls[0])
        futures = [
            (self._start_enqueue(actor, keyed_call, before), keyed_call)
            for actor, keyed_call in zip(self.actors, keyed_calls, strict=False)
        ]
        answers = [(future.result(30), keyed_call) for future, keyed_call in futures]
        accepted = [
            (result, keyed_call) for result, keyed_call in answers if result.enqueued != "ignored"
        ]
        after = _row(keyed_calls[0])
        if not accepted:
            assert after == before
            return
        self.not_before.pop(accepted[0][0].id, None)
        (winner,) = [
            (result, keyed_call) for result, keyed_call in accepted if result.args == after["args"]
        ]
        self._record_enqueued(winner[0], stage=_stage(winner[1]))
        versions = [_version(keyed_call, before) for _result, keyed_call in accepted]
        assert after["version"] == max(
            (each for each in versions if each is not None), default=None
        )
        if all(keyed_call.newer is not None for _result, keyed_call in accepted):
            assert winner[1].newer == max(keyed_call.newer for _result, keyed_call in accepted)

    @rule(actor=actors, keyed_call=keyed_calls, ends=ends)
    def enqueue_key_during_settle(self, actor, keyed_call, ends):
        if not (keyed := self._keyed()):
            return self.enqueue_key(actor, keyed_call)
        holder, job = keyed[0]
        caller = self.actors[actor] if self.actors[actor] is not holder else self.actors[actor - 1]
        kind, key = _kind_and_key(job)
        keyed_call = keyed_call._replace(kind=kind, key=key)
        holder.held = [job, *(each for each in holder.held if each is not job)]
        settling = self._start_settle(holder, 1, ends)
        result = self._start_enqueue(caller, keyed_call, _row(keyed_call)).result(30)
        settled = settling[2].result(30)
        # A call that found the job finished has started a new run.
        if result.enqueued == "created":
            self._record_settled(*settling)
        if result.enqueued != "ignored":
            self._record_enqueued(result, stage=_stage(keyed_call))
        if result.enqueued != "created":
            self._record_settled(*settling)
        if result.enqueued != "ignored":
            self._record_not_before(result, keyed_call, None)
        if result.enqueued != "ignored" and settled.written:
            assert _row(keyed_call)["state"] in WAITING

    @rule(actor=actors, keyed_call=keyed_calls, limit=st.integers(1, 5))
    def enqueue_key_during_claim(self, actor, keyed_call, limit):
        claimer, caller = self.actors[actor], self.actors[actor - 1]
        claiming = self._start_claim(claimer, limit)
        result = self._start_enqueue(caller, keyed_call, _row(keyed_call)).result(30)
        jobs = claiming.result(30)
        was_first = any((str(job.pk), job.args) == (result.id, result.args) for job in jobs)
        if not was_first:
            self._record_claimed(claimer, jobs)
        if result.enqueued != "ignored":
            self._record_enqueued(result, stage=_stage(keyed_call))
            self._record_not_before(result, keyed_call, None)
        if was_first:
            self._record_claimed(claimer, jobs)

    def interrupt_stopped_or_rerun_jobs(self, actor, call, ends, how):
        for kind, end, (meanwhile, wait) in zip(itertools.cycle(KINDS), ends, how, strict=False):
            keyed_call = call._replace(kind=kind, on_conflict="rerun", newer=None, wait=None)
            self.enqueue_key(actor, keyed_call)
            self.claim(actor, 50)
            if not (job := self._held(actor, keyed_call)):
                continue
            for action in meanwhile:
                if action == "stop":
                    self._stop(Job.objects.filter(pk=job.pk))
                else:
                    self.enqueue_key(
                        actor - 1, keyed_call._replace(on_conflict=call.on_conflict, wait=wait)
                    )
            if end == "released":
                self.release(actor, 1)
            elif end == "killed":
                self.kill(actor, False, False)
            else:
                self.settle(actor, 1, [end])

    @invariant()
    def each_key_has_one_row(self):
        keys = {job.pk: job.key for job in self.jobs if job.key}
        assert len(keys) == len(set(keys.values()))

    def _record_not_before(self, result, keyed_call, before):
        """Record the earliest start. ``before``: the row before the call, None if unknown.

        A call that does not replace postpones no run that waits or is requested.
        """
        is_first = before and (
            before["state"] in FINISHED
            or (before["state"] == State.RUNNING and not before["rerun_requested"])
        )
        if keyed_call.wait and (keyed_call.on_conflict == "replace" or is_first):
            self.not_before[result.id] = self.called_at + timedelta(seconds=keyed_call.wait)
        else:
            self.not_before.pop(result.id, None)

    def _start_enqueue(self, actor, keyed_call, before):
        task, args = self._call(keyed_call, before)
        self.called_at = timezone.now()
        return actor.submit(task.enqueue, *args)

    def _call(self, keyed_call, before):
        number = next(self.calls)
        version = None if keyed_call.newer is None else _newest(before) + keyed_call.newer
        wait, expires = (
            seconds and timedelta(seconds=seconds)
            for seconds in (keyed_call.wait, keyed_call.expires)
        )
        task = KINDS[keyed_call.kind].using(
            key=keyed_call.key,
            version=version,
            on_conflict=keyed_call.on_conflict,
            run_after=wait,
            expires=expires,
        )
        return task, ("aA"[number % 2], number) if keyed_call.kind == "limited" else (number,)

    def _held(self, actor, keyed_call):
        """Return the key's job if the actor holds it, and put it first in its list."""
        held = self.actors[actor].held
        found = [job for job in held if job.key == _key(keyed_call) and self._runs(job)]
        held.sort(key=lambda job: job not in found)
        return found[0] if found else None

    def _keyed(self):
        return [(actor, job) for actor in self.actors for job in actor.held if job.key]


def _row(keyed_call: KeyedCall) -> dict[str, Any] | None:
    return Job.objects.filter(key=_key(keyed_call)).values().first()


def _key(keyed_call: KeyedCall) -> str:
    return f"{PATHS[keyed_call.kind]} {keyed_call.key}"


def _kind_and_key(job: Any) -> tuple[str, str]:
    path, _space, key = job.key.partition(" ")
    return next(kind for kind in PATHS if PATHS[kind] == path), key


def _stage(keyed_call: KeyedCall) -> int | None:
    return 0 if keyed_call.kind == "pipeline" else None


def _newest(row: dict[str, Any] | None) -> int:
    return (row and row["version"]) or 0


def _version(keyed_call: KeyedCall, before: dict[str, Any] | None) -> int | None:
    if keyed_call.newer is None:
        return before and before["version"]
    return _newest(before) + keyed_call.newer


def _expected_status(keyed_call: KeyedCall, before: dict[str, Any] | None) -> str:
    if before is None:
        return "created"
    if keyed_call.newer is not None and before["version"] is not None and keyed_call.newer < 0:
        return "ignored"
    if keyed_call.on_conflict == "once":
        return "ignored"
    if before["state"] in FINISHED:
        return "created"
    return "ignored" if keyed_call.on_conflict == "skip" else "merged"
