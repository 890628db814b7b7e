"""Frequent statements stay cheap with many rows: each uses its own index."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbqueue.admin import sources, windows
from django_dbqueue.compat import task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Batch, Job, Queue
from django_dbqueue.models.enums import Lane, State
from django_dbqueue.models.expressions import Among
from django_dbqueue.models.locking import lock
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.claimer import Claimer

from .. import direct
from ..conftest import a_process
from ..flush import flush

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def many_rows(django_db_setup, django_db_blocker):
    """Ready jobs in a served and an unserved queue, scheduled jobs and a long history; tests do not change them.

    Return the sizes of the job table's indexes, in bytes.
    """
    with django_db_blocker.unblock():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                # The rows of earlier tests have left pages behind.
                cursor.execute("REINDEX TABLE dbqueue_job")
        fill()
        yield sizes_of_indexes()
        flush("default")
        connection.close()


def sizes_of_indexes() -> dict[str, int]:
    if connection.vendor != "postgresql":
        return {}
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexrelname, pg_relation_size(indexrelid) FROM pg_stat_user_indexes WHERE relname = 'dbqueue_job'"
        )
        return dict(cursor.fetchall())


def fill() -> None:
    now = timezone.now()
    # In the order of their lanes, as enqueued jobs are; the order of the others does not matter.
    Job.objects.bulk_create(
        [Job(task="t", queue="served", priority=n % 3) for n in range(3000)], batch_size=1000
    )
    others = [Job(task="t", queue="other", priority=n % 3) for n in range(96)]
    others += [
        Job(task="t", queue="served", state=State.SCHEDULED, run_after=now + timedelta(days=1))
        for _ in range(96)
    ]
    others += [
        Job(task="t", queue="served", state=State.SUCCESSFUL, attempt=1, finished_at=now)
        for _ in range(300)
    ]
    Job.objects.bulk_create(others)
    double(Job.objects.exclude(queue="served", state=State.READY), times=5)
    assert Job.objects.count() > 18_000
    analyze()


def analyze() -> None:
    """Update the job table's statistics; on MariaDB this commits the open transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"ANALYZE {'TABLE dbqueue_job' if connection.vendor == 'mysql' else 'dbqueue_job'}"
        )


def double(rows, times: int) -> None:
    """Double the number of these jobs ``times`` times."""
    new = {
        "postgresql": "gen_random_uuid()",
        "mysql": "UUID()",
        "sqlite": "lower(hex(randomblob(16)))",
    }[connection.vendor]
    if connection.vendor == "mysql" and not connection.features.has_native_uuid_field:
        new = "MD5(UUID())"
    columns = ", ".join(
        connection.ops.quote_name(field.column)
        for field in Job._meta.concrete_fields
        if not field.primary_key
    )
    sql, values = rows.values("pk").query.sql_with_params()
    with connection.cursor() as cursor:
        for _ in range(times):
            found = f"SELECT {new}, {columns} FROM dbqueue_job WHERE id IN ({sql})"
            cursor.execute(f"INSERT INTO dbqueue_job (id, {columns}) {found}", values)


def plan(rows) -> str:
    options = {"analyze": True, "buffers": True} if connection.vendor == "postgresql" else {}
    with transaction.atomic():
        return rows.explain(**options)


def explained(sql: str) -> str:
    prefix = {
        "postgresql": "EXPLAIN (ANALYZE, BUFFERS)",
        "mysql": "EXPLAIN",
        "sqlite": "EXPLAIN QUERY PLAN",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"{prefix} {sql}")
        return "\n".join(str(row) for row in cursor.fetchall())


def buffers(text: str) -> int:
    """Return the buffers of the whole execution, which PostgreSQL prints first, before those of planning."""
    return int(re.search(r"shared hit=(\d+)", text)[1])


def test_claim_reads_only_its_lane(many_rows):
    text = plan(
        lock(Job.objects.ready().filter(queue="served", priority=1).order_by("run_after", "id"))[
            :10
        ]
    )

    assert "dbqueue_job_lane" in text
    if connection.vendor == "postgresql":
        assert "Sort" not in text
        assert buffers(text) <= 60, text


@pytest.mark.skipif(
    connection.vendor != "postgresql", reason="Only PostgreSQL claims in one statement."
)
@pytest.mark.parametrize("plan_is", ["custom", "generic"])
def test_single_statement_claim_reads_only_its_lane(many_rows, process, plan_is):
    """PostgreSQL may use one generic plan for all limits."""
    claim = Claimer("default", process, QueueSelector(("*",)))._at_once(Lane("served", 1))
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL plan_cache_mode = force_{plan_is}_plan")
        cursor.execute(f"PREPARE claim AS {claim._sql % '$1'}")
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS) EXECUTE claim(10)")
        text = "\n".join(line for (line,) in cursor.fetchall())
        cursor.execute("DEALLOCATE claim")

    assert "dbqueue_job_lane" in text
    assert "Sort" not in text
    assert buffers(text) <= 300, text


@pytest.mark.parametrize("queues", [None, ["served"], ["served", "nowhere"]])
def test_lanes_are_read_from_their_index_by_one_statement(many_rows, queues):
    with CaptureQueriesContext(connection) as seen:
        assert len(Job.objects.lanes(queues)) == (6 if queues is None else 3)
    (query,) = seen
    text = explained(query["sql"])
    assert "dbqueue_job_lane" in text
    if connection.vendor == "postgresql":
        assert "Seq Scan" not in text
        assert buffers(text) <= 80, text


