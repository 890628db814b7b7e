"""Rows that were inserted by hand, with what the package itself would never write."""

from __future__ import annotations

import pytest
from django.db import connection

from django_dbqueue.models import Job
from django_dbqueue.testing import drain

from . import tasks

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "values",
    [
        {"args": {"a": 1}},
        {"args": "ab"},
        {"args": 7},
        {"kwargs": [1]},
        {"kwargs": "b"},
        {"kwargs": 7},
        {"pipeline": "x", "stage": 0},
        {"pipeline": [], "stage": 3},
        {"metadata": [1]},
    ],
    ids=str,
)
def test_job_whose_documents_have_another_shape_does_not_stop_its_lane(values):
    by_hand = Job.objects.create(task="tests.tasks.add", queue="default", **{"args": [1], **values})
    behind = tasks.add.enqueue(1)

    drain()

    behind.refresh()
    assert behind.return_value == 1
    by_hand.refresh_from_db()
    assert by_hand.state in ("failed", "successful")
