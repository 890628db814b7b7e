"""Statistics per hour: each attempt and each enqueued job counts once, whatever fails meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.utils import timezone as django_timezone

from django_dbqueue import batch, pipeline, task
from django_dbqueue.core.counts import BOUNDS, Counts, Times
from django_dbqueue.core.transactions import is_conflict
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.statistics import count_enqueued, fold
from django_dbqueue.models import (
    Execution,
    Failure,
    FailureStatistic,
    Job,
    Process,
    Statistic,
    StatisticDelta,
)
from django_dbqueue.models.enums import FAILURES
from django_dbqueue.runtime import dispatcher as dispatching
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.testing import drain

from .. import direct, tasks
from ..conftest import a_process, skip_if_long_numbers_are_refused, until

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = datetime(2026, 5, 4, 10, tzinfo=timezone.utc)
ADD = ("default", "tests.tasks.add")


def fold_all() -> None:
    while fold("default", 1000):
        pass
    assert not StatisticDelta.objects.exists()


def counts(**of) -> Counts:
    """All statistics, folded, as one."""
    fold_all()
    total = Counts()
    for each in Statistic.objects.per_hour(HOUR - timedelta(days=9), **of).values():
        total.merge(each)
    return total


def numbers(**of) -> tuple[int, int, int, int]:
    total = counts(**of)
    return total.enqueued, total.runs, total.failures, total.retries


def a_delta(at=HOUR, queue="q", task="t", release="", **counts) -> StatisticDelta:
    of = {"at": at, "queue": queue, "task": task, "release": release}
    return StatisticDelta.objects.create(**of, counts=counts)


def test_jobs_and_attempts_are_counted_by_task_and_queue():
    tasks.add.enqueue(1)
    tasks.add.enqueue_many([(2,), (3,)])
    tasks.add.using(queue_name="mail").enqueue(4)
    tasks.fail.enqueue()
    drain()

    assert numbers() == (5, 5, 1, 0)
    assert numbers(task="tests.tasks.add") == (4, 4, 0, 0)
    assert numbers(queue="mail") == (1, 1, 0, 0)
    assert numbers(queue="mail", task="tests.tasks.fail") == (0, 0, 0, 0)
    assert numbers(queue="") == (0, 0, 0, 0)


def test_retry_counts_as_retry_and_is_not_enqueued_again():
    tasks.fail.using(max_attempts=2).enqueue()
    drain()
    Job.objects.run_now()
    drain()

    assert numbers() == (1, 2, 2, 1)


def test_jobs_deleted_on_success_are_counted():
    tasks.leave_no_trace.enqueue()
    drain()

    assert not Job.objects.exists()
    assert numbers() == (1, 1, 0, 0)


def test_rolled_back_call_counts_nothing():
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        tasks.add.enqueue(1)
        tasks.add.using(key="a").enqueue(1)
        raise ZeroDivisionError

    assert not StatisticDelta.objects.exists()


def test_rolled_back_settlement_counts_nothing(claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    fold_all()

    with pytest.raises(ZeroDivisionError), transaction.atomic():
        direct.settle([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])
        raise ZeroDivisionError

    assert not StatisticDelta.objects.exists()


def test_result_written_twice_counts_once(claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    result = AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)

    assert direct.settle([result]).written == direct.settle([result]).written == [result]

    assert numbers() == (1, 1, 0, 0)


def test_only_new_runs_of_a_key_are_enqueued(claim):
    keyed = tasks.add.using(key="a")
    keyed.enqueue(1)
    keyed.enqueue(2)
    (job,) = claim()
    keyed.enqueue(3)
    keyed.enqueue(4)
    assert numbers() == (1, 0, 0, 0)

    direct.settle([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])
    assert numbers() == (2, 1, 0, 0)

    drain()
    keyed.enqueue(5)
    keyed.using(on_conflict="skip").enqueue(6)
    assert numbers() == (3, 2, 0, 0)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="The function is PostgreSQL's.")
def test_jobs_from_sql_are_counted_once_a_run():
    def call(more: str = "", rows: int = 1):
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT dbqueue_enqueue('tests.tasks.add', '[1]'{more}) FROM generate_series(1, {rows})"
            )

    call(rows=3)
    call(", key => 'a'", rows=3)
    assert numbers() == (4, 0, 0, 0)

    drain()
    call(", key => 'a', on_conflict => 'once'")
    call(", key => 'a'")
    call(", key => 'a'")
    assert numbers() == (5, 4, 0, 0)


def test_callbacks_children_and_stages_of_jobs_are_counted():
    with batch(on_finish=tasks.sum_up.using(queue_name="after")):
        tasks.add.enqueue(1)
    pipeline(tasks.add.using(queue_name="stages"), tasks.add).enqueue(1)
    drain()

    assert numbers(queue="after") == (1, 1, 0, 0)
    total = numbers()
    assert total[0] == Job.objects.count() == 3
    assert total[1] == Execution.objects.count() == 4


@task
def enqueue_once_more(number):
    if Execution.objects.count() == 1:
        keyed_pipeline().enqueue(number)


def keyed_pipeline():
    return pipeline(tasks.add, enqueue_once_more.using(queue_name="last")).using(key="line")


def test_rerun_of_a_pipeline_that_its_last_stage_requests_counts_for_its_first_stage():
    keyed_pipeline().enqueue(1)
    drain()

    assert counts(task="tests.tasks.add").enqueued == 2
    assert counts(task=enqueue_once_more.module_path).enqueued == 0
    assert numbers() == (2, 4, 0, 0)


def test_times_are_those_of_the_attempts(claim):
    tasks.add.enqueue(1)
    due = HOUR - timedelta(seconds=70)
    Job.objects.update(run_after=due, enqueued_at=due)
    (job,) = claim()
    direct.settle(
        [
            AttemptResult.of(
                job,
                Execution.Outcome.SUCCESSFUL,
                Job.State.SUCCESSFUL,
                started_at=HOUR,
                finished_at=HOUR + timedelta(seconds=2),
            )
        ]
    )

    total = counts(task="tests.tasks.add")
    assert Statistic.objects.per_hour(HOUR)[HOUR].runs == 1
    assert (total.run_time.sum, total.run_time.longest, total.run_time.mean) == (2, 2, 2)
    assert total.wait_time.longest == total.wait_time.percentile(100) == 70


def test_time_before_the_call_is_no_waiting_time(claim):
    """A table of jobs may have 1970 for "at once": the mean of an hour became decades."""
    tasks.add.using(run_after=datetime(1970, 1, 2, tzinfo=HOUR.tzinfo)).enqueue(1)
    direct.dispatch()
    (job,) = claim()
    direct.settle([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])

    assert counts(task="tests.tasks.add").wait_time.longest < 100


def test_clock_of_another_host_makes_no_negative_time():
    times = Times.of([-5.0])

    assert (times.sum, times.longest, times.percentile(99)) == (0, 0, 0)


@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.0123, 0.5, 3.0, 3600.0, 250_000.0])
def test_percentile_is_within_the_bounds_of_its_bucket(seconds):
    times = Times.of([seconds] * 1000)

    below = max([bound for bound in BOUNDS if bound < seconds], default=0.0)
    for percent in (0, 1, 50, 99.9, 100):
        assert below <= times.percentile(percent) <= seconds


def test_percentile_follows_many_different_times():
    times = Times.of(number / 1000 for number in range(1, 10_001))

    assert [round(times.percentile(p), 1) for p in (50, 90, 99, 100)] == pytest.approx(
        [5.0, 9.0, 9.9, 10.0], rel=0.02
    )
    assert times.number == 10_000


@pytest.mark.parametrize("percent", [-1, 100.1, float("nan"), "50", None, True])
def test_percentile_outside_its_range_is_refused(percent):
    with pytest.raises(ValueError, match="from 0 to 100"):
        Times().percentile(percent)


@pytest.mark.parametrize("given", [{"task": tasks.add}, {"queue": "a\x00"}, {"release": 5}])
def test_name_that_is_no_text_is_refused(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} must be a name as text, not "):
        Statistic.objects.per_hour(django_timezone.now(), **given)


def test_times_survive_storing():
    times = Times.of([0.0, 1.0, 1.0, 10**6])

    assert Times.from_json(times.sum, times.longest, times.as_json()) == times


@pytest.mark.parametrize("stored", [None, 7, [], {"no": 1, "-1": 1, "999": 1}, {"3": "many"}])
def test_histogram_of_another_shape_is_left_out(stored):
    a_delta(runs=1, run_time=[1.0, 1.0, stored])

    assert (counts().runs, counts().run_time.number) == (1, 0)


def test_counts_survive_storing():
    one = Counts(1, 2, 3, 4, Times.of([0.5]), Times.of([1.0, 10**6]))

    assert Counts.from_json(one.as_json()) == one
    assert Counts.from_json(Counts(enqueued=1).as_json()) == Counts(enqueued=1)
    assert Counts().as_json() == {}


@pytest.mark.parametrize(
    "stored",
    [
        *(7, [], "runs", {"runs": "many"}, {"runs": -1}, {"runs": 10**400}, {"runs": [1]}),
        *({"run_time": 1}, {"run_time": [1, 1]}, {"run_time": ["a", -1, {"1": 10**400}]}),
        {"wait_time": [1e300, 10**400, {"1": -5}]},
    ],
)
def test_what_cannot_be_added_up_counts_as_nothing(stored):
    if str(10**400) in str(stored):
        skip_if_long_numbers_are_refused()
    StatisticDelta.objects.create(at=HOUR, queue="q", task="t", counts=stored)
    a_delta(runs=1, run_time=[1.0, 1.0, {"3": 1}])

    total = counts()
    assert (total.runs, total.run_time.sum, total.run_time.number) == (1, 1.0, 1)


def test_document_that_python_cannot_decode_counts_as_nothing():
    skip_if_long_numbers_are_refused()
    a_delta()
    with connection.cursor() as cursor:
        document = '{"runs": ' + "1" * 5000 + "}"
        cursor.execute("UPDATE dbqueue_statisticdelta SET counts = %s", [document])
    a_delta(runs=1)

    assert counts().runs == 1


@pytest.mark.skipif(connection.vendor == "mysql", reason="MariaDB has no such values.")
@pytest.mark.parametrize("value", ["infinity", "-infinity", "0500-01-01", "soon"])
def test_times_that_python_cannot_read_are_refused(value):
    a_delta()
    with (
        pytest.raises(DatabaseError),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("UPDATE dbqueue_statisticdelta SET at = %s", [value])


def test_statistics_that_cannot_be_written_stop_nothing_else(backend, monkeypatch, caplog):
    monkeypatch.setattr(dispatching, "fold", lambda *args: 1 / 0)
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    a_process("dispatcher", kind=Process.Kind.DISPATCHER)
    a_delta(enqueued=1)
    now = django_timezone.now()
    Statistic.objects.create(period="hour", start=now - timedelta(days=100), queue="q", task="t")

    dispatcher._work()

    assert "statistics could not be written: division by zero" in caplog.text
    assert not Statistic.objects.exists()


def test_hours_are_apart_and_in_order():
    for hours, number in ((2, 5), (0, 1), (1, 3), (0, 1)):
        a_delta(at=HOUR + timedelta(hours=hours, minutes=59, seconds=59.99), enqueued=number)
    fold_all()

    found = Statistic.objects.per_hour(HOUR + timedelta(minutes=30))
    assert [(hour - HOUR, each.enqueued) for hour, each in found.items()] == [
        (timedelta(hours=hour), number) for hour, number in ((0, 2), (1, 3), (2, 5))
    ]
    assert list(Statistic.objects.per_hour(HOUR + timedelta(hours=1))) == [
        HOUR + timedelta(hours=1),
        HOUR + timedelta(hours=2),
    ]


def test_minutes_are_counted_beside_hours():
    for minutes in (0, 1, 1, 59, 60):
        a_delta(at=HOUR + timedelta(minutes=minutes, seconds=59), enqueued=1)
    fold_all()

    found = Statistic.objects.per_minute(HOUR + timedelta(seconds=30))
    assert [((at - HOUR).seconds // 60, each.enqueued) for at, each in found.items()] == [
        *((0, 1), (1, 2), (59, 1), (60, 1))
    ]
    assert [each.enqueued for each in Statistic.objects.per_hour(HOUR).values()] == [4, 1]


def test_counts_of_each_queue_and_task():
    now = django_timezone.now()
    a_delta(at=now, queue="mail", task="one", runs=1)
    a_delta(at=now, queue="mail", task="two", runs=2)
    a_delta(at=now - timedelta(hours=3), queue="slow", task="one", runs=4)
    a_delta(at=now - timedelta(days=5), queue="slow", task="one", runs=8)
    fold_all()

    def runs(counts):
        return {name: each.runs for name, each in counts.items()}

    rows = Statistic.objects
    assert runs(rows.per_queue(now - timedelta(hours=1))) == {"mail": 3}
    assert runs(rows.per_queue(now - timedelta(hours=4))) == {"mail": 3, "slow": 4}
    assert runs(rows.per_task(now - timedelta(hours=4))) == {"one": 5, "two": 2}
    # Of five days, in hours.
    Statistic.objects.filter(period="minute").delete()
    assert runs(rows.per_task(now - timedelta(days=6))) == {"one": 13, "two": 2}


def test_releases_are_counted_apart():
    for release, runs in (("v1", 3), ("v2", 2), ("V2", 1), ("", 1)):
        a_delta(release=release, runs=runs)
    fold_all()

    assert counts(release="v2").runs == 2
    assert counts(release="").runs == 1
    assert counts().runs == 7


def test_deploy_is_a_release_that_did_not_run_in_the_hour_before():
    ran = {0: ["v1"], 1: ["v1"], 2: ["v1", "v2"], 5: ["v2"], 6: ["v1"], 7: ["v1", "v3"], 8: [""]}
    for hours, releases in ran.items():
        for release in releases:
            for path in ("one", "other"):
                a_delta(at=HOUR + timedelta(hours=hours), release=release, task=path, runs=1)
    a_delta(at=HOUR + timedelta(hours=3), release="web", enqueued=1)
    fold_all()

    found = Statistic.objects.deploys(HOUR)

    assert {(at - HOUR).seconds // 3600: names for at, names in found.items()} == {
        2: ["v2"],
        6: ["v1"],
        7: ["v3"],
    }
    assert Statistic.objects.deploys(HOUR + timedelta(hours=9)) == {}


def test_failures_are_counted_by_group_queue_task_and_release(monkeypatch):
    monkeypatch.setenv("RELEASE", "v7")
    tasks.fail.enqueue()
    tasks.fail.using(queue_name="mail").enqueue()
    tasks.add.enqueue(1)
    drain()
    fold_all()

    (failure,) = Failure.objects.all()
    since = django_timezone.now() - timedelta(minutes=5)
    for period in Statistic.Period:
        rows = FailureStatistic.objects.since(period, since)
        found = rows.by_failure([failure.pk, 404])
        assert found[404].number == 0
        assert found[failure.pk].number == 2
        assert found[failure.pk].queues == {"default": 1, "mail": 1}
        assert found[failure.pk].tasks == {"tests.tasks.fail": 2}
        assert found[failure.pk].releases == {"v7": 2}
    assert (failure.release, failure.last_release) == ("v7", "v7")
    assert set(Execution.objects.values_list("release", flat=True)) == {"v7"}


def test_resolved_failure_that_is_seen_again_is_a_regression(monkeypatch):
    monkeypatch.setenv("RELEASE", "v1")
    tasks.fail.enqueue()
    drain()
    assert Failure.objects.get().reopened_at is None
    Failure.objects.resolve()

    monkeypatch.setenv("RELEASE", "v2")
    tasks.fail.enqueue()
    drain()

    failure = Failure.objects.get()
    assert (failure.state, failure.release, failure.last_release) == ("open", "v1", "v2")
    assert failure.reopened_at == failure.last_seen


@pytest.mark.parametrize(
    "stored",
    [
        *(7, [], {"x": 1}, {"-1": 1}, {"0": 1}, {"1": "many"}, {"1": -3}, {"9" * 40: 1}),
        *({"1": True, "٣": 4}, {"1": [1]}, {"1": 10**400}),
    ],
)
def test_numbers_by_failure_of_another_shape_are_left_out(stored):
    if str(10**400) in str(stored):
        skip_if_long_numbers_are_refused()
    a_delta(runs=1, by_failure=stored)
    a_delta(runs=1, by_failure={"3": 2})
    fold_all()

    found = dict(FailureStatistic.objects.filter(period="hour").values_list("failure", "number"))
    found.pop(1, None)  # True is the number 1.
    assert found == {3: 2}


def test_time_without_zone_is_refused():
    for read in (
        Statistic.objects.per_hour,
        Statistic.objects.per_queue,
        Statistic.objects.per_minute,
        Statistic.objects.deploys,
    ):
        with pytest.raises(ValueError, match=r"timezone\.now"):
            read(datetime(2026, 1, 1))


def test_names_that_differ_by_case_are_apart():
    for path in ("app.tasks.Report", "app.tasks.report", "app.tasks.répört", "app.tasks.report "):
        a_delta(task=path, queue=path, enqueued=1)
        a_delta(task=path, queue=path, enqueued=1)
    fold_all()

    hours = Statistic.objects.filter(period="hour")
    assert list(hours.values_list("enqueued", flat=True)) == [2] * 4


def test_interrupted_fold_counts_once(monkeypatch):
    a_delta(enqueued=1)
    a_delta(enqueued=1)

    with pytest.raises(ZeroDivisionError), transaction.atomic():
        fold("default", 1000)
        raise ZeroDivisionError

    assert StatisticDelta.objects.count() == 2
    assert numbers()[0] == 2


def test_limited_fold_reports_that_more_remain():
    for _ in range(5):
        a_delta(enqueued=1)

    assert [fold("default", 2) for _ in range(3)] == [True, True, False]
    assert numbers()[0] == 5


def test_concurrent_folds_and_calls_lose_no_count():
    """Two dispatchers fold while others count, and old statistics are pruned."""
    calls, threads = 40, 3

    def enqueue(thread: int) -> None:
        try:
            for _ in range(calls):
                with transaction.atomic():
                    count_enqueued("default", {("q", f"t{thread % 2}"): 1, ("q", "t"): 2})
                    a_delta(runs=1, by_failure={"1": 1, f"{2 + thread % 2}": 2})
        finally:
            connections.close_all()

    def fold_until_all() -> None:
        try:
            until(lambda: not fold("default", 7) and total() == threads * calls * 3)
        finally:
            connections.close_all()

    def total() -> int:
        return sum(each.enqueued for each in Statistic.objects.filter(period="hour"))

    with ThreadPoolExecutor(threads + 2) as pool:
        ended = [pool.submit(enqueue, number) for number in range(threads)]
        ended += [pool.submit(_retrying, fold_until_all) for _ in range(2)]
        for each in ended:
            each.result()

    assert total() == threads * calls * 3
    assert Statistic.objects.filter(period="hour").values("task").distinct().count() == 3
    for period in Statistic.Period:
        rows = FailureStatistic.objects.filter(period=period)
        assert rows.count() == 3
        assert sum(each.number for each in rows) == threads * calls * 3
    minutes = Statistic.objects.filter(period="minute", enqueued__gt=0)
    assert sum(each.enqueued for each in minutes) == threads * calls * 3


def _retrying(action) -> None:
    """Repeat after a conflict with another dispatcher, as a dispatcher does."""
    while True:
        try:
            return action()
        except OperationalError as error:
            assert is_conflict(error)
            connection.close()


def test_real_dispatcher_counts_every_attempt_of_killed_workers(runqueue):
    tasks.add.enqueue_many([(n,) for n in range(300)])
    child = runqueue("--processes", "2")
    until(lambda: Execution.objects.count() > 20)
    for process in Process.objects.filter(kind=Process.Kind.WORKER):
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not Job.objects.exclude(state=Job.State.SUCCESSFUL).exists())

    def is_exact() -> bool:
        rows = Statistic.objects.filter(task="tests.tasks.add", period="hour")
        return (
            sum(row.runs for row in rows) == Execution.objects.count()
            and sum(row.enqueued for row in rows) == 300
        )

    until(is_exact)
    failed = Execution.objects.filter(outcome__in=FAILURES).count()
    assert sum(row.failures for row in Statistic.objects.filter(period="hour")) == failed
    assert child.poll() is None


def test_old_statistics_are_pruned(backend):
    now = django_timezone.now()
    for days in (1, 89, 91, 200):
        of = {"start": now - timedelta(days=days), "queue": "q", "task": "t"}
        Statistic.objects.create(period="hour", **of, runs=days)
        Statistic.objects.create(period="minute", **of, runs=1000 + days)
        FailureStatistic.objects.create(period="hour", **of, failure_id=1, number=days)
        FailureStatistic.objects.create(period="minute", **of, failure_id=1, number=1000 + days)

    Dispatcher(backend, backend.config, SharedStatus.private())._prune()

    assert sorted(row.runs for row in Statistic.objects.all()) == [1, 89, 1001]
    assert sorted(row.number for row in FailureStatistic.objects.all()) == [1, 89, 1001]


def test_time_before_the_first_year_is_refused():
    first = datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))

    with pytest.raises(ValueError, match="before the first year"):
        Statistic.objects.per_hour(first)
