"""Progress of a task: held in memory, written by its worker, fenced, and shown in its result."""

from __future__ import annotations

import threading

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import DataError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_dbqueue import testing
from django_dbqueue.core.progress_value import MOST, ProgressValue
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.exceptions import JobLost
from django_dbqueue.models import Execution, Job, Progress
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.progress import ProgressQuerySet
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.progress_writer import ProgressWriter
from django_dbqueue.runtime.worker.services import WorkerServices
from django_dbqueue.runtime.worker.task_call import ThreadCall

from ... import direct, tasks, timely
from ...conftest import LONG, until
from ...models import Run

pytestmark = pytest.mark.django_db

needs_row_locks = pytest.mark.skipif(
    "sqlite" in settings.DATABASES["default"]["ENGINE"], reason="SQLite locks the whole database."
)


def drained(result, times=1):
    assert testing.drain() == times
    result.refresh()
    return result


def all_rows():
    return list(Progress.objects.values_list("attempt", "done", "total", "note"))


@pytest.mark.parametrize("task", [timely.note, timely.note_async])
def test_last_progress_is_kept_after_the_attempt(task, backend):
    result = task.enqueue(1000)
    assert result.progress is None

    assert drained(result).progress == ProgressValue(1000, 1000, "step 1000")
    assert result.progress.fraction == 1.0
    assert backend.get_result(result.id) == result


def test_arefresh_loads_progress():
    result = drained(timely.note.enqueue(2))
    Progress.objects.update(done=1)

    async_to_sync(result.arefresh)()

    assert result.progress == (1, 2, "step 2")


def test_progress_costs_one_statement_at_settlement(backend, claim, django_assert_num_queries):
    timely.note.enqueue(1000), tasks.nothing.using(queue_name="other").enqueue()
    noting, plain = sorted(claim(), key=lambda job: job.queue)
    with django_assert_num_queries(0):
        noted, nothing = (executor.run(ThreadCall(job), backend) for job in (noting, plain))

    with CaptureQueriesContext(connection) as without:
        direct.settle([nothing])
    with django_assert_num_queries(len(without) + 1):
        direct.settle([noted])


@pytest.mark.parametrize("fail", [True, False])
def test_progress_of_atomic_task_is_kept_after_commit_or_rollback(fail):
    assert drained(timely.note_atomically.enqueue(fail=fail)).progress == (1, 2, "half")


def test_job_deleted_on_success_keeps_no_progress():
    timely.note_and_leave_no_trace.enqueue()

    assert testing.drain() == 1
    assert not Progress.objects.exists()


def test_later_attempt_without_progress_has_none():
    result = timely.note_once.enqueue()
    testing.drain()
    assert all_rows() == [(1, 1.0, 4.0, "")]

    result.refresh()
    assert result.progress is None


def test_progress_is_deleted_with_its_job():
    result = drained(timely.note.enqueue(1))

    assert direct.erase([result.id]) == 1
    assert not Progress.objects.exists()


class TestBadInput:
    @pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, MOST + 1])
    @pytest.mark.parametrize("name", ["done", "total"])
    def test_number_out_of_range_is_refused(self, name, value):
        with pytest.raises(
            ValueError,
            match=rf"progress\(\): {name}=.* is not a number from 0 to 9,007,199,254,740,992",
        ):
            ProgressValue.of(**{"done": 1, name: value})

    @pytest.mark.parametrize("value", ["3", True, [1], 1j])
    def test_non_number_is_refused(self, value):
        with pytest.raises(TypeError, match=r"progress\(\): done=.* is not a number\. Count steps"):
            ProgressValue.of(value)

    def test_non_text_note_is_refused(self):
        with pytest.raises(TypeError, match=r"note=3 is not text"):
            ProgressValue.of(1, 2, 3)

    def test_bad_progress_fails_the_attempt(self):
        drained(timely.note_badly.enqueue("nan"))

        assert Execution.objects.get().error_type == "builtins.ValueError"
        assert not Progress.objects.exists()

    def test_note_is_cleaned_and_truncated(self):
        result = drained(timely.note_badly.enqueue(1))
        job = Job.objects.get(pk=result.id)
        noted = ProgressValue.of(1, 2, "a \x00 and a \ud800" + "x" * 500)

        Progress.objects.write([(job, noted)])

        assert len(noted.note) == 200
        assert Progress.objects.get().note == noted.note
        assert noted.note.startswith("a \ufffd and a \\ud800xx")

    @pytest.mark.parametrize(
        ("given", "fraction"),
        [
            ((1,), None),
            ((1, 4), 0.25),
            ((5, 4), 1.0),
            ((0, 0), 1.0),
            ((0, 4), 0.0),
            ((0.5, 2), 0.25),
        ],
    )
    def test_fraction_is_between_zero_and_one_or_unknown(self, given, fraction):
        assert ProgressValue.of(*given).fraction == fraction


