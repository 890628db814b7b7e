"""When a job runs: expiry, snooze, retry on request, priority and ageing."""

from __future__ import annotations

import itertools
import logging
import time
from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from django_dbqueue import Snoozed, task, testing
from django_dbqueue.compat import InvalidTask, TaskResultStatus, signals
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Execution, Failure, Job
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.lane_cursors import LaneCursors
from django_dbqueue.runtime.worker.task_call import ThreadCall

from . import direct, tasks, timely
from .conftest import LONG, all_claimed
from .models import Run

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def drained(result, times=1):
    assert testing.drain() == times
    result.refresh()
    return result


def wait_of(job):
    """Return the seconds until a job is due, by the database's clock."""
    now = Job.objects.filter(pk=job.pk).values_list(Now(), flat=True).get()
    return (Job.objects.get(pk=job.pk).run_after - now).total_seconds()


class TestExpires:
    def test_job_claimed_in_time_runs(self):
        result = drained(timely.greet.enqueue("you"))

        assert result.return_value == "you"
        assert (
            590
            < (Job.objects.get().expires_at - Job.objects.get().enqueued_at).total_seconds()
            <= 600
        )

    def test_job_claimed_too_late_is_discarded_with_reason(self):
        result = timely.greet.enqueue("you")
        Job.objects.update(expires_at=now_plus(-1))

        drained(result)

        job, execution = Job.objects.get(), Execution.objects.get()
        assert (job.state, job.failures, execution.outcome) == ("discarded", 0, "discarded")
        assert execution.message.startswith(f"It expired at {job.expires_at}")
        assert (result.status, result.errors[0].exception_class_path) == (
            TaskResultStatus.FAILED,
            "django_dbqueue.exceptions.Expired",
        )
        assert not Run.objects.exists()
        assert not Failure.objects.exists()

    def test_job_that_expires_in_the_worker_is_discarded_at_start(self, backend, claim):
        timely.greet.enqueue("you")
        (job,) = claim()
        job.expires_at = job.now() + timedelta(seconds=0.1)
        time.sleep(0.2)

        direct.settle([executor.run(ThreadCall(job), backend)])

        assert Execution.objects.get().outcome == "discarded"
        assert not Run.objects.exists()

    def test_job_that_expires_during_its_start_is_discarded(self, backend, claim, monkeypatch):
        """The record of the start may wait for another transaction that holds the job's row."""

        def wait(job):
            job.expires_at = job.now() + timedelta(seconds=0.1)
            time.sleep(0.2)
            return True

        monkeypatch.setattr("django_dbqueue.runtime.worker.attempt.mark_started", wait)
        timely.greet.using(on_lost="fail").enqueue("you")
        (job,) = claim()

        direct.settle([executor.run(ThreadCall(job), backend)])

        assert Execution.objects.get().outcome == "discarded"
        assert not Run.objects.exists()

    def test_job_whose_claim_waited_for_the_server_is_not_discarded_early(self, backend, claim):
        """The worker counts from before the statement, and so from before a stalled connection."""
        timely.greet.enqueue("you")
        (job,) = claim()
        job.clock -= 601

        direct.settle([executor.run(ThreadCall(job), backend)])

        assert Execution.objects.get().outcome == "successful"
        assert Run.objects.exists()
        assert abs((job.now() - timezone.now()).total_seconds()) < 10

    def test_expired_coroutine_is_discarded(self):
        result = timely.snooze_async.using(expires=HOUR).enqueue()
        Job.objects.update(expires_at=now_plus(-1))

        assert drained(result).errors[0].exception_class_path == "django_dbqueue.exceptions.Expired"

    def test_expired_job_of_unknown_task_is_discarded(self):
        Job.objects.create(task="tests.tasks.renamed", queue="default", expires_at=now_plus(-1))

        testing.drain()

        assert Job.objects.get().state == "discarded"

    def test_expired_job_sends_no_signal(self):
        heard = []
        receivers = [
            (signal, lambda **kwargs: heard.append(kwargs))
            for signal in (signals.task_started, signals.task_finished)
        ]
        timely.greet.enqueue("you")
        Job.objects.update(expires_at=now_plus(-1))

        for signal, receiver in receivers:
            signal.connect(receiver, weak=False)
        try:
            testing.drain()
        finally:
            for signal, receiver in receivers:
                signal.disconnect(receiver)

        assert heard == []

    def test_expires_counts_from_run_after(self):
        timely.greet.using(run_after=HOUR).enqueue("you")
        timely.greet.using(run_after=timezone.now() + HOUR).enqueue("you")

        for job in Job.objects.all():
            assert job.expires_at - job.run_after == timedelta(minutes=10)

    def test_expires_counts_from_now_for_past_run_after(self):
        timely.greet.using(run_after=timezone.now() - HOUR).enqueue("you")

        job = Job.objects.get()
        assert abs((job.expires_at - job.enqueued_at).total_seconds() - 600) < 5

    def test_enqueue_many_sets_expires(self):
        timely.greet.using(run_after=timezone.now() + HOUR).enqueue_many([("you",), ("me",)])

        assert Job.objects.filter(expires_at__gt=now_plus(4000)).count() == 2

    def test_fixed_time_of_a_call_is_stored_unchanged(self, backend):
        end = timezone.now().replace(microsecond=0) + HOUR

        result = tasks.add.using(expires=end).enqueue(1)

        assert Job.objects.get().expires_at == end == backend.get_result(result.id).task.expires

    def test_job_with_a_past_time_is_discarded(self):
        result = tasks.add.using(expires=timezone.now() - timedelta(seconds=1)).enqueue(1)

        assert drained(result).errors[0].exception_class_path == "django_dbqueue.exceptions.Expired"

    @pytest.mark.parametrize(
        ("expires", "said"),
        [
            (timedelta(0), "above 0"),
            (-HOUR, "above 0"),
            (timedelta(days=40_000), "within 36,500 days"),
            (600, "must be a timedelta such as"),
            ("soon", "must be a timedelta such as"),
            (True, "must be a timedelta such as"),
            (datetime(2030, 1, 1), "must be an aware datetime"),
        ],
    )
    def test_invalid_expires_is_refused(self, expires, said):
        with pytest.raises(InvalidTask, match=said):
            tasks.add.using(expires=expires)
        with pytest.raises(
            InvalidTask, match=said.replace("must be an aware datetime", "must be a timedelta")
        ):
            task(expires=expires)(tasks.add.func)

    def test_fixed_time_is_refused_in_the_decorator(self):
        with pytest.raises(InvalidTask, match=r"Use \.using"):
            task(expires=timezone.now() + HOUR)(tasks.add.func)

    @pytest.mark.parametrize("run_after", [2 * HOUR, timezone.now() + 2 * HOUR])
    def test_expires_before_run_after_is_refused(self, run_after):
        with pytest.raises(InvalidTask, match="expires must be later than run_after"):
            tasks.add.using(run_after=run_after, expires=timezone.now() + HOUR)

    @pytest.mark.parametrize(
        ("year", "said"), [(9999, "not within 36,500 days from now"), (999, "not later than")]
    )
    def test_expires_that_no_database_stores_is_refused(self, year, said):
        expires = datetime(year, 12, 31, tzinfo=timezone.get_current_timezone())
        with pytest.raises(InvalidTask, match=f"expires: .* is {said}"):
            tasks.add.using(expires=expires)

    def test_job_is_not_retried_after_its_expires(self):
        result = drained(timely.greet_again_in_an_hour.enqueue())

        assert Job.objects.get().state == "failed"
        assert [error.exception_class for error in result.errors] == [ConnectionError]

    def test_retry_that_expires_is_discarded(self):
        result = tasks.fail_and_wait.using(expires=HOUR).enqueue()
        drained(result)
        Job.objects.update(expires_at=now_plus(-1), run_after=now_plus(-2))

        drained(result)

        assert list(Execution.objects.order_by("attempt").values_list("outcome", flat=True)) == [
            "failed",
            "discarded",
        ]

    def test_expired_job_runs_after_operator_retry(self):
        result = timely.greet.enqueue("you")
        Job.objects.update(expires_at=now_plus(-1))
        testing.drain()

        Job.objects.all().retry()

        assert drained(result).return_value == "you"

    def test_expires_adds_no_statement_to_an_attempt(
        self, backend, claim, django_assert_num_queries
    ):
        tasks.add.enqueue(1)
        timely.greet.using(queue_name="other").enqueue("you")
        plain, with_it = sorted(claim(), key=lambda job: job.task)

        with django_assert_num_queries(0):
            executor.run(ThreadCall(plain), backend)
        with django_assert_num_queries(1):  # The task's own statement.
            executor.run(ThreadCall(with_it), backend)


