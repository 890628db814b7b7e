"""Dead processes are detected within seconds, live ones keep their jobs, cut-off ones stop."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.runtime.shared_status import not_started_of

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Interval, Run

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        connections["default"].vendor == "sqlite", reason="On SQLite it runs as one process."
    ),
]
# Seconds in which a supervisor recovers the jobs of its killed child. Others declare it dead 25 to 30 s
# after the kill.
AT_ONCE = 10.0
# The same for a supervisor that starts after the kill, as slow as it may be. Others declare them dead
# after more than 100 s.
AFTER_START = 50.0
PATIENT = json.dumps({"dead_after": 120})
QUICK = json.dumps({"beat_interval": 0.5, "dead_after": 3, "shutdown_timeout": 2})


def pids(kind):
    return set(Process.objects.filter(kind=kind).values_list("pid", flat=True))


def the_worker():
    return until(lambda: pids("worker")).pop()


def outcomes(result):
    return list(
        Execution.objects.filter(job=result.id)
        .order_by("attempt")
        .values_list("outcome", flat=True)
    )


def test_jobs_of_killed_worker_are_recovered_at_once(runqueue):
    long = tasks.occupy.enqueue("long", 3)
    runqueue()
    until(Interval.objects.exists)

    os.kill(the_worker(), signal.SIGKILL)

    until(lambda: outcomes(long) == ["lost"], AT_ONCE)
    job = until(lambda: Job.objects.running().first())
    assert (job.started_at - job.run_after).total_seconds() < AT_ONCE
    execution = Execution.objects.get()
    assert execution.message.startswith("It was lost: its process, worker@")
    assert execution.message.endswith(", was killed by signal 9.")
    until(lambda: outcomes(long) == ["lost", "successful"])


def test_unstarted_jobs_of_killed_worker_spend_no_attempt(runqueue):
    tasks.nothing.enqueue_many([()] * 300)
    runqueue("--threads", "2")
    until(lambda: not Job.objects.exclude(state="successful").exists())
    Execution.objects.all().delete()
    tasks.sleep.enqueue_many([(1,)] * 20)
    status = Process.objects.get(kind="worker").details["shared_status"]
    until(lambda: len(not_started_of(status)) > 5)

    killed = the_worker()
    os.kill(killed, signal.SIGKILL)

    until(lambda: killed not in pids("worker"), AT_ONCE)
    until(lambda: not Job.objects.exclude(state="successful").exists())
    assert Execution.objects.filter(outcome="lost").count() <= 2
    assert Execution.objects.filter(outcome="successful").count() == 20


def test_on_lost_fail_applies_to_started_jobs_only(runqueue):
    tasks.nothing.enqueue_many([()] * 300)
    runqueue("--threads", "1")
    until(lambda: not Job.objects.exclude(state="successful").exists())
    tasks.transfer.enqueue_many([(name,) for name in "abcdef"])
    until(lambda: Run.objects.exists() and Job.objects.running().count() > 1)

    os.kill(the_worker(), signal.SIGKILL)

    failed = Job.objects.filter(task="tests.tasks.transfer", state="failed")
    until(failed.exists, AT_ONCE)
    until(lambda: Job.objects.filter(task="tests.tasks.transfer", state="successful").count() == 5)
    assert Run.objects.filter(job__startswith="transfer").count() == 6
    assert Execution.objects.get(outcome="lost").job.args == ["a"]


def test_restart_recovers_jobs_of_killed_runqueue_at_once(runqueue):
    long = tasks.occupy.enqueue("long", 2)
    killed = runqueue(DBQUEUE_OPTIONS=PATIENT)
    until(Interval.objects.exists)
    os.killpg(killed.pid, signal.SIGKILL)
    for pid in pids("worker") | pids("dispatcher"):
        os.kill(pid, signal.SIGKILL)
    killed.wait()

    runqueue()

    until(lambda: outcomes(long) == ["lost"], AFTER_START)
    assert "is gone from this host" in Execution.objects.get().message
    until(lambda: outcomes(long) == ["lost", "successful"])
    assert Process.objects.count() == 3


def test_unstarted_jobs_of_killed_host_spend_no_attempt(runqueue):
    tasks.nothing.enqueue_many([()] * 300)
    killed = runqueue("--threads", "2", DBQUEUE_OPTIONS=PATIENT)
    until(lambda: not Job.objects.exclude(state="successful").exists())
    Execution.objects.all().delete()
    tasks.sleep.enqueue_many([(1,)] * 20)
    status = Process.objects.get(kind="worker").details["shared_status"]
    until(lambda: len(not_started_of(status)) > 5)
    os.killpg(killed.pid, signal.SIGKILL)
    dead = pids("worker")
    for pid in dead | pids("dispatcher"):
        os.kill(pid, signal.SIGKILL)
    killed.wait()

    runqueue("--threads", "10")

    until(lambda: not dead & pids("worker"), AFTER_START)
    until(lambda: not Job.objects.exclude(state="successful").exists())
    assert Execution.objects.filter(outcome="lost").count() <= 2


def test_another_host_recovers_jobs_of_dead_host(runqueue):
    long = tasks.occupy.enqueue("long", 30)
    killed = runqueue("--only", "workers", DBQUEUE_OPTIONS=QUICK)
    until(Interval.objects.exists)
    victims = pids("worker")
    runqueue("--queues", "elsewhere", DBQUEUE_OPTIONS=QUICK)
    until(lambda: Process.objects.filter(kind="dispatcher").exists())

    os.kill(killed.pid, signal.SIGKILL)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    until(lambda: outcomes(long) == ["lost"])
    assert time.monotonic() - began < 25  # With default options it takes more than 30 s.
    assert "was silent for too long" in Execution.objects.filter(outcome="lost").first().message


@pytest.mark.parametrize("kind", ["worker", "dispatcher"])
def test_a_frozen_process_is_replaced(runqueue, kind):
    child = runqueue(DBQUEUE_OPTIONS=QUICK)
    long = tasks.sleep.enqueue(1)
    until(lambda: Job.objects.running().exists())
    (frozen,) = until(lambda: pids(kind))

    os.kill(frozen, signal.SIGSTOP)

    until(lambda: pids(kind) and frozen not in pids(kind))
    later = tasks.add.using(run_after=timedelta(seconds=0.1)).enqueue(1)
    until(lambda: later.refresh() or later.is_finished)
    until(lambda: outcomes(long)[-1:] == ["successful"])
    assert "did not let go of its interpreter; it is killed" in log_of(child)


def test_worker_with_hanging_claim_loop_is_replaced_and_its_jobs_end(runqueue):
    runqueue(DBQUEUE_OPTIONS=json.dumps({**json.loads(QUICK), "shutdown_timeout": 10}))
    hanging = the_worker()
    long = tasks.hang_the_claim_loop.enqueue(6)
    until(lambda: Job.objects.running().exists())

    until(lambda: pids("worker") - {hanging})

    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    until(lambda: hanging not in pids("worker"))
    until(lambda: outcomes(long)[-1:] == ["successful"])


def test_process_with_long_poll_interval_is_not_replaced(runqueue):
    runqueue("--poll-interval", "8", DBQUEUE_OPTIONS=QUICK)
    before = until(
        lambda: pids("worker") and pids("dispatcher") and pids("worker") | pids("dispatcher")
    )

    time.sleep(7)  # More than twice the time allowed without progress.

    assert pids("worker") | pids("dispatcher") == before


def test_disconnected_worker_loses_its_jobs_and_late_results(runqueue, proxy):
    options = json.dumps({"beat_interval": 1, "dead_after": 6})
    cut = runqueue("--only", "workers", DATABASE_URL=proxy.url, DBQUEUE_OPTIONS=options)
    until(lambda: pids("worker"))
    long = tasks.occupy.enqueue("long", 15)
    until(Interval.objects.exists)
    runqueue(DBQUEUE_OPTIONS=options)
    until(lambda: len(pids("worker")) == 2)

    proxy.silence()

    until(lambda: outcomes(long) == ["lost"])
    until(lambda: Job.objects.running().exists())
    owner = Job.objects.get().process
    proxy.heal()
    until(lambda: "was declared dead by others" in log_of(cut))
    until(lambda: outcomes(long) == ["lost", "successful"])
    assert Execution.objects.get(outcome="successful").process == owner.name
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1


def test_worker_without_heartbeat_claims_nothing(runqueue, proxy):
    child = runqueue("--embedded", DATABASE_URL=proxy.url, DBQUEUE_OPTIONS=QUICK)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    proxy.cut()
    result = tasks.add.enqueue(2)
    until(lambda: "could not beat" in log_of(child))
    until(lambda: not Process.objects.alive().exists())
    assert Job.objects.get(pk=result.id).state == "ready"
    proxy.heal()

    assert result.wait(LONG).return_value == 2
    assert child.poll() is None
