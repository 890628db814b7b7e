"""Search of jobs by a value in their arguments, and by parts of their ids."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from django_dbqueue.models import Job, Process

from .conftest import a_failure, a_job, act, an_execution

JOBS = reverse("admin:dbqueue_job_changelist")
SECRET = "tests.tasks.login"


def found(client: Client, text: str, **filters: str) -> set[Any]:
    page = client.get(JOBS, {"q": text, **filters})
    assert page.status_code == 200
    return {row.pk for row in page.context["cl"].result_list}


def said(client: Client, text: str) -> str:
    match = re.search('role="status">([^<]*)<', client.get(JOBS, {"q": text}).text)
    return match[1] if match else ""


def test_value_is_found_in_keywords_metadata_and_named_positional_arguments(
    viewer: Client, db: Any
) -> None:
    keyword = a_job(kwargs={"customer": 17})
    text = a_job(kwargs={"customer": "17"})
    metadata = a_job(metadata={"customer": 17})
    # def add(a, b)
    positional = a_job(task="tests.tasks.add", args=[1, 17])
    a_job(task="tests.tasks.add", args=[17, 1])
    a_job(kwargs={"customer": 171}, metadata={"other": 17}, args=[17])

    assert found(viewer, "customer:17") == {keyword.pk, text.pk, metadata.pk}
    assert found(viewer, "b: 17") == {positional.pk}
    assert found(viewer, "customer:17", queue="elsewhere") == set()


@pytest.mark.parametrize(
    ("value", "text"),
    [("Ann Lee", "Ann Lee"), (True, "true"), (1.5, "1.5"), ("é\"'%_", "é\"'%_"), ("a:b", "a:b")],
)
def test_texts_numbers_and_booleans_are_found(
    viewer: Client, db: Any, value: Any, text: str
) -> None:
    job = a_job(kwargs={"name": value})
    a_job(kwargs={"name": "other"})

    assert found(viewer, f"name:{text}") == {job.pk}


@pytest.mark.parametrize("name", ["contains", "exact", "in", "has_key", "isnull", "gt"])
def test_names_that_are_lookups_are_names(viewer: Client, db: Any, name: str) -> None:
    job = a_job(kwargs={name: "x"})
    a_job(kwargs={"other": "x"})

    assert found(viewer, f"{name}:x") == {job.pk}


def test_hidden_values_are_not_found(viewer: Client, db: Any) -> None:
    a_job(kwargs={"password": "tiger"}, metadata={"api_token": "tiger"})

    for name in ("password", "api_token", "PASSWORD"):
        assert found(viewer, f"{name}:tiger") == set()
    assert said(viewer, "password:tiger") == "Values of password are hidden, and are not searched."


def test_value_behind_a_hidden_parameter_is_not_found(viewer: Client, db: Any) -> None:
    shown = a_job(kwargs={"pin": "1234"}, args=["ann"])
    # def sign_in_many(context, name, /, *passwords, region="", **credentials)
    a_job(task="tests.tasks.sign_in_many", kwargs={"pin": "1234"}, args=["ann"])

    assert found(viewer, "pin:1234") == {shown.pk}


def test_part_of_an_id_is_found_as_lists_show_it(viewer: Client, db: Any) -> None:
    job, other = a_job(), a_job()
    Job.objects.filter(pk=other.pk).delete()
    a_job(pk="00000000-0000-7000-8000-000000000001")
    text = str(job.pk)

    for part in (text[-8:], text[-12:], f"{text[:8]}…{text[-8:]}", text[:23], text[:-1].upper()):
        assert found(viewer, part) == {job.pk}, part
    assert found(viewer, f"{text[:8]}…00000001") == set()


def test_search_that_finds_nothing_says_what_was_searched(viewer: Client, db: Any) -> None:
    assert "customer = 17 in arguments and metadata." in said(viewer, "customer:17")
    assert "begins with" in said(viewer, "ship") and "queue mail" in said(viewer, "queue:mail")
    assert said(viewer, "") == ""
    assert "&lt;b&gt;" in said(viewer, "<b>")
    assert "in arguments and metadata." in said(viewer, f"customer:{'9' * 400}")


def test_only_the_newest_jobs_are_read(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    jobs = [a_job(kwargs={"customer": 1}) for _ in range(5)]
    expected = [{job.pk for job in part} for part in (jobs[3:], jobs[1:3], jobs[:1])]

    page = f"{JOBS}?q=customer:1"
    for ids in expected:
        answer = viewer.get(page)
        assert {row.pk for row in answer.context["cl"].result_list} == ids
        older = re.search(r'href="(\?[^"]*)">Search older jobs<', answer.text)
        page = JOBS + unescape(older[1]) if older else ""

    assert page == ""


@pytest.mark.parametrize(
    ("query", "is_bounded"),
    [
        ("queue=rare", False),
        ("queue=rare&state=successful", False),
        ("queue=rare&state=ready", True),
        ("task=rare", False),
        ("q=queue:rare", False),
        ("worker=w", False),
        ("release=2", False),
        ("", True),
        ("q=key:1", True),
        ("failure=1", False),
        ("error=none&state=failed", False),
        ("failure=1&state=running", False),
        ("batch=0190a6c0-0000-7000-8000-000000000000&failure=1", True),
    ],
)
def test_list_reads_a_window_unless_an_index_serves_it(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch, query: str, is_bounded: bool
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    for _ in range(3):
        a_job(queue="rare", task="rare")

    text = viewer.get(f"{JOBS}?{query}").text

    assert ("Only the newest 2 jobs were searched" in text) != is_bounded


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL only.")
def test_indexed_argument_is_found_among_all_jobs(
    viewer: Client, backend: Any, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = backend.config.changed(indexed_arguments="customer, token")
    monkeypatch.setitem(vars(backend), "config", config)
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    jobs = [a_job(kwargs={"customer": 1}), a_job(metadata={"customer": "1"}), a_job(), a_job()]
    a_job(kwargs={"token": "secret"})

    assert found(viewer, "customer:1") == {job.pk for job in jobs[:2]}
    assert "by their index" in said(viewer, "customer:1")
    assert found(viewer, "customer:1", queue="elsewhere") == set()
    assert found(viewer, "token:secret") == set()


def test_windows_of_a_release_have_all_its_jobs(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    jobs = [a_job(state=Job.State.SUCCESSFUL) for _ in range(5)]
    for job in jobs:
        an_execution(job, release="2.1")

    page, seen = f"{JOBS}?release=2.1", []
    while page:
        answer = viewer.get(page)
        seen += [row.pk for row in answer.context["cl"].result_list]
        older = re.search(r'href="(\?[^"]*)">Search older jobs<', answer.text)
        page = JOBS + unescape(older[1]) if older else ""

    assert seen == [job.pk for job in reversed(jobs)]
    assert found(viewer, str(jobs[0].pk), release="2.1") == {jobs[0].pk}


def test_jobs_are_filtered_by_error_worker_and_release(
    viewer: Client, process: Process, db: Any
) -> None:
    failed, other = a_job(), a_job()
    failure = a_failure("Out of stock")
    an_execution(failed, failure=failure, release="2.1", process="worker@a")
    an_execution(other, release="2.0", process=process.name)

    for query, expected in (
        ({"error": failure.error_type}, {failed.pk}),
        ({"release": "2.1"}, {failed.pk}),
        ({"worker": process.name}, {other.pk}),
        ({"error": "nonsense"}, set()),
        ({"before": str(other.pk)}, {failed.pk}),
    ):
        answer = viewer.get(JOBS, query)
        assert {row.pk for row in answer.context["cl"].result_list} == expected, query
    assert viewer.get(JOBS, {"before": "x"}).status_code == 302


@pytest.mark.parametrize(
    "text",
    [
        "a:",
        ":",
        ":x",
        "a:{",
        "a:NaN",
        "a:1e999",
        "a:[1]",
        "a:null",
        "a:" + "9" * 5000,
        "…",
        "a b:c",
        "args:[",
        "x" * 9000,
        "\x00",
        "a:\x00",
        "ffffffff…",
        "…ffffffff",
        "--------",
    ],
)
def test_nonsense_finds_nothing(viewer: Client, db: Any, text: str) -> None:
    a_job(kwargs={"a": None, "b": [1]})

    assert viewer.get(JOBS, {"q": text}).status_code in (200, 302)


def test_more_matches_than_are_listed_are_found_behind_the_link(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.search.FOUND", 3)
    jobs = [a_job(kwargs={"customer": 1}) for _ in range(7)]

    page, seen = f"{JOBS}?q=customer:1", []
    while page:
        answer = viewer.get(page)
        seen.append([row.pk for row in answer.context["cl"].result_list])
        assert ("newest 3 matches are listed" in answer.text) == (len(seen) < 3)
        older = re.search(r'href="(\?[^"]*)">Search older jobs<', answer.text)
        page = JOBS + unescape(older[1]) if older else ""

    newest = [job.pk for job in reversed(jobs)]
    assert seen == [newest[:3], newest[3:6], newest[6:]]


@pytest.mark.parametrize("query", ["queue=default", "q=task:shop", "q=customer:1"])
def test_action_on_all_that_match_is_not_bounded_by_the_window(
    operator: Client, db: Any, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    monkeypatch.setattr("django_dbqueue.admin.search.FOUND", 2)
    jobs = [a_job(kwargs={"customer": 1}) for _ in range(5)]

    fields = {"select_across": "1", "confirmed": "yes"}
    act(operator, "discard", [jobs[-1].pk], query=f"?{query}", **fields)

    assert Job.objects.filter(state="discarded").count() == 5


@pytest.mark.parametrize("text", ["{pk}", "key:k", "{begin}", "{begin}…{end}"])
def test_old_job_is_found_by_its_id_and_key_with_a_filter_too(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 1)
    old = a_job(pk="0190a6c0-0000-7000-8000-00000000aaaa", key="shop.tasks.send_invoice k")
    for _ in range(3):
        a_job(key=None)
    pk = str(old.pk)
    text = text.format(pk=pk, begin=pk[:13], end=pk[-8:])

    assert {str(each) for each in found(viewer, text, queue="default")} == {pk}


def test_positional_value_is_found_though_its_task_is_not_among_the_newest(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job.objects._queryset_class, "recent_tasks", lambda rows: [])
    job = a_job(task="tests.tasks.add", args=[17])

    assert found(viewer, "a:17") == {job.pk}


@pytest.mark.parametrize("name", ["queue", "state", "task", "error", "worker", "release", "q"])
def test_text_that_no_database_takes_is_no_server_error(viewer: Client, db: Any, name: str) -> None:
    assert viewer.get(JOBS, {name: "a\x00b"}).status_code in (200, 302)


def test_window_that_ends_after_the_last_year_is_shown(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 1)
    a_job()
    a_job(pk="ffffffff-ffff-7000-8000-000000000001")

    assert viewer.get(JOBS, {"queue": "default"}).status_code == 200
