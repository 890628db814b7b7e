"""On SQLite, transactions begin as writers: one that begins as a reader fails if another writes first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_dbqueue import batch
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
from django_dbqueue.testing import drain

from .. import direct, tasks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Other databases wait for row locks.",
    ),
]


def call_in_a_batch():
    with batch():
        tasks.add.enqueue(1)


def run_an_atomic_task():
    tasks.atomic_row.enqueue("a")
    drain()


CHANGES = {
    "retry": lambda: Job.objects.retry(),
    "discard": lambda: Job.objects.discard(),
    "move": lambda: Job.objects.move("mail"),
    "reprioritise": lambda: Job.objects.reprioritise(7),
    "call in a batch": call_in_a_batch,
    "call of a key": lambda: tasks.add.using(key="one").enqueue(1),
    "calls of keys": lambda: tasks.add.using(key="one").enqueue_many([(1,), (2,)]),
    "dispatch": lambda: direct.dispatch(),
    "claim, run, settle": drain,
    "atomic task": run_an_atomic_task,
}


@pytest.fixture
def new_project():
    """A connection as Django makes it without ``transaction_mode``."""
    connection.ensure_connection()  # It sets the mode.
    usual, connection.transaction_mode = connection.transaction_mode, None
    yield
    assert connection.transaction_mode is None
    connection.transaction_mode = usual


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_transaction_waits_for_other_writers_before_it_reads(change, claim, new_project):
    tasks.add.enqueue_many([(number,) for number in range(3)])
    direct.settle(
        [
            AttemptResult.of(job, Execution.Outcome.FAILED, Job.State.FAILED)
            for job in claim(limit=1)
        ]
    )
    tasks.add.enqueue(1)

    with CaptureQueriesContext(connection) as queries:
        change()

    statements = [query["sql"] for query in queries]
    assert "BEGIN IMMEDIATE" in statements
    # A transaction that begins with a write waits at that write.
    assert not [
        second
        for first, second in pairwise(statements)
        if first == "BEGIN" and second.startswith("SELECT")
    ]
