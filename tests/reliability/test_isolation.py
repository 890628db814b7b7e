"""A project whose own transactions have a stricter isolation level than the default."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job

from .. import tasks
from ..conftest import log_of, until
from ..models import Run

vendor = connections["default"].vendor
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(120),
    pytest.mark.skipif(vendor == "sqlite", reason="SQLite's writers wait for each other."),
]

SETTINGS = """
from tests.settings import *

DATABASES["default"].setdefault("OPTIONS", {{}})["isolation_level"] = {level}
"""
LEVELS = {
    "postgresql": {"repeatable read": 3, "serializable": 4},
    "mysql": {"repeatable read": "'repeatable read'", "serializable": "'serializable'"},
}.get(vendor, {})


@pytest.mark.parametrize("level", LEVELS)
def test_serialization_conflicts_spend_no_attempt(level, runqueue, tmp_path):
    """The database rolls back some of the transactions; the result is as if each had run alone."""
    (tmp_path / "isolated_settings.py").write_text(SETTINGS.format(level=LEVELS[level]))
    Run.objects.create(job="0")
    for number in range(20):
        tasks.count_up.enqueue()
        tasks.ask_for_one_key.enqueue(number)

    child = runqueue(
        "--embedded",
        "--threads",
        "4",
        PYTHONPATH=str(tmp_path),
        DJANGO_SETTINGS_MODULE="isolated_settings",
    )

    until(lambda: not Job.objects.exclude(state__in=["failed", "successful"]).exists())
    assert Counter(Job.objects.values_list("state", flat=True)) == {"successful": 41}, log_of(child)
    assert Run.objects.get().job == "20"
    assert set(Execution.objects.values_list("outcome", flat=True)) <= {"successful", "interrupted"}
    assert not Job.objects.filter(failures__gt=0).exists()
    assert Job.objects.filter(key__isnull=False).count() == 1
