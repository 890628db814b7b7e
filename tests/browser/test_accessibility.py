"""Each page by the rules of axe, in light and dark."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.models import Batch, Execution, Failure, Job, Queue, RecurringTask, Semaphore

from .. import tasks
from ..conftest import a_process
from .conftest import REQUIRED

if not REQUIRED:
    pytest.importorskip("axe_selenium_python")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Pages are the same on every database: one run is enough.",
    ),
]
LISTS = [
    *("overview", "job", "failure", "hangedjob", "queue", "taskstate", "process"),
    *("recurringtask", "batch", "semaphore", "operation"),
]


def violations(browser) -> list[str]:
    """Return what axe finds on the page, each with the first element."""
    from axe_selenium_python import Axe

    axe = Axe(browser)
    axe.inject()
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in axe.run()["violations"]]


@pytest.fixture
def pages(db) -> list[str]:
    """Return the addresses of all pages, with rows of each kind and in each state."""
    for number in range(3):
        tasks.fail.enqueue(f"order {number}")
    tasks.add.enqueue(1, b=2)
    testing.drain()
    process = a_process("worker@web1:1:abc", release="v1")
    Failure.objects.update(release="v1", reopened_at=timezone.now())
    now = timezone.now()
    running = tasks.add.enqueue(3)
    Job.objects.filter(pk=running.id).update(
        state="running", process=process, started_at=now - timedelta(hours=9), attempt=1
    )
    tasks.add.using(run_after=now + timedelta(hours=1), key="k").enqueue(4)
    Queue.objects.ensure_rows(["default", "mail"])
    Queue.objects.named("mail").pause()
    RecurringTask.objects.create(name="nightly", task="tests.tasks.add", cron="0 3 * * *")
    Semaphore.objects.create(key="bank", max_running=1)
    Batch.objects.create(description="Prices", sealed_at=now)

    def page(name: str, *of) -> str:
        return reverse(f"admin:dbqueue_{name}", args=of) + "?backend=default"

    failed = Execution.objects.filter(failure__isnull=False).first()
    return [
        *(page(f"{each}_changelist") for each in LISTS),
        *(page("job_change", pk) for pk in Job.objects.values_list("pk", flat=True)),
        page("failure_change", failed.failure_id),
        page("queue_change", "mail"),
        page("process_change", process.pk),
        page("taskstate_change", "tests.tasks.add"),
        page("taskstate_enqueue", "tests.tasks.sign_in"),
        page("taskstate_enqueue", "tests.tasks.add") + f"&job={running.id}",
        page("recurringtask_add"),
        page("recurringtask_change", RecurringTask.objects.get().pk),
        page("batch_change", Batch.objects.get().pk),
        page("semaphore_change", "bank"),
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(operator, pages, theme):
    operator.browser.execute_script(f"localStorage.setItem('theme', '{theme}')")
    found = {}
    for address in pages:
        operator.open(address)
        shown = operator.browser.find_element("tag name", "html").get_attribute("data-theme")
        assert shown == theme
        if problems := violations(operator.browser):
            found[address] = problems

    assert found == {}
    assert operator.console_errors() == []