class TestSnooze:
    @pytest.mark.parametrize("task", [timely.snooze, timely.snooze_async])
    @pytest.mark.parametrize(
        ("how", "seconds"), [(60, 60), ("minute", 60), (0.5, 0.5), ("time", 3600)]
    )
    def test_snooze_ends_the_attempt_and_schedules_the_job(self, task, how, seconds):
        drained(task.enqueue(how))

        job, execution = Job.objects.get(), Execution.objects.get()
        assert (job.state, job.attempt, job.failures) == ("scheduled", 1, 0)
        assert (execution.outcome, execution.error_type, execution.failure) == ("snoozed", "", None)
        assert seconds - 5 < wait_of(job) <= seconds

    def test_snooze_until_a_time_is_exact(self, backend, claim, monkeypatch):
        end = timezone.now().replace(microsecond=0) + HOUR
        monkeypatch.setitem(timely.DELAYS, "then", end)
        timely.snooze.enqueue("then")
        (job,) = claim()

        direct.settle([executor.run(ThreadCall(job), backend)])

        assert Job.objects.get().run_after == end

    @pytest.mark.parametrize("task", [timely.snooze, timely.snooze_async])
    def test_repeated_snooze_spends_no_attempt(self, task):
        result = task.enqueue(0, times=4)

        assert drained(result, times=5).return_value == 5
        assert Job.objects.get().failures == 0
        assert list(Execution.objects.order_by("attempt").values_list("outcome", flat=True)) == [
            "snoozed"
        ] * 4 + ["successful"]
        assert result.errors == []

    def test_except_exception_does_not_catch_snooze(self):
        drained(timely.snooze.enqueue())

        assert list(Run.objects.values_list("job", flat=True)) == ["attempt 1"]
        assert not issubclass(Snoozed, Exception)

    def test_snooze_of_an_atomic_task_rolls_back(self):
        drained(timely.snooze_atomically.enqueue())

        assert Execution.objects.get().outcome == "snoozed"
        assert not Run.objects.exists()

    @pytest.mark.parametrize(
        ("how", "error", "said"),
        [
            ("negative", "ValueError", "snooze(): -1 is not a delay"),
            ("nan", "ValueError", "snooze(): nan is not a delay"),
            ("text", "TypeError", "snooze(): 'soon' is not a delay"),
            ("true", "TypeError", "snooze(): True is not a delay"),
            ("naive", "ValueError", "is not an aware datetime"),
            ("century", "ValueError", "is not a delay from 0 to 36,500 days"),
        ],
    )
    def test_invalid_delay_fails_the_attempt(self, how, error, said):
        drained(timely.snooze.enqueue(how))

        execution = Execution.objects.get()
        assert (execution.outcome, execution.error_type) == ("failed", f"builtins.{error}")
        assert said in execution.message

    def test_snooze_sends_no_task_finished(self):
        heard = []
        signals.task_finished.connect(
            lambda **kwargs: heard.append(kwargs), weak=False, dispatch_uid="test"
        )
        try:
            drained(timely.snooze.enqueue())
        finally:
            signals.task_finished.disconnect(dispatch_uid="test")
        assert heard == []


