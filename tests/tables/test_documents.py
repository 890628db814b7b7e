"""JSON columns: what is stored comes back, and is compared as JSON on every database."""

from __future__ import annotations

import pytest
from django.db.models import Exists, F, OuterRef, Subquery

from django_dbqueue.models import Job

from .. import tasks

pytestmark = pytest.mark.django_db


def test_numbers_come_back_unchanged():
    numbers = [2**64 + 1, -(2**900), 10**18, 0.1, -0.0, 5e-324, 1.0, 1e16]
    Job.objects.create(task="t", queue="q", args=numbers)

    assert Job.objects.get().args == numbers


def test_documents_are_compared_with_values_columns_and_queries():
    tasks.echo.enqueue_many([([1, "é"],), ([1, "é"],), ({"b": 1, "a": 2},)])
    rows, first = Job.objects.all(), Job.objects.filter(task="tests.tasks.echo").order_by("pk")
    same = rows.filter(args=OuterRef("args")).exclude(pk=OuterRef("pk"))

    assert rows.filter(args=[[1, "é"]]).count() == 2
    assert rows.filter(args=[{"b": 1, "a": 2}]).count() == 1
    assert rows.filter(args=F("args")).count() == 3
    assert rows.filter(Exists(same)).count() == 2
    assert rows.filter(args=Subquery(first.values("args")[:1])).count() == 2
    assert rows.exclude(args=Subquery(first.values("args")[:1])).count() == 1
    assert rows.filter(args__0__a=2).count() == 1
