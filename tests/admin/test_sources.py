"""The source of a job, on its page and as a filter of the list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbqueue.admin import sources, windows
from django_dbqueue.compat import task_backends
from django_dbqueue.models import Job

from .conftest import a_job
from .test_job_details import page_text
from .test_jobs import EVIL, JOBS, ids, page

WEB = {
    "process": "web1:7",
    "program": "gunicorn",
    "path": "/orders/",
    "user": "3",
    "username": "alice",
}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = task_backends["default"]
    monkeypatch.setitem(vars(backend), "config", backend.config.changed(note_source=True))


def found(client: Client, kind: str, value: str) -> list[str]:
    return ids(client, "?" + urlencode({"source": f"{kind}:{value}"}))


def test_page_without_a_source_does_not_show_the_field(viewer: Client) -> None:
    assert "field-enqueued_by" not in viewer.get(page(a_job())).text


def test_page_shows_the_source_with_links(viewer: Client, noted: None) -> None:
    parent = a_job()
    job = a_job(source={**WEB, "job": str(parent.pk), "recurring": "nightly"})

    assert (
        f"Enqueued by: job {str(parent.pk)[:8]}…{str(parent.pk)[-8:]} · recurring task nightly · user alice · request /orders/ · program gunicorn web1:7"
    ) in page_text(viewer, job)
    text = viewer.get(page(job)).text
    assert page(parent) in text
    assert "?source=user%3A3" in text and "?source=path%3A%2Forders%2F" in text


def test_page_of_a_started_job_links_to_the_jobs_that_it_enqueued(
    viewer: Client, noted: None
) -> None:
    waits, started = a_job(), a_job(state=Job.State.SUCCESSFUL)

    assert "source=job%3A" not in viewer.get(page(waits)).text
    assert f"source=job%3A{started.pk}" in viewer.get(page(started)).text


@pytest.mark.parametrize(
    "source",
    [[], "x", 7, {"path": ["/x/"], "user": {}, "job": None}, {"path": EVIL}, {"job": EVIL}],
)
def test_source_written_by_hand_breaks_no_page(viewer: Client, noted: None, source: Any) -> None:
    job = a_job(source=source)

    for address in (page(job), JOBS, f"{JOBS}?source=path:x"):
        response = viewer.get(address)
        assert response.status_code == 200
        assert "<script>alert" not in response.text


def test_list_is_filtered_by_each_part(viewer: Client, noted: None) -> None:
    parent = a_job(state=Job.State.SUCCESSFUL)
    job = a_job(source={**WEB, "job": str(parent.pk), "recurring": "nightly"})
    command = a_job(source={"process": "cron1:9", "command": "import_orders"})

    for kind, value in (
        ("job", str(parent.pk)),
        ("recurring", "nightly"),
        ("user", "3"),
        ("path", "/orders/"),
        ("program", "gunicorn"),
    ):
        assert found(viewer, kind, value) == [str(job.pk)], kind
    assert found(viewer, "command", "import_orders") == [str(command.pk)]
    assert found(viewer, "user", "alice") == []


def test_filter_offers_recent_sources_and_the_one_in_use(viewer: Client, noted: None) -> None:
    a_job(source=WEB)

    text = viewer.get(f"{JOBS}?source=path%3A%2Fold%2F").text

    assert "user alice" in text and "request /orders/" in text and "path:/old/" in text


def test_filter_is_hidden_and_costs_no_query_with_the_option_off(viewer: Client) -> None:
    a_job(source=WEB)

    with CaptureQueriesContext(connection) as seen:
        text = viewer.get(JOBS).text

    assert "user alice" not in text
    assert not [query for query in seen if "source" in query["sql"]]


@pytest.mark.parametrize(
    "value", ["", "x", ":", "process:web1:7", "username:alice", "job:", "job:x", "source__path:x"]
)
def test_invalid_filter_redirects_to_the_error_of_the_list(viewer: Client, value: str) -> None:
    response = viewer.get(JOBS, {"source": value})

    assert response.status_code == 302 and "e=1" in response.headers["Location"]


@pytest.mark.parametrize("value", ["\0", "x" * 5000, "%", "'\"--"])
def test_hostile_value_of_a_filter_finds_nothing(viewer: Client, value: str) -> None:
    a_job(source=WEB)

    assert found(viewer, "path", value) == []


def test_long_path_is_found_as_it_was_cut(viewer: Client) -> None:
    job = a_job(source={"path": "/" + "x" * 299})

    assert found(viewer, "path", "/" + "x" * 5000) == [str(job.pk)]


def test_only_the_newest_jobs_are_searched(viewer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SIZE", 3)
    jobs = [a_job(source=WEB) for _ in range(5)]

    assert found(viewer, "user", "3") == [str(job.pk) for job in reversed(jobs[2:])]


def test_children_are_searched_from_the_start_of_their_parent(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an old parent, whose children are not among the newest jobs."""
    monkeypatch.setattr(sources, "MOST", 2)
    long_ago = timezone.now() - timedelta(days=30)
    parent = a_job(state=Job.State.SUCCESSFUL, started_at=long_ago)

    def child(seconds: float) -> Job:
        created = int((long_ago + timedelta(seconds=seconds)).timestamp() * 1000)
        return a_job(pk=UUID(int=created << 80 | 1), source={"job": str(parent.pk)})

    children = [child(seconds) for seconds in (-120, -5, 5, 6)]
    for _ in range(5):
        a_job()

    assert found(viewer, "job", str(parent.pk)) == [str(each.pk) for each in children[2:0:-1]]


def test_children_of_a_deleted_parent_are_found(viewer: Client) -> None:
    parent = a_job()
    child = a_job(source={"job": str(parent.pk)})
    Job.objects.filter(pk=parent.pk).delete()

    assert found(viewer, "job", str(parent.pk)) == [str(child.pk)]
