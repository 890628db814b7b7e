"""The system's headless Chromium.

``DBQUEUE_BROWSER``, which CI sets, requires it. Otherwise tests are skipped if it is not installed.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.models import Batch, Execution, Failure, Job, Queue, RecurringTask, Semaphore

from .. import tasks
from ..conftest import a_process

# The width of a phone, in pixels.
PHONE = 390
LISTS = [
    *("overview", "job", "failure", "hangedjob", "queue", "taskstate", "process"),
    *("recurringtask", "batch", "semaphore", "operation"),
]
REQUIRED = bool(os.environ.get("DBQUEUE_BROWSER"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if not REQUIRED and not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("Chromium or chromedriver is not installed.")
    if not REQUIRED:
        pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tmp_path_factory.mktemp("profile")
    quiet = [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    for argument in [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={profile}",
        "--window-size=1400,1000",
    ]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


class BrowserUser:
    """A browser that opens pages, presses buttons by their names and returns the visible text."""

    def __init__(self, browser, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, path: str) -> str:
        self.browser.get(f"{self.address}{path}")
        return self.text()

    def text(self) -> str:
        return self.browser.find_element("tag name", "body").text

    def press(self, name: str) -> str:
        paths = f"//button[contains(., '{name}')] | //input[@value='{name}'] | //a[contains(., '{name}')]"
        return self._follow(self.browser.find_element("xpath", paths))

    def click(self, name: str) -> str:
        """Follow the link with this text, or with a text that begins so."""
        link = f"//a[normalize-space()='{name}'] | //a[starts-with(normalize-space(), '{name}')]"
        return self._follow(self.browser.find_element("xpath", link))

    def open_first_row(self) -> str:
        """Open the page of the first row of a list."""
        link = "#result_list tbody th a"
        return self._follow(self.browser.find_element("css selector", link))

    def _follow(self, element) -> str:
        before = self.browser.find_element("tag name", "html")
        element.click()
        self._wait_for_another_page(before)
        return self.text()

    def fill(self, **values: str) -> None:
        """Type into the fields of these names, or choose these options."""
        from selenium.webdriver.support.ui import Select

        for name, text in values.items():
            field = self.browser.find_element("name", name)
            if field.tag_name == "select":
                Select(field).select_by_visible_text(text)
            else:
                field.clear()
                field.send_keys(text)

    def console_errors(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if "favicon" not in entry["message"]
        ]

    def _wait_for_another_page(self, before) -> None:
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.wait import WebDriverWait

        def is_complete(browser) -> bool:
            # While one document replaces the other, the driver's commands fail in several ways.
            try:
                html = browser.find_element("tag name", "html")
                state = browser.execute_script("return document.readyState")
                return html != before and state == "complete"
            except WebDriverException:
                return False

        WebDriverWait(self.browser, 10).until(is_complete)


@pytest.fixture
def operator(chromium, live_server, client):
    user = User.objects.create_superuser("operator")
    client.force_login(user)
    browser_user = BrowserUser(chromium, live_server.url)
    browser_user.open("/admin/login/")
    chromium.add_cookie(
        {
            "name": settings.SESSION_COOKIE_NAME,
            "value": client.cookies[settings.SESSION_COOKIE_NAME].value,
        }
    )
    return browser_user


@pytest.fixture
def phone(chromium):
    """Make the window as wide as a phone for this test, and return its width in pixels."""
    size = {"width": PHONE, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield PHONE
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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