class TestRetry:
    @pytest.mark.parametrize("task", [timely.ask_again, timely.ask_again_async])
    def test_retry_is_a_failure_and_ignores_retry_on(self, task):
        drained(task.enqueue(delay=60, reason="the shop is closed"))

        job, execution = Job.objects.get(), Execution.objects.get()
        assert (job.state, job.failures, execution.outcome) == ("scheduled", 1, "failed")
        assert 55 < wait_of(job) <= 60
        assert (execution.error_type, execution.message) == (
            "django_dbqueue.exceptions.Retried",
            "the shop is closed",
        )
        assert Failure.objects.get().location == "tests/timely.py:_ask_again"

    @pytest.mark.parametrize("task", [timely.ask_again, timely.ask_again_async])
    def test_retry_stops_at_max_attempts(self, task):
        result = drained(task.enqueue(), times=3)

        assert result.status == TaskResultStatus.FAILED
        assert Job.objects.get().failures == 3

    def test_retry_is_grouped_by_the_handled_exception(self):
        result = drained(timely.ask_again.enqueue(handled=True), times=3)

        failure = Failure.objects.get()
        assert (failure.error_type, failure.location, failure.count) == (
            "builtins.ConnectionError",
            "tests/timely.py:_ask_again",
            3,
        )
        assert failure.message == "no answer from server 1"
        assert "ConnectionError: no answer from server 3" in result.errors[2].traceback
        assert "Retried" in result.errors[2].traceback

    def test_reason_is_the_message_of_the_execution(self):
        drained(timely.ask_again.enqueue(handled=True, reason="nul"), times=3)

        assert {(e.error_type, e.message) for e in Execution.objects.all()} == {
            ("builtins.ConnectionError", "the shop\ufffd is closed")
        }

    def test_retry_without_a_delay_uses_the_backoff(self):
        drained(timely.ask_again.enqueue(delay=None))

        assert 1229 < wait_of(Job.objects.get()) <= 1234

    def test_backoff_gets_the_handled_exception_and_may_refuse(self):
        drained(timely.ask_the_back_off.enqueue(handled=True))
        assert 70 < wait_of(Job.objects.get()) <= 77

        assert (
            drained(timely.ask_the_back_off.enqueue(handled=False)).status
            == TaskResultStatus.FAILED
        )

    def test_invalid_delay_fails_the_attempt(self):
        drained(timely.ask_again.enqueue(delay=-1))

        assert "retry(): -1 is not a delay" in Execution.objects.order_by("-pk")[0].message


