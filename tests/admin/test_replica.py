"""Every page and every action where the project's router reads from a replica, and the queue's rows are in the primary alone.

A test that reads the other database fails, as it has not asked for it.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from django_dbqueue import testing
from django_dbqueue.models import Job, RecurringTask

from .. import tasks
from .conftest import MAKE, OPERATE, VIEW, a_client
from .test_permissions import ACTIONS, PAGES, VALUES, act, prepare, snapshot, url
from .test_recurring import GIVEN


@pytest.fixture
def rows(everything: dict[str, Any], settings: Any) -> dict[str, Any]:
    settings.DATABASE_ROUTERS = ["tests.routers.ReplicaRouter"]
    return everything


@pytest.fixture
def maker(db: Any) -> Client:
    return a_client("maker", VIEW + OPERATE + MAKE)


@pytest.mark.parametrize("page", PAGES)
def test_list_is_read_from_the_primary(rows: dict[str, Any], maker: Client, page: str) -> None:
    assert maker.get(url(page)).status_code == 200
    assert maker.get(url(page), {"q": "a"}).status_code in (200, 302)


@pytest.mark.parametrize("state", ["ready", "scheduled", "blocked", "running", "failed"])
def test_page_of_a_job_is_read_from_the_primary(
    rows: dict[str, Any], maker: Client, state: str
) -> None:
    ended = {} if state == "failed" else {"finished_at": None}
    running = {"process": rows["process"]} if state == "running" else {}
    waiting = {"blocked_by": rows["semaphore"].pk} if state == "blocked" else {}
    Job.objects.update(state=state, **ended, **running, **waiting)

    assert maker.get(url("job", "change", rows["job"].pk)).status_code == 200


@pytest.mark.parametrize("page", [page for page in PAGES if page != "hangedjob"])
def test_object_is_read_from_the_primary(rows: dict[str, Any], maker: Client, page: str) -> None:
    assert maker.get(url(page, "change", rows[page].pk)).status_code == 200
    assert maker.get(url(page, "history", rows[page].pk)).status_code == 200


@pytest.mark.parametrize(("page", "action"), ACTIONS)
@pytest.mark.parametrize("way", ["button", "selection", "question"])
def test_action_is_done_in_the_primary(
    rows: dict[str, Any], maker: Client, page: str, action: str, way: str
) -> None:
    prepare(rows, action, page)
    before, pk = snapshot(), rows[page].pk

    if way == "button":
        answer = maker.post(
            url(page, action, pk), {"confirmed": "yes", "value": VALUES.get(action, "")}
        )
    elif way == "selection":
        answer = act(maker, page, action, pk)
    else:
        answer = maker.post(
            url(page), {"action": action, "_selected_action": [str(pk)], "select_across": "1"}
        )

    assert answer.status_code in (302, 200)
    assert way == "question" or snapshot() != before


def test_recurring_task_is_made_changed_and_deleted_in_the_primary(
    rows: dict[str, Any], maker: Client
) -> None:
    assert maker.get(url("recurringtask", "add")).status_code == 200
    assert maker.post(url("recurringtask", "add"), GIVEN).status_code == 302
    made = RecurringTask.objects.using("default").get(name="report")

    assert (
        maker.post(url("recurringtask", "change", made.pk), {**GIVEN, "args": "[2]"}).status_code
        == 302
    )
    assert maker.post(url("recurringtask", "run", made.pk)).status_code == 302
    assert maker.get(url("recurringtask", "delete", made.pk)).status_code == 200
    assert maker.post(url("recurringtask", "delete", made.pk), {"post": "yes"}).status_code == 302

    assert Job.objects.using("default").filter(task="tests.tasks.add", args=[2]).count() == 1
    assert not RecurringTask.objects.using("default").filter(name="report").exists()


def test_job_is_enqueued_run_and_read_back_in_the_primary(rows: dict[str, Any]) -> None:
    result = tasks.add.enqueue(1)

    testing.drain()

    result.refresh()
    assert result.return_value == 1
