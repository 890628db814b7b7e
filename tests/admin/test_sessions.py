"""The PostgreSQL sessions of a hanged job, with a real worker and a real lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import Client
from django.urls import reverse

from django_dbqueue import task
from django_dbqueue.admin.sessions import without_literals
from django_dbqueue.models import Job, Queue, StackTrace
from django_dbqueue.runtime.connections import discard, of_this_thread, sessions

from ..conftest import until, until_a_lock_is_awaited
from .conftest import VIEW, a_client, a_job

on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL only.")


@task
def lock_the_queue(name: str) -> None:
    with transaction.atomic():
        Queue.objects.select_for_update().get(name=name)


@on_postgresql
@pytest.mark.django_db(transaction=True)
def test_page_of_hanged_job_shows_its_statement_and_who_blocks_it(
    worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.runtime.worker.watchdog.Watchdog._longest", lambda *_: 0.5)
    Queue.objects.create(name="secret-name")
    client = a_client("viewer", VIEW)
    with transaction.atomic():
        Queue.objects.select_for_update().get(name="secret-name")
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (blocker,) = cursor.fetchone()
        worker()
        job = _enqueued(lock_the_queue, "secret-name")
        until_a_lock_is_awaited()
        until(StackTrace.objects.filter(job=job).exists)

        page = client.get(reverse("admin:dbqueue_job_change", args=[job])).text

    assert "Lock: transactionid" in page or "Lock: tuple" in page
    assert "It is blocked by:" in page and f" {blocker} " in page
    assert "FOR UPDATE" in page
    # The arguments show it; the statement does not.
    assert "&#x27;secret-name&#x27;" not in page
    until(lambda: Job.objects.get(pk=job).state == "successful")


def _enqueued(function: Any, *args: Any) -> Any:
    """Enqueue on another connection: this test's transaction is open."""
    ids: list[Any] = []

    def run() -> None:
        ids.append(function.enqueue(*args).id)
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return ids[0]


@pytest.mark.parametrize("noted", [{"default": 2**31 - 1}, {"gone": 1}, {"default": "x"}])
def test_sessions_that_are_gone_are_not_shown(
    viewer: Client, process: Any, noted: dict[str, Any]
) -> None:
    job = a_job(state="running", process=process, attempt=1)
    StackTrace.objects.record(job, "at work", noted)

    page = viewer.get(reverse("admin:dbqueue_job_change", args=[job.pk]))

    assert page.status_code == 200
    assert "at work" in page.text and "Database sessions" not in page.text


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("SELECT 'a''b', c FROM t", "SELECT …, c FROM t"),
        ("SELECT E'x' || 'unended", "SELECT … || …"),
        ("SELECT $$a'b$$, $x$ 'y' $x$, 1", "SELECT …, …, 1"),
        ("/* don't */ SELECT 'secret'", "… SELECT …"),
        ("SELECT 1 -- it's\n, 'secret'", "SELECT 1 …\n, …"),
        ("SELECT \"customer's\", 'secret'", 'SELECT "customer\'s", …'),
        (r"SELECT E'it\'s secret', 'more'", "SELECT …, …"),
        ("SELECT 1 WHERE pin = 4111111111111111 LIMIT 50", "SELECT 1 WHERE pin = … LIMIT 50"),
    ],
)
def test_statement_is_shown_without_its_texts(query: str, shown: str) -> None:
    assert without_literals(query) == shown


@on_postgresql
def test_sessions_of_a_thread_are_those_after_a_reconnect(db: Any) -> None:
    found: list[Any] = []

    def run() -> None:
        own = of_this_thread()
        for _time in range(2):
            connections["default"].ensure_connection()
            found.append(sessions(own)["default"])
            discard("default")
        found.append(sessions(own))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    first, second, none = found
    assert first != second and none == {}
