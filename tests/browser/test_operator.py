"""What an operator does in the admin, in a real browser."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection

from django_dbqueue import testing
from django_dbqueue.models import Job, Queue, RecurringTask

from .. import tasks
from ..conftest import a_process

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="What a browser shows is the same on each database: once is enough.",
    ),
]


class Visitor:
    """Somebody at the browser: goes to pages, presses what has a name, reads what is there."""

    def __init__(self, browser, address: str) -> None:
        self.browser, self.address = browser, address

    def go(self, path: str) -> str:
        self.browser.get(f"{self.address}{path}")
        return self.text()

    def text(self) -> str:
        return self.browser.find_element("tag name", "body").text

    def press(self, name: str) -> str:
        paths = f"//button[contains(., '{name}')] | //input[@value='{name}'] | //a[contains(., '{name}')]"
        before = self.browser.find_element("tag name", "html")
        self.browser.find_element("xpath", paths).click()
        self._wait_for_another_page(before)
        return self.text()

    def complaints(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if "favicon" not in entry["message"]
        ]

    def _wait_for_another_page(self, before) -> None:
        from selenium.webdriver.support.expected_conditions import staleness_of
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.browser, 10).until(staleness_of(before))


@pytest.fixture
def operator(chromium, live_server, client):
    user = User.objects.create_superuser("operator")
    client.force_login(user)
    visitor = Visitor(chromium, live_server.url)
    visitor.go("/admin/login/")
    chromium.add_cookie(
        {
            "name": settings.SESSION_COOKIE_NAME,
            "value": client.cookies[settings.SESSION_COOKIE_NAME].value,
        }
    )
    return visitor


@pytest.fixture
def trouble():
    for number in range(3):
        tasks.fail.enqueue(f"order {number} is <script>gone</script>")
    tasks.add.enqueue(1)
    testing.drain()


def test_each_page_opens_and_the_browser_has_nothing_to_complain_of(operator, trouble):
    a_process("worker@web1:1:abc")
    for model in [
        "job",
        "failure",
        "hangedjob",
        "queue",
        "taskstate",
        "process",
        "recurringtask",
        "batch",
        "semaphore",
    ]:
        assert "Job queue" in operator.go(f"/admin/dbqueue/{model}/")
    assert operator.go(f"/admin/dbqueue/job/{Job.objects.first().pk}/change/")

    assert operator.complaints() == []


def test_from_the_failure_to_running_its_jobs_again(operator, trouble):
    assert "ValueError" in operator.go("/admin/dbqueue/failure/")
    operator.browser.find_element("css selector", "#result_list tbody th a").click()
    page = operator.text()
    assert "order 0 is <script>gone</script>" in page

    assert "3 jobs" in operator.press("Retry all failed jobs")
    assert "3 jobs" in operator.press("Retry all failed jobs")

    assert Job.objects.ready().count() == 3


def test_a_queue_is_paused_and_resumed(operator):
    Queue.objects.ensure_rows(["mail"])
    operator.go("/admin/dbqueue/queue/mail/change/")

    operator.press("Pause")
    assert Queue.objects.paused().exists()

    operator.press("Resume")
    assert not Queue.objects.paused().exists()


def test_a_recurring_task_is_made_and_run(operator):
    operator.go("/admin/dbqueue/recurringtask/add/")
    for name, text in {
        "name": "report",
        "task": "tests.tasks.nothing",
        "cron": "0 9 * * mon",
        "timezone": "Europe/Berlim",
    }.items():
        operator.browser.find_element("name", name).send_keys(text)
    assert "Did you mean 'Europe/Berlin'?" in operator.press("Save and continue editing")
    zone = operator.browser.find_element("name", "timezone")
    zone.clear()
    zone.send_keys("Europe/Berlin")

    assert "Next runs" in operator.press("Save and continue editing")
    assert "Enqueued: 1 recurring task" in operator.press("Run now")

    assert Job.objects.get().task == "tests.tasks.nothing"
    assert operator.complaints() == []
    operator.press("Disable")
    assert not RecurringTask.objects.get().is_enabled
