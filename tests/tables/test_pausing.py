"""Paused queues and tasks are not claimed until they are resumed or the pause expires.

No process is needed for the expiry.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now

from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Job, Queue, TaskState
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime.supervisor.drain import Drain
from django_dbqueue.runtime.worker.claimer import Claimer

from .. import tasks
from ..conftest import a_process, all_claimed

pytestmark = pytest.mark.django_db


@pytest.fixture
def claimer(process):
    def claimer():
        return Claimer("default", process, QueueSelector(("*",)))

    return claimer


def expire(rows):
    """Let the pauses of these rows expire."""
    rows.update(paused_at=now_plus(-60), resume_at=now_plus(-1))


@pytest.mark.parametrize("until", [timedelta(hours=1), now() + timedelta(days=100), None])
def test_a_paused_queue_is_not_claimed_from(claimer, until):
    tasks.add.using(queue_name="mail").enqueue(1)
    tasks.add.enqueue(2)

    assert Queue.objects.named("mail").pause(until=until) == 1

    assert [job.args for job in all_claimed(claimer(), 10)] == [[2]]


def test_pause_expires(claimer):
    tasks.add.using(queue_name="mail").enqueue(1)
    Queue.objects.named("mail").pause(until=timedelta(hours=1))

    expire(Queue.objects)

    assert not Queue.objects.paused().exists()
    assert len(all_claimed(claimer(), 10)) == 1


def test_pause_ends_in_database_time():
    Queue.objects.named("mail").pause(until=timedelta(hours=1))

    queue = Queue.objects.seen().get()

    assert queue.resume_at - queue.paused_at == timedelta(hours=1)
    assert queue.is_paused(queue.seen_at)
    assert not queue.is_paused(queue.seen_at + timedelta(hours=2))


def test_second_pause_changes_end_and_keeps_start():
    mail = Queue.objects.named("mail")
    mail.pause()
    began = mail.get().paused_at

    assert mail.pause(until=timedelta(minutes=5)) == 1
    assert mail.get().resume_at is not None
    assert mail.pause() == 1
    assert mail.pause() == 0

    assert (mail.get().paused_at, mail.get().resume_at) == (began, None)


def test_pause_after_expired_pause_has_new_start():
    mail = Queue.objects.named("mail")
    mail.pause(until=timedelta(minutes=5))
    expire(mail)

    mail.pause()

    queue = mail.seen().get()
    assert queue.seen_at - queue.paused_at < timedelta(seconds=30)


def test_pause_until_past_time_has_no_effect():
    assert Queue.objects.named("mail").pause(until=now() - timedelta(seconds=60)) == 0
    assert not Queue.objects.paused().exists()


def test_resume_ignores_expired_pause():
    mail = Queue.objects.named("mail")
    mail.pause(until=timedelta(minutes=5))
    expire(mail)

    assert mail.resume() == 0


@pytest.mark.parametrize(
    "until",
    [timedelta(), timedelta(hours=-1), timedelta(days=999_999), datetime(2030, 1, 1), 60, "1h"],
)
def test_invalid_end_of_pause_is_refused(until):
    with pytest.raises(ValueError, match="give an aware datetime, or a timedelta from now"):
        Queue.objects.named("mail").pause(until=until)


@pytest.mark.parametrize("name", ["", "a,b", "*", "-mail", "x" * 101, "a\0", "\ud800", None])
def test_invalid_queue_name_is_refused(name):
    with pytest.raises(ValueError, match="is not a queue"):
        Queue.objects.named(name)


@pytest.mark.parametrize("name", ["", "confirm", "x." + "x" * 255, "x.\0", None, tasks.add])
def test_invalid_task_path_is_refused(name):
    with pytest.raises(ValueError, match="is not a task"):
        TaskState.objects.named(name)


def test_claim_skips_paused_task(claimer):
    tasks.add.enqueue(1)
    tasks.nothing.enqueue()
    paused = TaskState.objects.named(tasks.add.module_path)

    assert paused.pause() == 1
    assert [job.task for job in all_claimed(claimer(), 10)] == ["tests.tasks.nothing"]

    assert paused.resume() == 1
    assert [job.task for job in all_claimed(claimer(), 10)] == ["tests.tasks.add"]


def test_worker_sees_paused_task_within_a_second(claimer, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("django_dbqueue.runtime.worker.claimer.time.monotonic", lambda: clock[0])
    claims = claimer()
    for number in range(4):
        tasks.add.enqueue(number)
    assert len(all_claimed(claims, 1)) == 1
    clock[0] += 0.9
    assert len(all_claimed(claims, 1)) == 1

    TaskState.objects.named(tasks.add.module_path).pause()
    clock[0] += 0.2

    assert all_claimed(claims, 1) == []


def test_paused_tasks_are_read_once_a_second(claimer):
    claims = claimer()
    for number in range(10):
        tasks.add.enqueue(number)
    with CaptureQueriesContext(connection) as first:
        all_claimed(claims, 1)

    with CaptureQueriesContext(connection) as seen:
        for _ in range(3):
            all_claimed(claims, 1)

    counts = [
        sum("dbqueue_taskstate" in query["sql"] for query in queries) for queries in (first, seen)
    ]
    assert counts == [1, 0]


@pytest.mark.parametrize("state", [Job.State.READY, Job.State.SCHEDULED])
def test_drain_ignores_jobs_of_paused_tasks(state):
    supervisor = a_process("supervisor", kind="supervisor")
    drain = Drain("default", [QueueSelector(("*",))], Options(), supervisor)
    Job.objects.create(task="tests.tasks.add", queue="default", state=state, run_after=now_plus(-5))
    assert drain._any_left()

    TaskState.objects.named(tasks.add.module_path).pause()

    assert not drain._any_left()


def test_end_of_pause_accepts_any_time_zone():
    ends = datetime(2100, 1, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45)))

    Queue.objects.named("mail").pause(until=ends)

    assert Queue.objects.get().resume_at == ends
