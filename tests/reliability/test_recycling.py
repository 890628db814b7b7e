"""Worker processes are replaced at a certain age or size; with real processes under load."""

from __future__ import annotations

import json
import re

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        connections["default"].vendor == "sqlite", reason="The load keeps SQLite's lock busy."
    ),
]

HOARDING = """
from django_dbqueue import task

hoard = []

@task
def keep(mb):
    hoard.append(bytearray(b"x") * (mb * 1024 * 1024))
"""


def finished(number):
    return lambda: Execution.objects.filter(outcome="successful").count() == number


def test_worker_processes_are_replaced_by_age_without_losing_a_job(runqueue):
    tasks.sleep.enqueue_many([(0.25,)] * 600)
    long = tasks.sleep.using(priority=100).enqueue(15)

    child = runqueue("--processes", "2", "--threads", "2", "--max-age", "10")

    until(finished(601))
    log = log_of(child)
    assert len(re.findall(r"worker \(pid \d+\) is \d+ s old \(max_age=10\); replacing it", log)) > 1
    assert Execution.objects.values("process").distinct().count() > 2
    assert Execution.objects.count() == 601
    assert long.wait(LONG).attempts == 1
    assert "lost" not in log


def test_worker_process_over_its_memory_limit_is_replaced(runqueue, tmp_path):
    (tmp_path / "hoarding.py").write_text(HOARDING)
    tasks.sleep.enqueue_many([(0.25,)] * 200)
    hoarder = Job.objects.create(task="hoarding.keep", queue="default", args=[400], priority=100)

    child = runqueue(
        *("--processes", "2", "--threads", "2", "--max-memory", "350"),
        PYTHONPATH=str(tmp_path),
        DBQUEUE_OPTIONS=json.dumps({"task_modules": ["hoarding"]}),
    )

    until(lambda: "(max_memory=350); replacing it" in log_of(child))
    until(finished(201))
    guilty = Execution.objects.get(job=hoarder).process
    until(lambda: not Process.objects.filter(name=guilty).exists())
    assert log_of(child).count("(max_memory=350)") == 1
    assert Execution.objects.count() == 201


def test_memory_limit_under_the_size_of_a_new_process_is_reported(runqueue):
    tasks.sleep.enqueue_many([(0.25,)] * 100)

    child = runqueue("--threads", "2", "--max-memory", "1")

    until(finished(100))
    log = log_of(child)
    assert "after its start: raise max_memory (max_memory=1); replacing it" in log
    # One at a time, and not before each has worked for a while.
    assert log.count("replacing it") <= 4


def test_group_has_its_own_age(runqueue):
    groups = [{"queues": "short", "max_age": 10}, {"queues": "*"}]
    child = runqueue(DBQUEUE_OPTIONS=json.dumps({"workers": groups}))
    first = until(
        lambda: (
            found
            if len(
                found := {
                    p.name: p.details["queues"] for p in Process.objects.filter(kind="worker")
                }
            )
            == 2
            else None
        )
    )

    until(lambda: "replacing it" in log_of(child))

    (old,) = [name for name, queues in first.items() if queues == "short"]
    (kept,) = [name for name, queues in first.items() if queues == "*"]
    until(lambda: not Process.objects.filter(name=old).exists())
    assert Process.objects.filter(name=kept).exists()
