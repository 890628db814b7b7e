"""The page of the database: findings, sizes and the forecast."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from django_dbqueue.core.counts import Counts
from django_dbqueue.core.options import DAY, Options
from django_dbqueue.doctor.database import QueueDatabase
from django_dbqueue.doctor.finding import Finding, NotChecked, Severity
from django_dbqueue.doctor.size import TableSize, forecast, sizes
from django_dbqueue.models import Execution, Job, Process, Statistic

from .conftest import a_client, a_process

PAGE = "/admin/dbqueue/databasehealth/"
pytestmark = pytest.mark.django_db


def visible(response: Any) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.text))


def test_findings_are_shown_with_what_to_do(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        ("vacuum", Finding("Dead <rows>.", "Slow.", "VACUUM;")),
        ("processes", Finding("No runqueue.", "No job runs.", "runqueue", Severity.CRITICAL)),
        ("innodb", NotChecked("Not visible.", "GRANT PROCESS;")),
    ]
    monkeypatch.setattr("django_dbqueue.admin.database.examine", lambda database: iter(results))

    page = viewer.get(PAGE)
    text = visible(page)

    assert "2 problems, of which critical: 1." in text
    assert text.index("No runqueue.") < text.index("Dead &lt;rows&gt;.")
    assert "VACUUM;" in text and "Not visible. GRANT PROCESS;" in text
    # Only findings of the queue have a page of their own.
    assert page.text.count('<p><a href="/admin/dbqueue/process/"><strong>') == 1


def test_real_checks_run(viewer: Client) -> None:
    a_process("worker@here:1:abc", details={"queues": "*"})
    a_process("dispatcher@here:1:abc", kind=Process.Kind.DISPATCHER)

    text = visible(viewer.get(PAGE))

    assert "problem" in text
    assert connection.display_name in text
    assert "This check failed" not in text


def test_page_needs_the_permission_to_view_processes(db: Any) -> None:
    assert a_client("other", ["view_job"]).get(PAGE).status_code == 403
    assert a_client("operator of processes", ["view_process"]).get(PAGE).status_code == 200
    assert Client().get(PAGE).status_code == 302


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite does not tell the sizes.")
def test_sizes_of_all_tables_are_shown(viewer: Client, backend: Any) -> None:
    found = sizes(QueueDatabase(backend.database, (backend,)))

    named = {each.name.rpartition(".")[2] for each in found}
    assert {Job._meta.db_table, Execution._meta.db_table, Statistic._meta.db_table} <= named
    assert all(each.size > 0 for each in found)
    assert [each.size for each in found] == sorted((each.size for each in found), reverse=True)
    assert Job._meta.db_table in visible(viewer.get(PAGE))


class TestForecast:
    TABLES = (
        TableSize("public.dbqueue_job", 6_000_000, 10_000),
        TableSize("dbqueue_execution", 4_000_000, 9),
    )

    def counted(self, **counts: int) -> None:
        for days in range(7):
            start = timezone.now() - timedelta(days=days, hours=1)
            row = Statistic(period="hour", start=start, queue="q", task="t")
            row.counts = Counts(**counts)
            row.save()

    def of(self, backend: Any, tables: Any = TABLES, **options: Any) -> Any:
        kept = {"keep_successful": 7 * DAY, "keep_failed": 90 * DAY, **options}
        database = QueueDatabase(backend.database, (backend,))
        return forecast(database, list(tables), Options(**kept))

    def test_rate_of_the_week_and_retention_give_the_size(self, backend: Any) -> None:
        # Each tenth job fails for good; and others fail, and succeed at the next attempt.
        self.counted(enqueued=1000, runs=1300, retries=300, failures=400)

        found = self.of(backend)

        # 900 a day are kept for seven days, and 100 for ninety; a job takes 1,000 bytes.
        assert found.jobs_a_day == pytest.approx(1000, rel=0.2)
        assert found.jobs == pytest.approx(found.jobs_a_day * (0.9 * 7 + 0.1 * 90))
        assert found.size == pytest.approx(found.jobs * 1000)
        gone = self.of(backend, delete_on_success=True)
        assert gone.jobs == pytest.approx(found.jobs_a_day * 0.1 * 90)

    def test_unknown_without_enough_jobs_or_retention(self, backend: Any) -> None:
        few = (TableSize("dbqueue_job", 6000, 10), self.TABLES[1])
        assert self.of(backend, few) is None
        assert self.of(backend, []) is None
        assert self.of(backend, keep_failed=None) is None
        assert self.of(backend) is None
        self.counted(runs=1)
        assert self.of(backend).jobs == 0

    def test_page_says_it(self, viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted(enqueued=1000)
        monkeypatch.setattr("django_dbqueue.admin.database.sizes", lambda of: list(self.TABLES))

        text = visible(viewer.get(PAGE))

        assert re.search(r"with 1,\d+ jobs a day, the retention keeps about [78],\d+ jobs", text)
        assert "9.5" in text
