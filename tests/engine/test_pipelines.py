"""Pipelines: one job passes through several tasks."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_dbqueue import pipeline
from django_dbqueue.compat import InvalidTask, signals, task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.enums import Lane
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.settler import Settler
from django_dbqueue.runtime.worker.task_call import ThreadCall
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import LONG, a_process, until
from ..tasks import add, brew, charge, fail, grind, nothing, pour, sort_out, taste

pytestmark = pytest.mark.django_db(transaction=True)
State = Job.State
coffee = pipeline(grind, brew.using(queue_name="slow", priority=5), pour)


def the_job() -> Job:
    return Job.objects.get()


def drain_one() -> int:
    """Run one stage."""
    (lane,) = Job.objects.lanes()
    jobs = direct.claim(lane, a_process(f"worker {Execution.objects.count()}"), 1)
    for job in jobs:
        direct.settle([executor.run(ThreadCall(job), task_backends["default"])])
    return len(jobs)


def _stages():
    while True:
        yield the_job()
        if not drain_one() or the_job().state == State.SUCCESSFUL:
            return


def test_stage_gets_result_of_previous_stage():
    result = coffee.enqueue("arabica")

    assert drain() == 3

    result.refresh()
    assert result.return_value == "poured brewed ground arabica"
    assert Job.objects.count() == 1


def test_each_stage_has_its_own_queue_priority_and_options():
    coffee.enqueue("arabica")
    seen = [(job.task, job.queue, job.priority, job.max_attempts) for job in _stages()]

    assert seen == [
        ("tests.tasks.grind", "default", 0, 1),
        ("tests.tasks.brew", "slow", 5, 3),
        ("tests.tasks.pour", "default", 0, 1),
    ]


def test_advancing_a_stage_takes_two_updates(claim):
    coffee.enqueue("arabica")
    (job,) = claim()
    outcome = executor.run(ThreadCall(job), task_backends["default"])

    with CaptureQueriesContext(connection) as captured:
        direct.settle([outcome])

    assert sum(query["sql"].startswith("UPDATE") for query in captured) == 2
    assert (the_job().state, the_job().stage, the_job().args) == (
        State.READY,
        1,
        ["ground arabica"],
    )


def test_executions_record_every_stage():
    coffee.enqueue("arabica")
    drain()

    assert list(
        Execution.objects.order_by("attempt").values_list("attempt", "stage", "outcome")
    ) == [
        (1, 0, "successful"),
        (2, 1, "successful"),
        (3, 2, "successful"),
    ]


def test_retry_resumes_at_failed_stage():
    pipeline(grind, fail, pour).enqueue("arabica")
    drain()
    assert (the_job().state, the_job().stage) == (State.FAILED, 1)

    Job.objects.filter(task=fail.module_path).update(task=brew.module_path)
    Job.objects.all().retry()
    drain()

    assert (the_job().state, the_job().result) == (State.SUCCESSFUL, "poured brewed ground arabica")


def test_stage_starts_with_fresh_attempts():
    counted = pipeline(grind, taste)
    counted.enqueue("arabica")
    drain()

    assert the_job().result == {"attempt": 1, "stage": 1}


def test_task_finished_is_sent_only_for_last_stage():
    ends = []
    signals.task_finished.connect(
        note := lambda sender, task_result, **rest: ends.append(task_result.task.module_path)
    )
    coffee.enqueue("arabica")
    drain()
    signals.task_finished.disconnect(note)

    assert ends == ["tests.tasks.pour"]


def test_finish_ends_the_job():
    pipeline(sort_out, brew, pour).enqueue("finish")
    drain()

    assert (the_job().state, the_job().result, the_job().stage) == (State.SUCCESSFUL, "finished", 0)


def test_goto_jumps_to_named_stage():
    pipeline(sort_out, brew, pour).enqueue("go to")
    drain()

    assert (the_job().result, the_job().attempt) == ("poured straight", 2)


def test_goto_returns_to_earlier_stage():
    pipeline(grind, sort_out, pour).enqueue("again")
    drain()

    assert the_job().result == "poured ground once more"
    assert list(Execution.objects.order_by("attempt").values_list("stage", flat=True)) == [
        0,
        1,
        0,
        1,
        2,
    ]


def test_fan_out_creates_child_jobs():
    result = pipeline(sort_out, brew, pour).enqueue("fan out")
    drain()

    result.refresh()
    children = Job.objects.exclude(pk=result.id)
    assert sorted(str(pk) for pk in children.values_list("pk", flat=True)) == sorted(
        result.return_value
    )
    assert sorted(children.values_list("result", flat=True)) == [
        "poured brewed a",
        "poured brewed b",
    ]


def test_goto_unknown_stage_fails_the_job():
    pipeline(sort_out, brew).enqueue("go to")
    drain()

    assert the_job().state == State.FAILED
    said = "returned GoTo('tests.tasks.pour'), which is no stage of its pipeline: tests.tasks.sort_out, tests.tasks.brew."
    assert said in Execution.objects.get().message


def test_fan_out_in_last_stage_fails():
    pipeline(sort_out).enqueue("fan out")
    drain()

    assert "is the last stage of its pipeline." in Execution.objects.get().message


def test_reenqueued_pipeline_restarts_at_first_stage():
    keyed = coffee.using(key="cup")
    keyed.enqueue("arabica")
    drain_one()
    drain_one()
    assert the_job().stage == 2

    assert keyed.enqueue("robusta").enqueued == "merged"
    drain()

    assert (the_job().result, Job.objects.count()) == ("poured brewed ground robusta", 1)


def test_pipeline_reenqueued_during_stage_restarts_after_it(claim):
    keyed = coffee.using(key="cup")
    keyed.enqueue("arabica")
    (running,) = claim()
    keyed.enqueue("robusta")
    then = Job(task="tests.tasks.brew", queue="slow", args=["ground arabica"], stage=1)

    direct.settle([AttemptResult.of(running, Execution.Outcome.SUCCESSFUL, State.READY, then=then)])

    assert (the_job().state, the_job().stage, the_job().args) == (State.READY, 0, ["robusta"])
    drain()
    assert the_job().result == "poured brewed ground robusta"


def test_next_stage_refused_by_database_fails_the_attempt(claim):
    pipeline(sort_out, pour).enqueue("on")
    (job,) = claim()
    then = Job(task="tests.tasks.pour", queue="default", args=["on"], stage=1, priority=1000)
    settler = Settler("default", Options())

    settler.put(AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, State.READY, then=then))
    settler.start()

    until(lambda: the_job().state == State.FAILED)
    settler.close()
    settler.join(LONG)
    execution = Execution.objects.get()
    assert (execution.outcome, execution.stage, the_job().stage, the_job().failures) == (
        "failed",
        0,
        0,
        1,
    )
    assert execution.message.startswith("The database refused stage 1 of the pipeline: ")
    assert execution.failure_id


@pytest.mark.parametrize("name", ["x" * 101, "a,b", "-a", " a", "a*", ""])
def test_invalid_queue_name_is_refused_at_enqueue(name):
    with pytest.raises(InvalidTask, match="is not a queue"):
        nothing.using(queue_name=name).enqueue()
    with pytest.raises(InvalidTask, match="is not a queue"):
        pipeline(sort_out, pour.using(queue_name=name)).enqueue("on")


@pytest.mark.parametrize("what", ["on", "fan out"])
def test_lost_attempt_does_not_advance_the_job(claim, what):
    pipeline(sort_out, pour).enqueue(what)
    (late,) = claim()
    outcome = executor.run(ThreadCall(late), task_backends["default"])
    direct.release([late])
    claim(a_process("another"))

    settled = direct.settle([outcome])

    assert settled.lost == [outcome]
    assert (the_job().state, the_job().stage, the_job().attempt) == (State.RUNNING, 0, 2)


def test_later_stage_expires_with_the_call():
    coffee.using(expires=timedelta(hours=1)).enqueue("arabica")
    expires_at = the_job().expires_at
    drain_one()
    assert (the_job().stage, the_job().expires_at) == (1, expires_at)
    Job.objects.update(expires_at=now_plus(-1))

    drain_one()

    assert (the_job().stage, the_job().state) == (1, State.DISCARDED)


def test_children_of_fan_out_expire_with_the_call():
    pipeline(sort_out, brew).using(expires=timedelta(hours=1)).enqueue("fan out")
    expires_at = the_job().expires_at

    drain_one()

    children = Job.objects.filter(stage=1)
    assert [job.expires_at for job in children] == [expires_at, expires_at]


def test_stage_keeps_its_limits():
    pipeline(grind, charge).enqueue("arabica")
    drain_one()

    assert the_job().limits == [
        {"key": "tests.tasks.charge account=ground arabica", "max_running": 2, "discard": False}
    ]


def test_stage_joins_the_line_of_its_limit_at_once():
    """Otherwise a worker claims it in vain, reads its arguments, and makes it wait."""
    charge.enqueue_many([("ground arabica",)] * 3)
    direct.claim(Lane("default", 0), a_process("busy"), 3)
    assert Job.objects.filter(state=State.BLOCKED).count() == 1
    pipelined = pipeline(grind, charge)
    first, other = pipelined.enqueue("arabica"), pipelined.enqueue("robusta")

    for _ in range(2):
        drain_one()

    stages = {str(job.pk): (job.stage, job.state, job.blocked_by) for job in Job.objects.all()}
    assert stages[first.id] == (1, State.BLOCKED, "tests.tasks.charge account=ground arabica")
    assert stages[other.id] == (1, State.READY, None)


def test_repeated_settlement_asks_again_whether_others_wait(claim):
    charge.enqueue_many([("ground arabica",)] * 3)
    busy = direct.claim(Lane("default", 0), a_process("busy"), 3)
    pipeline(grind, charge).enqueue("arabica")
    (job,) = claim()
    end = executor.run(ThreadCall(job), task_backends["default"])
    with transaction.atomic():
        direct.settle([end])
        assert Job.objects.get(pk=job.pk).state == State.BLOCKED
        transaction.set_rollback(True)
    Job.objects.filter(state=State.BLOCKED).delete()

    direct.settle([end])

    assert len(busy) == 2
    assert Job.objects.get(pk=job.pk).state == State.READY


def test_workers_run_all_stages(worker):
    coffee.enqueue_many([(str(number),) for number in range(20)])
    worker()
    worker()

    until(lambda: Job.objects.filter(state=State.SUCCESSFUL).count() == 20)

    assert Execution.objects.count() == 60


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((), "A pipeline needs stages: pipeline(fetch, parse, index)."),
        ((grind, len), "is not a task, and cannot be a stage. Decorate it with @task."),
        (
            (grind, nothing),
            "tests.tasks.nothing gets one argument, the return value of the stage before it: too many positional",
        ),
        (
            (grind, add.using(backend="other")),
            "has the backend 'other', but the first stage has 'default'",
        ),
        (
            (grind, brew.using(expires=timedelta(hours=1))),
            "Leave expires of the later stage tests.tasks.brew out, and give it to the pipeline",
        ),
        *(
            (
                (grind, brew.using(**{name: value})),
                f"{name} of the later stage tests.tasks.brew is a setting of the whole job. "
                f"Give it to the pipeline: pipeline(...).using({name}=...).",
            )
            for name, value in {
                "key": "cup 1",
                "metadata": {"cup": 1},
                "enqueue": "in_transaction",
            }.items()
        ),
    ],
)
def test_invalid_stages_are_refused(stages, said):
    with pytest.raises(InvalidTask) as caught:
        pipeline(*stages)
    assert said in str(caught.value)


def test_stage_option_on_pipeline_is_refused():
    with pytest.raises(
        TypeError, match=r"'queue_name' is a setting of a stage\. Give it to the stage"
    ):
        coffee.using(queue_name="slow")


def test_finish_outside_pipeline_fails_the_job(claim):
    sort_out.enqueue("finish")
    drain()

    assert the_job().state == State.FAILED
