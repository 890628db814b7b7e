"""The pictures of docs/admin.md, taken of a shop in trouble.

``DBQUEUE_PICTURES=docs/pictures`` writes them. Without it, the test only opens the pages.
"""

from __future__ import annotations

import base64
import os
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.core.counts import Counts, Times
from django_dbqueue.core.uuid7 import uuid7_at
from django_dbqueue.models import (
    Execution,
    Failure,
    FailureStatistic,
    Job,
    Operation,
    Process,
    Progress,
    Queue,
    RecurringTask,
    StackTrace,
    Statistic,
)
from django_dbqueue.models.statistic import Period, start_of

from ..admin.conftest import a_failure
from ..conftest import a_process

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(connection.vendor != "sqlite", reason="One run is enough."),
]
FOLDER = os.environ.get("DBQUEUE_PICTURES", "")
SENT, RENDERED, SYNCED = "shop.mail.send_invoice", "shop.pdf.render", "shop.stock.sync"
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/mail.py", line 42, in send_invoice
    client.send(customer.address, invoice.pdf)
  File "/srv/shop/smtp.py", line 17, in send
    raise TimeoutError(f"mail.example.com did not answer within {timeout} s")
TimeoutError: mail.example.com did not answer within 10 s
"""
STACK = """  File "/srv/shop/stock.py", line 88, in sync
    response = session.get(supplier.url)
  File "/srv/shop/stock.py", line 31, in get
    return self.socket.recv(65536)
