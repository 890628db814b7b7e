"""The list of jobs and a job's page: contents, number of queries and escaping."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import django
import pytest
from django.contrib.admin.utils import quote
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.core.uuid7 import uuid7_at
from django_dbqueue.models import Failure, Job, Process, Queue
from tests.conftest import a_process

from .conftest import a_failure, a_job, an_execution

State = Job.State

JOBS = reverse("admin:dbqueue_job_changelist")
if django.VERSION >= (6, 0):
    from django.utils.csp import CSP

EVIL = "<script>alert('&')</script>"


def page(job: Job) -> str:
    return reverse("admin:dbqueue_job_change", args=[job.pk])


def queries(client: Client, address: str) -> int:
    client.get(address)
    with CaptureQueriesContext(connection) as seen:
        assert client.get(address).status_code == 200
    return len(seen)


def ids(client: Client, query: str) -> list[str]:
    return re.findall(r'class="dbq-id" dir="ltr" title="([^"]+)"', client.get(JOBS + query).text)


def test_list_is_newest_first_with_state_attempts_and_last_error(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    old, new = failed(), a_job(task="shop.tasks.ship", queue="mail")

    text = viewer.get(JOBS).text

    assert ids(viewer, "") == [str(new.pk), str(old.pk)]
    assert "send_invoice" in text and "NoCustomer" in text and "No such customer" in text
    assert '<td class="field-attempt">1</td>' in text
    assert '<span aria-hidden="true">✕</span> Failed' in text


def test_query_count_of_list_does_not_grow_with_jobs(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    failed()
    one = queries(viewer, JOBS)
    for number in range(49):
        failed(queue=f"queue-{number}")

    assert len(ids(viewer, "")) == 50
    assert queries(viewer, JOBS) == one


def test_list_reads_no_long_arguments_or_tracebacks(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    failed(task="tests.tasks.add", args=["x" * 3000])
    failed(task="tests.tasks.add", args=["short"])

    with CaptureQueriesContext(connection) as seen:
        rows = viewer.get(JOBS).context["cl"].result_list

    assert not [query for query in seen if "traceback" in query["sql"]]
    assert [row.short_args for row in rows] == [["short"], None]
    assert not [row for row in rows if {"args", "kwargs"} & row.__dict__.keys()]


def test_list_shows_short_arguments_redacted(viewer: Client, db: Any) -> None:
    a_job(task="tests.tasks.add", args=[17], kwargs={"b": "<b>"}, metadata={})
    a_job(task="tests.tasks.sign_in", args=["ann", "secret-1", {"token": "secret-2"}])
    a_job(task="shop.tasks.gone", args=["x" * 500])

    text = viewer.get(JOBS).text

    assert "a=17, b=&quot;&lt;b&gt;&quot;" in text
    assert "name=&quot;ann&quot;, password=&quot;••••••&quot;" in text and "secret" not in text
    assert "#1=&quot;" + "x" * 75 + "…" in text


def test_jobs_are_filtered_by_the_time_of_their_enqueue(viewer: Client, db: Any) -> None:
    now = timezone.now()
    old, new = (a_job(id=uuid7_at(now - timedelta(hours=hours))) for hours in (30, 2))

    def listed(query: str) -> set[Any]:
        return {row.pk for row in viewer.get(JOBS + query).context["cl"].result_list}

    assert listed("?enqueued=6") == listed("?enqueued=24") == {new.pk}
    assert listed("?enqueued=168") == {old.pk, new.pk}
    assert listed("?enqueued=1") == set()


def test_page_links_to_jobs_with_the_same_argument(viewer: Client, db: Any) -> None:
    job = a_job(
        task="tests.tasks.sign_in",
        args=["ann b", "secret", {"a": 1}],
        kwargs={"token": "x" * 300},
    )
    other = a_job(task="tests.tasks.add", args=[True, 17])

    text = viewer.get(page(job)).text
    assert f'<a href="{JOBS}?q=name%3Aann+b">name:ann b</a>' in text
    assert "password:" not in text and "token:" not in text and "headers:" not in text
    text = viewer.get(page(other)).text
    assert "?q=a%3Atrue" in text and "?q=b%3A17" in text
    assert viewer.get(f"{JOBS}?q=b:17").context["cl"].result_list == [other]


def test_timeline_shows_waits_and_attempts_to_scale(viewer: Client, process: Any) -> None:
    now = timezone.now()
    job = a_job(
        state=State.RUNNING,
        process=process,
        attempt=2,
        enqueued_at=now - timedelta(seconds=100),
        started_at=now - timedelta(seconds=20),
    )
    times = {"started_at": now - timedelta(seconds=80), "finished_at": now - timedelta(seconds=40)}
    an_execution(job, a_failure(), attempt=1, **times)

    text = viewer.get(page(job)).text

    drawn = re.findall(
        r'<rect class="dbq-(\w+)" x="([\d.]+)" y="\d+" height="\d+" width="([\d.]+)">', text
    )
    assert [tone for tone, _x, _width in drawn] == ["waits", "bad", "waits", "runs"]
    share = [float(width) / 720 for _tone, _x, width in drawn]
    assert share == pytest.approx([0.2, 0.4, 0.2, 0.2], abs=0.02)
    assert "ran 40 s" in text


def test_timeline_of_a_waiting_and_of_an_odd_job(viewer: Client, db: Any) -> None:
    ahead = timezone.now() + timedelta(hours=1)

    assert 'class="dbq-waits"' in viewer.get(page(a_job(enqueued_at=ahead))).text
    assert "dbq-timeline" not in viewer.get(page(a_job(state=State.DISCARDED))).text


def test_list_limits_every_query_on_the_job_table(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    failed()

    with CaptureQueriesContext(connection) as seen:
        viewer.get(JOBS)

    of_jobs = [query["sql"] for query in seen if re.search(r"FROM .dbqueue_job.", query["sql"])]
    assert of_jobs
    assert all(re.search(r"LIMIT|\bid. = ", sql) for sql in of_jobs)
    assert not any("DISTINCT" in sql for sql in of_jobs)


@pytest.mark.parametrize("use_separator", [False, True])
def test_job_count_above_the_limit_is_shown_with_plus(
    viewer: Client, monkeypatch: pytest.MonkeyPatch, settings: Any, use_separator: bool
) -> None:
    settings.USE_THOUSAND_SEPARATOR = use_separator
    monkeypatch.setattr("django_dbqueue.models.bounded_count.LIMIT", 1000)
    Job.objects.bulk_create(
        [Job(task="shop.tasks.ship", queue="default") for number in range(1100)]
    )

    text = viewer.get(JOBS).text

    assert "1,000+ jobs" in text
    assert viewer.get(JOBS + "?p=20").status_code == 200
    assert viewer.get(JOBS + "?p=21").status_code == 302
    assert viewer.get(JOBS + "?q=shop").status_code == 200


def test_jobs_are_filtered_by_state_queue_task_failure_and_process(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    process = a_process("worker@here:1:abc")
    running = a_job(state=Job.State.RUNNING, process=process, task="shop.tasks.ship", queue="mail")
    failed_job = failed(a_failure("Out of stock"))
    Queue.objects.ensure_rows(["mail"])

    assert ids(viewer, "?state=failed") == [str(failed_job.pk)]
    assert ids(viewer, "?queue=mail") == [str(running.pk)]
    assert ids(viewer, "?task=shop.tasks.ship") == [str(running.pk)]
    assert ids(viewer, f"?failure={Failure.objects.get().pk}") == [str(failed_job.pk)]
    assert ids(viewer, f"?process={process.pk}") == [str(running.pk)]
    assert "Out of stock" in viewer.get(JOBS + f"?failure={Failure.objects.get().pk}").text
    text = viewer.get(JOBS).text
    assert "?queue=mail" in text and "?task=shop.tasks.ship" in text and "?state=failed" in text


@pytest.mark.parametrize(
    "query", ["?failure=x", "?failure=", "?process=1e9", "?failure=99999999999999999999", "?no=1"]
)
def test_invalid_filter_redirects_to_the_list(viewer: Client, db: Any, query: str) -> None:
    assert viewer.get(JOBS + query).headers["Location"].endswith("?e=1")


@pytest.mark.parametrize(
    "query",
    ["?state=lost", "?queue=none", "?task=gone", "?failure=5", "?process=5", "?q=%25", "?q=queue:"],
)
def test_filter_without_matches_shows_no_jobs(viewer: Client, query: str) -> None:
    a_job()

    assert ids(viewer, query) == []


def test_jobs_are_found_by_id_task_name_path_and_queue(viewer: Client, db: Any) -> None:
    job, other = a_job(), a_job(task="shop.tasks.ship_100%", queue="mail")

    assert ids(viewer, f"?q={job.pk}") == [str(job.pk)]
    assert ids(viewer, "?q=send_invoice") == [str(job.pk)]
    assert ids(viewer, "?q=shop.tasks.ship_1") == [str(other.pk)]
    assert ids(viewer, "?q=task:shop.tasks.se") == [str(job.pk)]
    assert ids(viewer, "?q=queue:mail") == [str(other.pk)]
    assert ids(viewer, "?q=") == [str(other.pk), str(job.pk)]


def test_values_of_job_are_escaped_on_every_page(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    failure = a_failure(EVIL, location=EVIL)
    job = a_job(
        state=Job.State.FAILED,
        task=f"shop.{EVIL}",
        queue=EVIL,
        args=[EVIL],
        kwargs={EVIL: EVIL},
        metadata={"a": EVIL},
        result=EVIL,
    )
    an_execution(job, failure, message=EVIL, traceback=EVIL, error_type=EVIL, process=EVIL)
    waiting = a_job(queue=EVIL)
    process = a_process(EVIL, details={"a": EVIL}, hostname=EVIL)
    running = a_job(state=Job.State.RUNNING, queue=EVIL, process=process, task=EVIL)
    Queue.objects.ensure_rows([EVIL])
    failures = reverse("admin:dbqueue_failure_changelist")
    pages = [
        JOBS,
        f"{JOBS}?{urlencode(dict.fromkeys(('task', 'queue', 'state', 'q'), EVIL))}",
        f"{JOBS}?failure={failure.pk}&process={process.pk}",
        *(page(each) for each in (job, waiting, running)),
        failures,
        f"{failures}{failure.pk}/change/",
        reverse("admin:dbqueue_queue_changelist"),
        reverse("admin:dbqueue_queue_change", args=[quote(EVIL)]),
        reverse("admin:dbqueue_process_changelist"),
        reverse("admin:dbqueue_process_change", args=[process.pk]),
        reverse("admin:dbqueue_hangedjob_changelist"),
    ]
    Process.objects.update(expires_at=timezone.now() - timedelta(hours=1))

    for address in pages:
        response = viewer.get(address)
        assert response.status_code == 200, address
        assert "<script>alert" not in response.text, address


def test_pages_have_no_inline_script_or_style(operator: Client, failed: Callable[..., Job]) -> None:
    job = failed()
    addresses = [
        JOBS,
        page(job),
        reverse("admin:dbqueue_failure_change", args=[Failure.objects.get().pk]),
    ]
    texts = [operator.get(address).text for address in addresses]
    texts.append(operator.post(reverse("admin:dbqueue_job_discard", args=[job.pk])).text)

    for text in texts:
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=\"", text)


@pytest.mark.skipif(django.VERSION < (6, 1), reason="Django's admin has nonces since 6.1.")
def test_loaded_scripts_and_styles_have_a_csp_nonce(
    operator: Client, failed: Callable[..., Job], settings: Any
) -> None:
    settings.MIDDLEWARE = [
        "django.middleware.csp.ContentSecurityPolicyMiddleware",
        *settings.MIDDLEWARE,
    ]
    settings.SECURE_CSP = {"script-src": [CSP.NONCE], "style-src": [CSP.NONCE]}
    [engine] = copy.deepcopy(settings.TEMPLATES)
    engine["OPTIONS"]["context_processors"].append("django.template.context_processors.csp")
    settings.TEMPLATES = [engine]
    job = failed()
    addresses = [
        JOBS,
        page(job),
        reverse("admin:dbqueue_failure_change", args=[Failure.objects.get().pk]),
    ]
    texts = [operator.get(address).text for address in addresses]
    texts.append(operator.post(reverse("admin:dbqueue_job_discard", args=[job.pk])).text)

    for text in texts:
        loaded = re.findall(r"<script[^>]*>|<link[^>]*stylesheet[^>]*>", text)
        assert len(loaded) > 3 and all("nonce=" in tag for tag in loaded), loaded


def test_list_is_filtered_by_the_time_of_the_end(viewer: Client, db: Any) -> None:
    ago = [timezone.now() - timedelta(hours=hours) for hours in (3, 30)]
    new, old = (a_job(state=State.SUCCESSFUL, finished_at=time) for time in ago)
    a_job()

    assert ids(viewer, "?ended=6") == ids(viewer, "?ended=24") == [str(new.pk)]
    assert sorted(ids(viewer, "?ended=168")) == sorted([str(old.pk), str(new.pk)])
    assert ids(viewer, "?ended=1") == []


def test_list_of_ended_jobs_reads_a_window(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.admin.windows.SIZE", 2)
    jobs = [a_job(state=State.SUCCESSFUL) for _number in range(4)]

    assert ids(viewer, "?ended=6") == [str(job.pk) for job in reversed(jobs[2:])]
    # An index holds the failed ones.
    assert ids(viewer, "?ended=6&state=failed") == []
    assert "Search older jobs" not in viewer.get(JOBS + "?ended=6&state=failed").text


def states_offered(client: Client, query: str = "") -> list[str]:
    """Return the texts of the choices of the state."""
    filters = client.get(JOBS + query).context["cl"].filter_specs
    [spec] = [each for each in filters if each.parameter_name == "state"]
    changelist = client.get(JOBS + query).context["cl"]
    return [str(each["display"]) for each in spec.choices(changelist)]


def test_states_have_the_number_of_their_jobs(
    viewer: Client, failed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.models.bounded_count.LIMIT", 2)
    failed()
    for _number in range(3):
        a_job()

    everywhere = [
        *("All", "Scheduled (0)", "Blocked (0)", "Ready (2+)", "Running (0)"),
        *("Successful", "Failed (1)", "Discarded"),
    ]
    assert sorted(states_offered(viewer)) == sorted(everywhere)
    assert states_offered(viewer, "?state=failed") == states_offered(viewer)
    # A number of all jobs would be read as that of the narrower list.
    for query in ("?queue=mail", "?q=customer:17", "?state=failed&task=gone"):
        assert {"Ready", "Failed"} <= set(states_offered(viewer, query))


def test_list_ignores_the_requested_order(viewer: Client, db: Any) -> None:
    old, new = a_job(priority=9), a_job(priority=1)

    assert ids(viewer, "?o=-8") == ids(viewer, "?o=8") == [str(new.pk), str(old.pk)]


def test_job_page_shows_data_and_attempts_newest_first(viewer: Client, db: Any) -> None:
    job = a_job(state=Job.State.FAILED, args=["Zoë"], kwargs={"total": 3}, attempt=2, failures=2)
    first, second = a_failure("Out of stock"), a_failure("No such customer")
    an_execution(job, first, attempt=1, traceback="first traceback")
    an_execution(job, second, attempt=2, traceback="second traceback")

    text = viewer.get(page(job)).text

    assert "&quot;Zoë&quot;" in text and "&quot;total&quot;: 3" in text
    assert text.index("second traceback") < text.index("first traceback")
    assert text.count("<details open>") == 1
    assert text.index("<details open>") < text.index("second traceback") < text.index("<details>")
    assert reverse("admin:dbqueue_failure_change", args=[second.pk]) in text
    assert "worker@here:1:abc" in text


def test_job_of_removed_task_is_shown_and_retried(
    operator: Client, failed: Callable[..., Job]
) -> None:
    job = failed(task="shop.removed.task")

    assert "shop.removed.task" in operator.get(page(job)).text
    operator.post(reverse("admin:dbqueue_job_retry", args=[job.pk]))

    assert Job.objects.get().state == Job.State.READY


def test_running_job_links_its_process(viewer: Client, db: Any) -> None:
    process = a_process("worker@here:1:abc")
    job = a_job(state=Job.State.RUNNING, process=process)

    assert reverse("admin:dbqueue_process_change", args=[process.pk]) in viewer.get(page(job)).text
    Process.objects.all().delete()

    assert "Gone" in viewer.get(page(job)).text


def test_only_the_newest_50_attempts_are_shown(viewer: Client, db: Any) -> None:
    job = a_job(state=Job.State.FAILED, attempt=120, failures=120)
    failure = a_failure()
    for attempt in range(1, 121):
        an_execution(job, failure, attempt=attempt)

    text = viewer.get(page(job)).text

    assert "#120 " in text and "#71 " in text and "#70 " not in text


def test_values_with_secret_names_are_hidden(viewer: Client) -> None:
    job = a_job(
        task="tests.tasks.sign_in",
        args=["ada", "s3cret", {"API_KEY": "k3y", "plain": "shown"}],
        kwargs={"token": "t0ken"},
        metadata={"by": {"db_password": "hunter2"}},
        state=Job.State.SUCCESSFUL,
        result={"access_token": "acc3ss", "n": [1, "two"]},
    )

    text = viewer.get(page(job)).text

    assert not [
        secret for secret in ("s3cret", "k3y", "t0ken", "hunter2", "acc3ss") if secret in text
    ]
    assert all(shown in text for shown in ("ada", "shown", "two", "••••••"))


def test_variable_arguments_of_secret_parameter_are_hidden(viewer: Client) -> None:
    job = a_job(
        task="tests.tasks.sign_in_many",
        args=["ada", "s3cret", "hunter2", {"plain": "swordfish"}],
        kwargs={"region": "north", "ftp": "k3y", "name": "t0ken"},
    )

    text = viewer.get(page(job)).text

    assert not [
        secret for secret in ("s3cret", "hunter2", "swordfish", "k3y", "t0ken") if secret in text
    ]
    assert "ada" in text and "north" in text


@pytest.mark.parametrize(
    ("args", "kwargs"), [({"password": "s3cret"}, ["k3y"]), ("s3cret"[:0], "k"), (7, None)]
)
def test_job_with_malformed_arguments_is_shown_without_secrets(
    viewer: Client, args: Any, kwargs: Any
) -> None:
    response = viewer.get(
        page(
            a_job(
                task="tests.tasks.sign_in_many",
                args=args,
                kwargs=kwargs if kwargs is not None else {},
            )
        )
    )

    assert response.status_code == 200 and "s3cret" not in response.text


def test_secret_keyword_argument_of_unknown_task_is_hidden(viewer: Client) -> None:
    job = a_job(task="shop.gone.sign_in", args=["ada"], kwargs={"password": "s3cret"})

    text = viewer.get(page(job)).text

    assert "ada" in text and "s3cret" not in text


def test_stopped_running_job_shows_that_it_is_being_stopped(operator: Client, db: Any) -> None:
    job = a_job(state=Job.State.RUNNING, process=a_process("worker@here:1:abc"))
    assert "/stop/" in operator.get(page(job)).text

    confirmation = operator.post(reverse("admin:dbqueue_job_stop", args=[job.pk]))
    assert "A running job is interrupted and discarded." in confirmation.text
    operator.post(reverse("admin:dbqueue_job_stop", args=[job.pk]), {"confirmed": "yes"})

    text = operator.get(page(job)).text
    assert "It is being stopped." in text and "/stop/" not in text


def test_job_page_omits_fields_without_information(viewer: Client, db: Any) -> None:
    now = timezone.now()
    plain = viewer.get(page(a_job(run_after=now, enqueued_at=now))).text
    full = viewer.get(
        page(
            a_job(
                run_after=now,
                enqueued_at=now - timedelta(hours=1),
                expires_at=now,
                timeout=timedelta(hours=1),
            )
        )
    ).text
    fields = ("run_after", "expires_at", "timeout")

    assert [f"field-{name}" in plain for name in (*fields, "started_at", "finished_at")] == [
        False
    ] * 5
    assert [f"field-{name}" in full for name in fields] == [True] * 3


def test_show_all_is_offered_only_on_filtered_list(viewer: Client, db: Any) -> None:
    a_job()

    assert "Show all" not in viewer.get(JOBS).text
    assert "Show all" in viewer.get(JOBS + "?state=ready").text


def test_list_shows_priorities_that_are_not_the_usual_one(viewer: Client) -> None:
    a_job(queue="mail", priority=-7)
    a_job(queue="other")

    text = viewer.get(reverse("admin:dbqueue_job_changelist")).text

    assert 'mail<br><span class="dbq-quiet">priority <span dir="ltr">-7</span></span>' in text
    assert "priority 0" not in text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"state": State.SUCCESSFUL, "started": 3670, "finished": 3660},
            "ended 1 h 1 min ago, ran for 10 s",
        ),
        ({"state": State.FAILED, "started": 3600, "finished": 3599.5}, "ran for 500 ms"),
        ({"state": State.DISCARDED, "finished": 7200}, "ended 2 h ago"),
        ({"state": State.RUNNING, "started": 5430}, "running for 1 h 30 min"),
        ({"state": State.SCHEDULED, "due": 7230}, "due in 2 h"),
    ],
)
def test_list_says_when_and_how_long_jobs_ran(
    viewer: Client, values: dict[str, Any], text: str
) -> None:
    process = a_process("worker@here:1:abc")
    now, state = timezone.now(), values["state"]

    def at(name: str) -> datetime | None:
        return now - timedelta(seconds=values[name]) if name in values else None

    a_job(
        state=state,
        started_at=at("started"),
        finished_at=at("finished"),
        run_after=now + timedelta(seconds=values.get("due", 0)),
        process=process if state == State.RUNNING else None,
        attempt=1,
    )

    page = viewer.get(reverse("admin:dbqueue_job_changelist"))

    assert text in re.sub(r"<[^>]+>", "", page.text)
