"""One job that walks through several tasks."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_dbqueue import pipeline
from django_dbqueue.compat import InvalidTask, signals, task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
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
    """One stage."""
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


def test_each_stage_gets_what_the_one_before_it_returned():
    result = coffee.enqueue("arabica")

    assert drain() == 3

    result.refresh()
    assert result.return_value == "poured brewed ground arabica"
    assert Job.objects.count() == 1


def test_each_stage_has_its_own_queue_priority_and_policy():
    coffee.enqueue("arabica")
    seen = [(job.task, job.queue, job.priority, job.max_attempts) for job in _stages()]

    assert seen == [
        ("tests.tasks.grind", "default", 0, 1),
        ("tests.tasks.brew", "slow", 5, 3),
        ("tests.tasks.pour", "default", 0, 1),
    ]


def test_moving_on_is_one_update_and_one_for_the_arguments(claim):
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


def test_the_history_shows_every_stage():
    coffee.enqueue("arabica")
    drain()

    assert list(
        Execution.objects.order_by("attempt").values_list("attempt", "stage", "outcome")
    ) == [
        (1, 0, "successful"),
        (2, 1, "successful"),
        (3, 2, "successful"),
    ]


def test_a_retry_goes_on_at_the_stage_that_failed():
    pipeline(grind, fail, pour).enqueue("arabica")
    drain()
    assert (the_job().state, the_job().stage) == (State.FAILED, 1)

    Job.objects.filter(task=fail.module_path).update(task=brew.module_path)
    Job.objects.all().retry()
    drain()

    assert (the_job().state, the_job().result) == (State.SUCCESSFUL, "poured brewed ground arabica")


def test_a_stage_begins_with_attempts_of_its_own():
    counted = pipeline(grind, taste)
    counted.enqueue("arabica")
    drain()

    assert the_job().result == {"attempt": 1, "stage": 1}


def test_only_the_end_of_the_last_stage_is_announced():
    ends = []
    signals.task_finished.connect(
        note := lambda sender, task_result, **rest: ends.append(task_result.task.module_path)
    )
    coffee.enqueue("arabica")
    drain()
    signals.task_finished.disconnect(note)

    assert ends == ["tests.tasks.pour"]


def test_a_stage_may_end_the_job():
    pipeline(sort_out, brew, pour).enqueue("finish")
    drain()

    assert (the_job().state, the_job().result, the_job().stage) == (State.SUCCESSFUL, "finished", 0)


def test_a_stage_may_name_the_next_one():
    pipeline(sort_out, brew, pour).enqueue("go to")
    drain()

    assert (the_job().result, the_job().attempt) == ("poured straight", 2)


def test_a_stage_may_go_back():
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


def test_a_stage_may_fan_out():
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


def test_a_stage_that_names_what_is_no_stage_has_failed():
    pipeline(sort_out, brew).enqueue("go to")
    drain()

    assert the_job().state == State.FAILED
    said = "returned GoTo('tests.tasks.pour'), which is no stage of its pipeline: tests.tasks.sort_out, tests.tasks.brew."
    assert said in Execution.objects.get().message


def test_the_last_stage_cannot_fan_out():
    pipeline(sort_out).enqueue("fan out")
    drain()

    assert (
        "is the last stage of its pipeline: there is no way on." in Execution.objects.get().message
    )


def test_what_is_asked_for_again_begins_at_the_first_stage():
    keyed = coffee.using(key="cup")
    keyed.enqueue("arabica")
    drain_one()
    drain_one()
    assert the_job().stage == 2

    assert keyed.enqueue("robusta").enqueued == "merged"
    drain()

    assert (the_job().result, Job.objects.count()) == ("poured brewed ground robusta", 1)


def test_one_that_is_asked_for_again_while_a_stage_runs_begins_anew_after_it(claim):
    keyed = coffee.using(key="cup")
    keyed.enqueue("arabica")
    (running,) = claim()
    keyed.enqueue("robusta")
    then = Job(task="tests.tasks.brew", queue="slow", args=["ground arabica"], stage=1)

    direct.settle([AttemptResult.of(running, Execution.Outcome.SUCCESSFUL, State.READY, then=then)])

    assert (the_job().state, the_job().stage, the_job().args) == (State.READY, 0, ["robusta"])
    drain()
    assert the_job().result == "poured brewed ground robusta"


def test_a_next_stage_that_the_database_refuses_is_one_failed_attempt(claim):
    pipeline(sort_out, pour).enqueue("on")
    (job,) = claim()
    then = Job(task="tests.tasks.pour", queue="default", args=["on"], stage=1, priority=1000)
    settler = Settler("default", Options(), lambda: True)

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
def test_a_queue_that_no_database_could_hold_is_refused_where_it_is_enqueued(name):
    with pytest.raises(InvalidTask, match="is not a queue"):
        nothing.using(queue_name=name).enqueue()
    with pytest.raises(InvalidTask, match="is not a queue"):
        pipeline(sort_out, pour.using(queue_name=name)).enqueue("on")


@pytest.mark.parametrize("what", ["on", "fan out"])
def test_who_has_lost_a_job_moves_it_nowhere(claim, what):
    pipeline(sort_out, pour).enqueue(what)
    (late,) = claim()
    outcome = executor.run(ThreadCall(late), task_backends["default"])
    direct.release([late])
    claim(a_process("another"))

    settled = direct.settle([outcome])

    assert settled.lost == [outcome]
    assert (the_job().state, the_job().stage, the_job().attempt) == (State.RUNNING, 0, 2)


def test_a_stage_keeps_its_limits():
    pipeline(grind, charge).enqueue("arabica")
    drain_one()

    assert the_job().limits == [
        {"key": "tests.tasks.charge account=ground arabica", "most": 2, "discard": False}
    ]


def test_real_workers_walk_it(worker):
    coffee.enqueue_many([(str(number),) for number in range(20)])
    worker()
    worker()

    until(lambda: Job.objects.filter(state=State.SUCCESSFUL).count() == 20)

    assert Execution.objects.count() == 60


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((), "A pipeline needs stages: pipeline(fetch, parse, index)."),
        ((grind, len), "is no task, and cannot be a stage. Decorate it with @task."),
        (
            (grind, nothing),
            "tests.tasks.nothing gets one argument, what the stage before it returned: too many positional",
        ),
        ((grind, add.using(backend="other")), "is of the backend 'other', and the first stage"),
    ],
)
def test_what_cannot_be_walked_through_is_refused(stages, said):
    with pytest.raises(InvalidTask) as caught:
        pipeline(*stages)
    assert said in str(caught.value)


def test_what_is_a_stages_is_refused_for_the_pipeline():
    with pytest.raises(TypeError, match="'queue_name' is a stage's: give it to the stage"):
        coffee.using(queue_name="slow")


def test_outside_a_pipeline_there_is_no_way(claim):
    sort_out.enqueue("finish")
    drain()

    assert the_job().state == State.FAILED