"""


def a_job(task: str, ago: timedelta, **values) -> Job:
    time = timezone.now() - ago
    job = Job(pk=_id(time), task=task, run_after=time, **{"queue": "default", **values})
    Job.objects.bulk_create([job])
    Job.objects.filter(pk=job.pk).update(enqueued_at=time)
    return Job.objects.get(pk=job.pk)


def _id(time):
    # Several of one millisecond: their order is that of their creation.
    number = Job.objects.count() + 1
    return type(uuid7_at(time))(int=uuid7_at(time).int | 0x7 << 76 | 0b10 << 62 | number)


@pytest.fixture
def shop(db) -> None:
    """A shop whose mail server has not answered for 40 minutes, since release 2026.11.3."""
    now = timezone.now()
    old, new = "2026.11.2", "2026.11.3"
    for number in (1, 2):
        worker = a_process(
            f"worker@web{number}:71{number}:a4c1f{number}",
            hostname=f"web{number}",
            release=new,
            memory=(151 + 7 * number) * 2**20,
            details={"queues": "default, mail, reports", "threads": 8},
        )
    a_process("dispatcher@web1:713:b2d9e0", kind=Process.Kind.DISPATCHER, hostname="web1")
    Queue.objects.ensure_rows(["default", "mail", "reports"])
    failure = a_failure(
        "mail.example.com did not answer within 10 s",
        fingerprint="mail",
        error_type="builtins.TimeoutError",
        location="shop/mail.py:send_invoice",
        release=new,
        last_release=new,
        count=312,
    )
    Failure.objects.update(first_seen=now - timedelta(minutes=40))
    Failure.objects.filter(pk=failure.pk).update(reopened_at=now - timedelta(minutes=40))
    other = a_failure(
        "No stock of article 4711",
        fingerprint="stock",
        error_type="shop.errors.NoStock",
        location="shop/stock.py:reserve",
        release=old,
        last_release=new,
        count=9,
    )
    for number in range(24):
        ago = timedelta(minutes=39 - number)
        job = a_job(
            SENT,
            ago,
            queue="mail",
            kwargs={"invoice": 20431 + number, "customer": 17 + number % 3},
            state="failed",
            attempt=3,
            failures=3,
            started_at=now - ago,
            finished_at=now - ago + timedelta(seconds=10),
        )
        _execution(job, "failed", failure, new)
    for number in range(30):
        ago = timedelta(hours=2, minutes=number)
        job = a_job(
            (SENT, RENDERED, SYNCED)[number % 3],
            ago,
            queue=("mail", "reports", "default")[number % 3],
            kwargs={"invoice": 20300 + number, "customer": 11 + number % 9},
            state="successful",
            attempt=1,
            started_at=now - ago,
            finished_at=now - ago + timedelta(seconds=2),
        )
        _execution(job, "successful", None, old)
    for number in range(12):
        a_job(SENT, timedelta(minutes=14), queue="mail", kwargs={"invoice": 20460 + number})
    for number, (task, minutes) in enumerate([(SYNCED, 190), (RENDERED, 1), (RENDERED, 0.3)]):
        job = a_job(
            task,
            timedelta(minutes=minutes),
            kwargs={"supplier": 4} if task == SYNCED else {"invoice": 20470 + number},
            queue="default" if task == SYNCED else "reports",
            state="running",
            process=worker,
            attempt=1,
            started_at=now - timedelta(minutes=minutes),
        )
        if task == SYNCED:
            StackTrace.objects.record(job, STACK, {})
            Progress.objects.create(job=job, attempt=1, done=1200, total=4800, note="articles")
    for hours in range(30 * 24):
        _statistics(now - timedelta(hours=hours), Period.HOUR, hours < 1, new if hours < 5 else old)
    for minutes in range(48 * 60):
        time = now - timedelta(minutes=minutes)
        _statistics(time, Period.MINUTE, minutes < 40, new if minutes < 300 else old)
    for minutes in range(40):
        for period in Period:
            _count(failure, now - timedelta(minutes=minutes), period, 8, new)
    for hours in range(0, 60, 9):
        _count(other, now - timedelta(hours=hours), Period.HOUR, 1, old)
    RecurringTask.objects.create(
        name="nightly stock", task=SYNCED, cron="0 3 * * *", next_run_at=now + timedelta(hours=9)
    )
    Operation.objects.create(
        verb="discard",
        actor="ann",
        scope="queue=reports q=customer:17",
        reason="Customer 17 has left",
        total=1840,
        done=1840,
        changed=1833,
        created_at=now - timedelta(hours=20, seconds=4),
        finished_at=now - timedelta(hours=20),
    )
    Queue.objects.named("reports").pause(timedelta(hours=1))


def _execution(job: Job, outcome: str, failure: Failure | None, release: str) -> None:
    failed = {"error_type": failure.error_type, "message": failure.message} if failure else {}
    Execution.objects.create(
        job=job,
        attempt=job.attempt,
        outcome=outcome,
        failure=failure,
        process=f"worker@web{1 + job.pk.int % 2}:711:a4c1f1",
        release=release,
        claimed_at=job.started_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        traceback=TRACEBACK if failure else "",
        **failed,
    )


def _statistics(time, period, in_trouble: bool, release: str) -> None:
    start, scale = start_of(period, time), 60 if period == Period.HOUR else 1
    busy = 1 + (6 <= time.hour <= 20) * (1 + time.hour % 4)
    rows = []
    for queue, task, rate, seconds in (
        ("mail", SENT, 4, 0.4),
        ("reports", RENDERED, 2, 2.5),
        ("default", SYNCED, 1, 0.1),
    ):
        number = rate * busy * scale
        fails = in_trouble and queue == "mail"
        failures = number * 8 // 10 if fails else number // 100
        row = Statistic(period=period, start=start, queue=queue, task=task, release=release)
        row.counts = Counts(
            enqueued=number,
            runs=number,
            failures=failures,
            retries=failures,
            run_time=Times.of([10.0 if fails else seconds] * min(number, 50)),
            wait_time=Times.of([240.0 if fails else 0.02] * min(number, 50)),
        )
        rows.append(row)
    Statistic.objects.bulk_create(rows, ignore_conflicts=True)


def _count(failure: Failure, time, period, number: int, release: str) -> None:
    row, _created = FailureStatistic.objects.get_or_create(
        period=period,
        start=start_of(period, time),
        queue="mail",
        task=SENT,
        release=release,
        failure=failure,
        defaults={"number": 0},
    )
    row.number += number
    row.save()


def page(name: str, *of, query: str = "") -> str:
    return reverse(f"admin:dbqueue_{name}", args=of) + f"?backend=default{query}"


def test_pictures(operator, shop, settings, request):
    settings.TIME_ZONE = "UTC"
    failure = Failure.objects.get(error_type="builtins.TimeoutError")
    hanged = Job.objects.get(state="running", task=SYNCED)
    waiting = Job.objects.filter(state="ready").first()
    worker = hanged.process
    pages = {
        "overview": page("overview_changelist"),
        "failures": page("failure_changelist", query="&hours=1"),
        "failure": page("failure_change", failure.pk, query="&hours=1"),
        "waiting": page("job_change", waiting.pk),
        "customer": page("job_changelist", query="&q=customer:17"),
        "hanged-job": page("job_change", hanged.pk),
        "queues": page("queue_changelist"),
        "process": page("process_change", worker.pk),
        "operations": page("operation_changelist"),
        "recurring": page("recurringtask_changelist"),
        "overview-7-days": page("overview_changelist", query="&hours=168"),
    }
    for name, address in pages.items():
        assert "Server Error" not in operator.open(address)
        if name == "overview-7-days":
            operator.browser.execute_script(
                "document.getElementById('dbq-charts').scrollIntoView()"
            )
        _take(operator, name)
    operator.open(pages["failure"])
    operator.press("Retry in steps")
    _take(operator, "retry-in-steps")
    operator.open(page("queue_change", "mail"))
    operator.press("Pause for a while")
    _take(operator, "pause")
    operator.open(page("taskstate_enqueue", "tests.tasks.sign_in"))
    _take(operator, "enqueue")

    operator.browser.execute_script("localStorage.setItem('theme', 'dark')")
    for name in ("overview", "failure"):
        operator.open(pages[name])
        _take(operator, f"{name}-dark")
    operator.browser.execute_script("localStorage.setItem('theme', 'light')")
    settings.LANGUAGE_CODE = "ar"
    for name in ("overview", "failure"):
        operator.open(pages[name])
        _take(operator, f"{name}-arabic")
    settings.LANGUAGE_CODE = "en-us"
    request.getfixturevalue("phone")
    for name in ("overview", "failures", "failure"):
        operator.open(pages[name])
        _take(operator, f"{name}-phone")
    if not settings.THEME:  # Others have messages of their own.
        assert operator.console_errors() == []


def _take(operator, name: str) -> None:
    if not FOLDER:
        return
    taken = operator.browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "webp", "quality": 80}
    )
    path = Path(FOLDER) / f"{name}.webp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(taken["data"]))