class TestFence:
    @pytest.fixture
    def running(self, claim):
        timely.note.enqueue(1)
        (job,) = claim()
        job.progress_value = ProgressValue.of(1, 2)
        return job

    def writer(self, *jobs):
        calls = [ThreadCall(job) for job in jobs]
        return ProgressWriter("default", WorkerServices(running=lambda: calls)), calls

    def test_progress_of_running_job_is_written(self, running):
        writer, (call,) = self.writer(running)

        writer.write()

        assert all_rows() == [(1, 1.0, 2.0, "")]
        assert call.reason is None

    def test_progress_is_written_once_a_second_if_changed(self, running, django_assert_num_queries):
        writer, _ = self.writer(running)
        writer.write()
        running.progress_value = ProgressValue.of(2, 2)

        with django_assert_num_queries(0):
            writer.write()
        writer._checked_at -= 2
        writer.write()
        assert all_rows() == [(1, 2.0, 2.0, "")]
        writer._checked_at -= 2
        with django_assert_num_queries(0):
            writer.write()

    @pytest.mark.parametrize("change", [{"attempt": 2}, {"state": "ready", "process": None}])
    def test_lost_job_writes_no_progress_and_is_interrupted(self, running, change):
        Job.objects.update(**change)
        writer, (call,) = self.writer(running)

        writer.write()

        assert all_rows() == []
        assert call.reason is JobLost

    def test_former_owner_does_not_overwrite_progress(self, running, claim):
        Job.objects.update(state="ready", process=None)
        (again,) = claim()
        again.progress_value = ProgressValue.of(1, 3, "the new one")
        self.writer(again)[0].write()

        writer, (late,) = self.writer(running)
        writer.write()
        direct.settle(
            [AttemptResult.of(running, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)]
        )

        assert all_rows() == [(2, 1.0, 3.0, "the new one")]
        assert late.reason is JobLost

    @pytest.mark.parametrize("error", [OperationalError("away"), DataError("refused")])
    def test_failed_progress_write_is_retried(self, running, monkeypatch, error, caplog):
        def refuse(*args):
            raise error

        writer, (call,) = self.writer(running)
        with monkeypatch.context() as patch:
            patch.setattr(ProgressQuerySet, "record", refuse)
            patch.setattr(
                "django_dbqueue.runtime.worker.progress_writer.discard", lambda alias: None
            )
            writer.write()
        assert (all_rows(), call.reason) == ([], None)
        assert "progress could not be written" in caplog.text

        writer._checked_at -= 2
        writer.write()
        assert all_rows() == [(1, 1.0, 2.0, "")]

    @needs_row_locks
    @pytest.mark.django_db(transaction=True)
    def test_locked_row_is_skipped_and_not_lost(self, running):
        writer, (call,) = self.writer(running)

        def write():
            writer.write()
            connection.close()

        with transaction.atomic():
            Job.objects.select_for_update().get()
            thread = threading.Thread(target=write)
            thread.start()
            thread.join(LONG)
            assert not thread.is_alive()

        assert (all_rows(), call.reason) == ([], None)
        writer._checked_at -= 2
        writer.write()
        assert all_rows() == [(1, 1.0, 2.0, "")]


@pytest.mark.django_db(transaction=True)
class TestThroughAWorker:
    @pytest.mark.parametrize("name", ["in a thread", "in a coroutine"])
    def test_progress_is_visible_during_and_after_the_run(self, worker, name):
        task = timely.note_until if name == "in a thread" else timely.note_until_async
        result = task.enqueue(name)
        worker()

        def progress():
            result.refresh()
            return result.progress

        first = until(progress)
        assert not result.is_finished
        if task is timely.note_until:
            until(lambda: progress().done > first.done + 10)
            assert progress().note == "on and on"
        Run.objects.create(job=name)

        result.wait(timeout=LONG)
        if task is timely.note_until:
            assert result.progress.done > first.done + 10
        else:
            assert (first, result.progress) == ((1, 3, ""), (3, 3, ""))

    @needs_row_locks
    def test_progress_of_atomic_task_is_visible_during_the_run(self, worker):
        result = timely.note_atomically.enqueue(seconds=60)
        worker()

        until(lambda: Progress.objects.filter(done=1, total=2).exists())

        assert Job.objects.get().state == "running"
        assert Job.objects.all().stop() == 1
        assert result.wait(timeout=LONG).progress == (1, 2, "half")

    def test_task_of_lost_job_is_interrupted(self, worker):
        timely.note_until.enqueue("never")
        worker()
        until(Progress.objects.exists)

        Job.objects.update(state="scheduled", process=None, run_after=now_plus(3600))

        until(lambda: Run.objects.filter(job="ended by JobLost").exists())
        assert Job.objects.get().state == "scheduled"
