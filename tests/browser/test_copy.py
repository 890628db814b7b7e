"""Buttons that copy a text, and numbers in a text from right to left, in a real browser."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.urls import reverse

from django_dbqueue import testing
from django_dbqueue.models import Execution, Failure, Job, Semaphore

from .. import tasks
from ..conftest import until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Pages are the same on every database: one run is enough.",
    ),
]


@pytest.fixture
def clipboard(operator):
    """Return a function that reads the clipboard."""
    browser = operator.browser
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    given = {"origin": operator.address, "permissions": permissions}
    browser.execute_cdp_cmd("Browser.grantPermissions", given)
    script = "navigator.clipboard.readText().then(arguments[0], arguments[0])"
    yield lambda: browser.execute_async_script(script)
    browser.execute_cdp_cmd("Browser.resetPermissions", {})


@pytest.fixture
def failed_job() -> Job:
    tasks.fail.enqueue("no <b>such</b> order")
    testing.drain()
    return Job.objects.get()


def page(job: Job) -> str:
    return reverse("admin:dbqueue_job_change", args=[job.pk]) + "?backend=default"


def copy(browser, what: str) -> str:
    """Press the button that copies this, and return what is announced."""
    button = browser.find_element("css selector", f"[aria-label='Copy: {what}']")
    button.click()
    status = button.find_element("xpath", "following-sibling::*[@role='status']")
    until(lambda: status.text, 10)
    return status.text


def test_id_arguments_and_traceback_are_copied(operator, clipboard, failed_job):
    operator.open(page(failed_job))

    assert copy(operator.browser, "id") == "Copied"
    assert clipboard() == str(failed_job.pk)

    assert copy(operator.browser, "arguments") == "Copied"
    assert clipboard() == '[\n  "no <b>such</b> order"\n]'

    assert copy(operator.browser, "Traceback") == "Copied"
    assert clipboard() == Execution.objects.get().traceback
    assert operator.console_errors() == []


def test_traceback_of_a_failure_is_copied(operator, clipboard, failed_job):
    address = reverse("admin:dbqueue_failure_change", args=[Failure.objects.get().pk])
    operator.open(address + "?backend=default")

    assert copy(operator.browser, "Traceback") == "Copied"
    assert "ValueError" in clipboard() or "raise" in clipboard()


def test_announcement_disappears_and_is_made_again(operator, clipboard, failed_job):
    operator.open(page(failed_job))
    copy(operator.browser, "id")
    status = operator.browser.find_element("css selector", ".dbq-copied")

    until(lambda: not status.text, 10)

    assert copy(operator.browser, "id") == "Copied"


def test_text_is_selected_if_the_clipboard_refuses_it(operator, failed_job):
    operator.open(page(failed_job))
    operator.browser.execute_script(
        "navigator.clipboard.writeText = () => Promise.reject(new Error('denied'))"
    )

    operator.browser.find_element("css selector", "[aria-label='Copy: id']").click()

    selected = "return document.getSelection().toString()"
    until(lambda: operator.browser.execute_script(selected) == str(failed_job.pk), 10)


def test_buttons_stay_hidden_without_a_secure_context(operator, failed_job):
    hide = {"source": "Object.defineProperty(window, 'isSecureContext', {value: false})"}
    added = operator.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", hide)
    try:
        operator.open(page(failed_job))
        buttons = operator.browser.find_elements("css selector", ".dbq-copy")
        assert buttons and not any(button.is_displayed() for button in buttons)
    finally:
        operator.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


# The left edge of the sign and that of the digit: where they are, and not where the source has them.
EDGES = """
const node = [...arguments[0].childNodes].find((each) => each.nodeType === Node.TEXT_NODE);
return [0, 1].map((place) => {
    const range = document.createRange();
    range.setStart(node, node.textContent.indexOf("-5") + place);
    range.setEnd(node, node.textContent.indexOf("-5") + place + 1);
    return range.getBoundingClientRect().left;
});
"""


def test_sign_of_a_priority_is_before_it_from_right_to_left(operator, settings):
    settings.LANGUAGE_CODE = "ar"
    tasks.add.using(priority=-5).enqueue(1)
    job = Job.objects.get()
    browser = operator.browser

    def sign_is_first() -> list[bool]:
        found = browser.find_elements("xpath", "//*[text()[contains(., '-5')]]")
        # An id may contain it, too.
        numbers = [each for each in found if re.search(r"(?<![\w-])-5(?![\w-])", each.text)]
        edges = [browser.execute_script(EDGES, each) for each in numbers if each.is_displayed()]
        return [sign < digit for sign, digit in edges]

    operator.open("/admin/dbqueue/job/?backend=default")
    assert sign_is_first() == [True]
    operator.open(page(job))
    assert sign_is_first() == [True]

    # The field, the message, and the operation.
    Job.objects.update(priority=0)
    browser.find_element("css selector", ".dbq-reprioritise").click()
    field = browser.find_element("name", "value")
    assert field.value_of_css_property("direction") == "ltr"
    field.send_keys("-5")
    browser.find_element("css selector", "button[name=confirmed]").click()
    until(lambda: browser.find_elements("css selector", ".messagelist"), 10)
    assert Job.objects.get().priority == -5
    assert sign_is_first() == [True, True]
    operator.open("/admin/dbqueue/operation/?backend=default")
    assert sign_is_first() == [True]

    Semaphore.objects.create(key="bank", max_running=1)
    Job.objects.update(state="blocked", blocked_by="bank")
    operator.open(reverse("admin:dbqueue_semaphore_change", args=["bank"]) + "?backend=default")
    assert sign_is_first() == [True]