class TestReprioritise:
    @pytest.mark.parametrize("state", Job.State.values)
    def test_only_waiting_jobs_are_reprioritised(self, state, process):
        owned = {"process": process} if state == "running" else {}
        ended = (
            {"finished_at": timezone.now()}
            if state in ("successful", "failed", "discarded")
            else {}
        )
        blocked = {"blocked_by": "a key"} if state == "blocked" else {}
        Job.objects.create(
            task="tests.tasks.add", queue="default", state=state, **owned, **ended, **blocked
        )

        changed = Job.objects.all().reprioritise(50)

        waits = state in ("ready", "scheduled", "blocked")
        assert (changed, Job.objects.get().priority) == ((1, 50) if waits else (0, 0))

    def test_jobs_with_the_same_priority_are_not_counted(self):
        tasks.add.using(priority=50).enqueue(1), tasks.add.enqueue(2)

        assert Job.objects.all().reprioritise(50) == 1

    def test_claim_yields_the_jobs_of_each_lane(self, process):
        tasks.add.enqueue_many([(1,)] * 3)
        tasks.add.using(priority=5).enqueue_many([(2,)] * 2)
        claimed = Claimer("default", process, QueueSelector(("*",))).claim(10)

        assert [job.args for job in next(claimed)] == [[2], [2]]
        assert Job.objects.filter(state="ready").count() == 3
        assert [job.args for job in next(claimed)] == [[1]] * 3
        assert next(claimed, None) is None

    def test_reprioritised_job_is_claimed_first(self, process):
        results = tasks.add.enqueue_many([(1,), (2,)])
        claimer = Claimer("default", process, QueueSelector(("*",)))

        Job.objects.filter(pk=results[1].id).reprioritise(100)

        assert [job.args for job in all_claimed(claimer, 2)] == [[2], [1]]

    @pytest.mark.parametrize("priority", [101, -101, 1.5, "50", True, None])
    def test_invalid_priority_is_refused(self, priority):
        with pytest.raises(ValueError, match=r"is not a whole number from -100 to 100"):
            Job.objects.all().reprioritise(priority)


