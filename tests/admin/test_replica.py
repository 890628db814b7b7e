"""Every admin page and action, with a router that reads from a replica.

The queue's rows are only in the primary. A test that reads the other database fails, as it does not
declare it.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from django_dbqueue import testing
from django_dbqueue.models import Job, RecurringTask

from .. import tasks
from .conftest import EDIT, OPERATE, VIEW, a_client
from .test_permissions import ACTIONS, PAGES, act, fields_of, prepare, snapshot, url
from .test_recurring import FORM_DATA


@pytest.fixture
def rows(rows_by_page: dict[str, Any], settings: Any) -> dict[str, Any]:
    settings.DATABASE_ROUTERS = ["tests.routers.ReplicaRouter"]
    return rows_by_page


@pytest.fixture
def editor(db: Any) -> Client:
    return a_client("editor", VIEW + OPERATE + EDIT)


@pytest.mark.parametrize("page", PAGES)
def test_list_is_read_from_the_primary(rows: dict[str, Any], editor: Client, page: str) -> None:
    assert editor.get(url(page)).status_code == 200
    assert editor.get(url(page), {"q": "a"}).status_code in (200, 302)


@pytest.mark.parametrize("state", ["ready", "scheduled", "blocked", "running", "failed"])
def test_job_page_is_read_from_the_primary(
    rows: dict[str, Any], editor: Client, state: str
) -> None:
    ended = {} if state == "failed" else {"finished_at": None}
    running = {"process": rows["process"]} if state == "running" else {}
    waiting = {"blocked_by": rows["semaphore"].pk} if state == "blocked" else {}
    Job.objects.update(state=state, **ended, **running, **waiting)

    assert editor.get(url("job", "change", rows["job"].pk)).status_code == 200


@pytest.mark.parametrize("page", [page for page in PAGES if page != "hangedjob"])
def test_object_is_read_from_the_primary(rows: dict[str, Any], editor: Client, page: str) -> None:
    assert editor.get(url(page, "change", rows[page].pk)).status_code == 200
    assert editor.get(url(page, "history", rows[page].pk)).status_code == 200


@pytest.mark.parametrize(("page", "action"), ACTIONS)
@pytest.mark.parametrize("trigger", ["button", "selection", "confirmation"])
def test_action_is_executed_in_the_primary(
    rows: dict[str, Any], editor: Client, page: str, action: str, trigger: str
) -> None:
    prepare(rows, action, page)
    before, pk = snapshot(), rows[page].pk

    if trigger == "button":
        response = editor.post(url(page, action, pk), fields_of(action))
    elif trigger == "selection":
        response = act(editor, page, action, pk)
    else:
        response = editor.post(
            url(page), {"action": action, "_selected_action": [str(pk)], "select_across": "1"}
        )

    assert response.status_code in (302, 200)
    assert trigger == "confirmation" or snapshot() != before


def test_recurring_task_is_added_changed_and_deleted_in_the_primary(
    rows: dict[str, Any], editor: Client
) -> None:
    assert editor.get(url("recurringtask", "add")).status_code == 200
    assert editor.post(url("recurringtask", "add"), FORM_DATA).status_code == 302
    row = RecurringTask.objects.using("default").get(name="report")

    assert (
        editor.post(
            url("recurringtask", "change", row.pk), {**FORM_DATA, "args": "[2]"}
        ).status_code
        == 302
    )
    assert editor.post(url("recurringtask", "run", row.pk)).status_code == 302
    assert editor.get(url("recurringtask", "delete", row.pk)).status_code == 200
    assert editor.post(url("recurringtask", "delete", row.pk), {"post": "yes"}).status_code == 302

    assert Job.objects.using("default").filter(task="tests.tasks.add", args=[2]).count() == 1
    assert not RecurringTask.objects.using("default").filter(name="report").exists()


def test_job_is_enqueued_run_and_read_in_the_primary(rows: dict[str, Any]) -> None:
    result = tasks.add.enqueue(1)

    testing.drain()

    result.refresh()
    assert result.return_value == 1
