"""Limits while workers are killed: never exceeded, never stuck, and soon in use again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from statistics import quantiles

import pytest
from django.db import connection
from django.db.models import Count, F, Q

from django_dbqueue.models import Execution, Job, Slot
from django_dbqueue.models.enums import UNFINISHED

from ..conftest import LONG, most_at_a_time, until
from ..models import Interval
from ..tasks import add, occupy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer at a time"),
    pytest.mark.timeout(600),
]
KEYS, LIMIT, KILLS = 4, 2, 8


def all_have_ended() -> bool:
    return not Job.objects.filter(state__in=UNFINISHED).exists()


@pytest.mark.parametrize(
    ("number", "longest"), [(200, 0.1), (1200, 0.002)], ids=["one by one", "in a row"]
)
def test_limit_holds_while_workers_are_killed(runqueue, number, longest):
    occupy.enqueue_many(
        [(str(n % KEYS), random.uniform(longest / 10, longest)) for n in range(number)]
    )
    hosts = [runqueue("--processes", "2", "--threads", "6") for _ in range(2)]
    kills = 0
    while kills < KILLS and not all_have_ended():
        # Only processes that run jobs: on a busy machine, others may have just started.
        pids = list(
            Job.objects.running().exclude(process=None).values_list("process__pid", flat=True)
        )
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(random.choice(pids), signal.SIGKILL)
            kills += 1
        time.sleep(0.3)  # The other processes continue meanwhile.
    until(all_have_ended, 3 * LONG)

    assert all(host.poll() is None for host in hosts)
    assert Execution.objects.filter(outcome=Execution.Outcome.LOST).exists()
    # A job whose worker dies three times has failed.
    lost = (
        Execution.objects.filter(outcome=Execution.Outcome.LOST)
        .values_list("job")
        .annotate(times=Count("pk"))
    )
    given_up = {job for job, times in lost if times == 3}
    assert (
        set(Job.objects.exclude(state=Job.State.SUCCESSFUL).values_list("pk", flat=True))
        == given_up
    )
    for key in range(KEYS):
        ended = Interval.objects.filter(key=str(key), ended_at__isnull=False)
        assert most_at_a_time(ended) <= LIMIT
        assert ended.count() >= number / KEYS - len(given_up)
    assert not Slot.objects.taken().exists()


def enqueue_by_sql(key: str, seconds: float) -> None:
    """Enqueue a job that has its task's limits from its first claim on."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT dbqueue_enqueue(%s, jsonb_build_array(%s::text, %s::float8))",
                [occupy.module_path, key, seconds],
            )
    else:
        args = [key, seconds]
        Job.objects.create(task=occupy.module_path, queue="default", args=args, max_attempts=0)


def test_limit_holds_for_jobs_from_sql_beside_those_from_python(runqueue):
    hosts = [runqueue("--processes", "2", "--threads", "6") for _ in range(2)]
    # One by one, for the fast path; some before the workers, and most while they run.
    for number in range(150):
        key = str(number % KEYS)
        enqueue_by_sql(key, random.uniform(0.001, 0.05))
        occupy.enqueue(key, random.uniform(0.001, 0.05))
        if number % 50 == 0:
            until(lambda: Interval.objects.exists())
    until(all_have_ended, 3 * LONG)

    assert all(host.poll() is None for host in hosts)
    assert set(Job.objects.values_list("state", flat=True)) == {Job.State.SUCCESSFUL}
    assert not Job.objects.filter(Q(limits__isnull=True) | Q(max_attempts=0)).exists()
    for key in range(KEYS):
        ended = Interval.objects.filter(key=str(key))
        assert most_at_a_time(ended) <= LIMIT
    assert Interval.objects.count() == 300
    assert not Slot.objects.taken().exists()


def test_free_slot_starts_next_job_at_once(runqueue):
    occupy.enqueue_many([("a", 0.2)] * 20)
    runqueue("--processes", "2", "--threads", "2", "--poll-interval", "60")
    until(lambda: Interval.objects.filter(ended_at__isnull=False).count() == 20)

    times = list(Interval.objects.order_by("began_at"))
    # The end that freed its slot: two jobs earlier, by the limit.
    gaps = [(job.began_at - max_end).total_seconds() for job, max_end in _slots_freed(times)]
    # At least a quarter: a busy machine may delay others. Polling would take a minute.
    assert quantiles(gaps)[0] < 5.0, gaps


def _slots_freed(times):
    for number in range(LIMIT, len(times)):
        earlier = sorted(each.ended_at for each in times[:number])
        yield times[number], earlier[number - LIMIT]


def test_saturated_limit_does_not_delay_other_jobs(runqueue):
    until_blocked = [("a", 1.0)] * 3000
    occupy.using(priority=9).enqueue_many(until_blocked)
    assert Job.objects.filter(state=Job.State.BLOCKED).count() == 3000 - LIMIT
    add.enqueue_many([(n,) for n in range(500)])
    runqueue("--processes", "1")

    until(
        lambda: Job.objects.filter(task=add.module_path, state=Job.State.SUCCESSFUL).count() == 500
    )

    first = Execution.objects.order_by("started_at").values_list("started_at", flat=True)[0]
    last = Execution.objects.filter(job__task=add.module_path).latest("finished_at").finished_at
    assert (last - first).total_seconds() < 20
    assert Job.objects.filter(attempt__gt=F("failures") + 1).count() == 0