class TestAgeing:
    @pytest.fixture
    def claimer(self, process, monkeypatch):
        monkeypatch.setattr(
            LaneCursors, "LONG", 3600.0
        )  # A slow scan on a busy machine does not count as long.

        def claimer(*queues, ageing=None):
            claimer = Claimer(
                "default", process, QueueSelector(queues or ("*",)), Options(ageing=ageing)
            )
            claimer.FRESH = -1.0
            return claimer

        return claimer

    def served(self, claimer, rounds=20):
        """Claim from a stream of urgent jobs. Return the number of claims until the old job."""
        old = tasks.add.using(priority=-5).enqueue("old")
        Job.objects.update(run_after=now_plus(-60_000))
        for number in range(1, rounds + 1):
            tasks.add.using(priority=5).enqueue("urgent")
            (job,) = all_claimed(claimer, 1)
            if str(job.pk) == old.id:
                return number
            assert job.args == ["urgent"]
        return None

    def test_urgent_jobs_starve_others_without_ageing(self, claimer):
        assert self.served(claimer()) is None

    def test_old_job_is_claimed_first_with_ageing(self, claimer):
        assert self.served(claimer(ageing=5000.0)) == 1  # Twelve steps: -5 counts as 7.

    def test_job_that_is_not_old_enough_waits(self, claimer):
        assert (
            self.served(claimer(ageing=6100.0)) is None
        )  # Nine steps: -5 counts as 4. The tenth comes after 1,000 s.

    def test_old_job_goes_before_jobs_of_equally_ranked_queues(self, claimer):
        old = tasks.add.using(priority=-5, queue_name="low").enqueue("old")
        Job.objects.update(run_after=now_plus(-600))
        tasks.add.using(priority=5, queue_name="high").enqueue("urgent")

        assert str(next(claimer(ageing=50.0).claim(1))[0].pk) == old.id

    def test_ageing_keeps_the_order_of_queues(self, claimer):
        tasks.add.using(priority=-5, queue_name="low").enqueue("old")
        Job.objects.update(run_after=now_plus(-600))
        urgent = tasks.add.using(priority=-100, queue_name="high").enqueue("urgent")

        assert str(next(claimer("high", "low", ageing=1.0).claim(1))[0].pk) == urgent.id

    def test_ageing_holds_between_two_scans(self, claimer):
        claimer = claimer(ageing=50.0)
        claimer.FRESH = 3600.0
        tasks.add.using(priority=-5).enqueue_many([("old",)] * 3)
        Job.objects.update(run_after=now_plus(-600))
        tasks.add.using(priority=5).enqueue_many([("urgent",)] * 3)

        served = list(itertools.chain.from_iterable(all_claimed(claimer, 1) for _ in range(6)))

        assert [job.args[0] for job in served] == ["old"] * 3 + ["urgent"] * 3

    def test_ageing_adds_one_statement_for_all_lanes(self, claimer, django_assert_max_num_queries):
        tasks.add.enqueue(1), tasks.add.using(priority=1).enqueue(1)
        plain, ageing = claimer(), claimer(ageing=60.0)
        for each in (plain, ageing):
            each._read_lanes()

        with django_assert_max_num_queries(100) as with_it:
            ageing._read_lanes()
        with django_assert_max_num_queries(100) as without:
            plain._read_lanes()

        assert len(with_it) - len(without) == 1


@pytest.mark.django_db(transaction=True)
class TestThroughAWorker:
    def test_expired_snoozed_and_retried_jobs_in_threads_and_coroutines(self, runqueue):
        expired = timely.greet.enqueue("Ada")
        Job.objects.update(expires_at=now_plus(-1))
        again = {task: task.enqueue(0.1, times=2) for task in (timely.snooze, timely.snooze_async)}
        asked = [
            task.enqueue(0.1, reason="not yet", handled=True)
            for task in (timely.ask_again, timely.ask_again_async)
        ]

        runqueue("--embedded")

        assert (
            expired.wait(timeout=LONG).errors[0].exception_class_path
            == "django_dbqueue.exceptions.Expired"
        )
        for result in again.values():
            assert result.wait(timeout=LONG).return_value == 3
        for result in asked:
            assert len(result.wait(timeout=LONG).errors) == 3
        assert Failure.objects.get().count == 6

    def test_old_job_of_low_priority_runs_before_urgent_ones(self, runqueue):
        old = tasks.add.using(priority=-20).enqueue(1)
        Job.objects.update(run_after=now_plus(-60))
        tasks.nothing.using(priority=20).enqueue_many([()] * 50)
        options = '{"ageing": 1.0, "threads": 1, "prefetch": 0, "database": "default"}'

        assert runqueue("--drain", "--embedded", DBQUEUE_OPTIONS=options).wait(LONG) == 0

        # As they ended, one by one. The time at which one started includes the wait for its claim.
        order = list(Execution.objects.order_by("pk").values_list("job", flat=True))
        assert len(order) == 51
        # The same number of steps is before them at each claim.
        assert str(order[0]) == old.id


def test_snoozed_job_is_logged_as_info(caplog):
    caplog.set_level(logging.INFO, "django_dbqueue")

    drained(timely.snooze.enqueue())

    assert [record.levelname for record in caplog.records if "snoozed" in record.message] == [
        "INFO"
    ]


@pytest.mark.parametrize("given", ["soon", -1, None])
def test_raised_snoozed_validates_its_delay(given):
    with pytest.raises((TypeError, ValueError), match=r"snooze\(\): .* is not a delay"):
        raise Snoozed(given)


def test_project_without_time_zones_uses_naive_times(settings):
    settings.USE_TZ = False

    assert tasks.add.using(expires=datetime(2110, 1, 1)).expires == Snoozed(
        datetime(2100, 1, 1)
    ).until.replace(year=2110)
    with pytest.raises(InvalidTask, match="must be a naive datetime"):
        tasks.add.using(expires=datetime.now(timezone.get_current_timezone()))
