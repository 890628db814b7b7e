"""``OPTIONS["workers"]``: groups of workers under one supervisor; with real processes."""

from __future__ import annotations

import json
import re

import pytest

from django_dbqueue.models import Execution, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

GROUPS = [{"queues": "mail*", "threads": 3, "processes": 2}, {"queues": ["reports"], "threads": 1}]


@pytest.fixture
def start(runqueue):
    def start(*arguments, workers=GROUPS, **options):
        options = json.dumps({"workers": workers, **options})
        return runqueue(*arguments, DBQUEUE_OPTIONS=options)

    return start


def enqueue(*queues, number=10):
    for queue in queues:
        tasks.sleep.using(queue_name=queue).enqueue_many([(0.05,)] * number)


def served(child):
    """The queues and threads of each worker, by its name, as its first line says."""
    found = re.findall(r"(worker@\S+) serves (.+) with (\d+) threads", log_of(child))
    return {name: (queues, int(threads)) for name, queues, threads in found}


@pytest.mark.parametrize("how", [[], ["--embedded"]])
def test_queue_is_served_by_the_workers_of_its_group_only(start, how):
    enqueue("mail-in", "mail-out", "reports", "others")

    child = start("--drain", *how)

    assert child.wait(LONG) == 0, log_of(child)
    workers = served(child)
    expected = 1 if how else 2
    assert sorted(workers.values()) == [("mail*", 3)] * expected + [("reports", 1)]
    for job, process in Execution.objects.values_list("job__queue", "process"):
        queues, _threads = workers[process]
        assert job == queues or (queues == "mail*" and job.startswith("mail"))
    assert Job.objects.filter(state="successful").count() == 30
    assert Job.objects.filter(state="ready", queue="others").count() == 10


def test_drain_waits_for_the_queues_of_all_groups(start):
    tasks.tell_and_sleep.using(queue_name="reports").enqueue(3)
    enqueue("mail-in", number=1)

    child = start("--drain")

    assert child.wait(LONG) == 0, log_of(child)
    assert not Job.objects.exclude(state="successful").exists()


def test_drain_reports_failure_in_the_last_group(start):
    tasks.fail.using(queue_name="reports").enqueue()

    child = start("--drain")

    assert child.wait(LONG) == 1, log_of(child)


def test_dead_worker_is_replaced_by_one_of_its_group(start):
    child = start()
    until(lambda: len(served(child)) == 3)
    killer = tasks.die.using(queue_name="reports", max_attempts=1).enqueue()

    until(lambda: Execution.objects.filter(job=killer.id, outcome="lost").exists())

    until(lambda: len(served(child)) == 4)
    assert sorted(served(child).values()) == [("mail*", 3)] * 2 + [("reports", 1)] * 2
    until(lambda: Process.objects.filter(kind="worker").count() == 3)


def test_group_takes_options_that_it_does_not_name_from_the_backend(start):
    child = start(workers=[{"queues": "mail"}, {"threads": 2}], threads=5, queues=["reports"])

    until(lambda: len(served(child)) == 2)

    assert sorted(served(child).values()) == [("mail", 5), ("reports", 2)]


def test_queues_on_the_command_line_replace_the_groups(start):
    child = start("--queues", "others", threads=4)

    until(lambda: served(child))
    until(lambda: Process.objects.filter(kind="dispatcher").exists())

    assert list(served(child).values()) == [("others", 4)]
    assert "runs 1 worker, 1 dispatcher, each in a process of its own, for the queues others" in (
        log_of(child)
    )


def test_other_flags_apply_to_each_group(start):
    child = start("--threads", "2", "--processes", "1")

    until(lambda: len(served(child)) == 2)
    until(lambda: Process.objects.filter(kind="dispatcher").exists())

    assert sorted(served(child).values()) == [("mail*", 2), ("reports", 2)]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([{"thread": 1}], "workers[0]: 'thread' is not an option. Did you mean 'threads'?"),
        ([{}, {"queues": "a*b"}], "'a*b' is not a queue pattern"),
        ("mail", "workers='mail' is not a list of dicts"),
    ],
)
def test_invalid_groups_are_named_with_their_remedy(start, workers, message):
    child = start(workers=workers)

    assert child.wait(LONG) == 1
    assert message in log_of(child)
    assert "Traceback" not in log_of(child)