def test_due_jobs_use_the_due_index(many_rows):
    assert "dbqueue_job_due" in plan(lock(Job.objects.due().order_by("run_after"))[:100])


def test_queue_load_cost_is_bounded(many_rows, monkeypatch):
    for module in ("bounded_count", "queue"):
        monkeypatch.setattr(f"django_dbqueue.models.{module}.LIMIT", 100)

    with CaptureQueriesContext(connection) as seen:
        load = Queue.objects.load("served")

    assert (str(load.ready), str(load.scheduled), load.running) == ("100+", "100+", 0)
    # One query for the lanes, one for their oldest jobs, one for the counts.
    assert len(seen) <= 3
    for query in seen:
        text = explained(query["sql"])
        if connection.vendor == "postgresql":
            # Of three lanes, or of the ready jobs and three other states.
            assert buffers(text) <= (180 if "UNION ALL" in query["sql"] else 30), text
        else:
            assert "dbqueue_job_" in text, text


@pytest.mark.parametrize("state", ["ready", "scheduled"])
def test_clear_uses_indexes(many_rows, state):
    rows = Queue.objects.named("served").waiting()
    rows = (
        rows.ready().filter(queue="served", priority=1)
        if state == "ready"
        else rows.filter(state=state)
    )
    text = plan(rows.order_by("run_after").values_list("pk", "run_after")[:100])

    assert ("dbqueue_job_lane" if state == "ready" else "dbqueue_job_due") in text
    if connection.vendor == "postgresql":
        assert buffers(text) <= 150, text


def test_batch_completion_check_cost_is_bounded(many_rows):
    batch = Batch.objects.create(sealed_at=timezone.now())
    ended = {"batch": batch, "state": Job.State.SUCCESSFUL, "finished_at": timezone.now()}
    Job.objects.bulk_create([Job(task="t", queue="served", **ended) for _ in range(3000)])
    Job.objects.create(task="t", queue="served", batch=batch)

    text = plan(Batch.objects.due().filter(pk=batch.pk))

    assert direct.finish_batches([batch.pk]) == []
    assert "dbqueue_job_batch" in text
    if connection.vendor == "postgresql":
        assert buffers(text) <= 30, text
    if connection.vendor == "sqlite":
        assert "batch_id=? AND state=?" in text, text


def test_settlement_finds_jobs_by_primary_key(many_rows):
    keys = list(Job.objects.ready().values_list("pk", flat=True)[:50])
    text = plan(lock(Job.objects.filter(Among(keys)).order_by("pk")))

    assert "dbqueue_job_running" not in text
    assert re.search(r"dbqueue_job_pkey|PRIMARY|autoindex_dbqueue_job", text)


def test_idle_dispatcher_runs_one_query(many_rows, process):
    dispatcher = Dispatcher(task_backends["default"], Options(), SharedStatus.private())
    dispatcher._work()

    with CaptureQueriesContext(connection) as seen:
        dispatcher._work()

    assert len(seen) == 1, [query["sql"] for query in seen]
    text = explained(seen[0]["sql"])
    if connection.vendor == "postgresql":
        assert "Seq Scan on dbqueue_job" not in text
        assert buffers(text) <= 60, text


def test_orphans_use_the_running_index(many_rows):
    a_process("p")

    text = plan(Job.objects.orphaned()[:10])
    # MySQL may take another index that begins with the state.
    assert "dbqueue_job_running" in text or "dbqueue_job_lane (state='running')" in text, text


def test_filters_without_an_index_read_a_bounded_number_of_jobs(many_rows, monkeypatch):
    monkeypatch.setattr(sources, "MOST", 200)
    monkeypatch.setattr(windows, "SIZE", 200)
    rows = Job.objects.order_by("-pk")
    middle = rows[9000].pk
    window, older = windows.Window(None), windows.Window(middle)

    for found in (
        window.within(rows.filter(queue="none")),
        window.within(rows.filter(task="none", state="successful")),
        window.within(sources.jobs_from(rows, "command", "none")),
        older.within(rows.filter(queue="none", pk__lt=middle)),
        sources.jobs_from(rows, "job", str(middle)),
    ):
        for text in (plan(found[:50]), plan(found.values("pk")[:10_001])):
            if connection.vendor == "postgresql":
                assert "Seq Scan" not in text
                assert buffers(text) <= 350, text
            else:
                assert re.search(r"PRIMARY|autoindex_dbqueue_job", text), text
                assert "SCAN" not in text


def test_key_lookup_uses_the_key_index(many_rows):
    Job.objects.create(task="t", queue="served", key="t a")
    text = plan(Job.objects.filter(key__in=["t a", "t b"]).order_by("key"))

    assert "dbqueue_job_key" in text


@pytest.mark.skipif(
    connection.vendor != "postgresql",
    reason="Only PostgreSQL has partial indexes and reports their sizes.",
)
def test_key_index_excludes_jobs_without_keys(many_rows):
    assert max(many_rows["dbqueue_job_key"], many_rows["dbqueue_job_batch"]) <= 2 * 8192
