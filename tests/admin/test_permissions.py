"""Permissions: every page, and every action by its button, on a selection and on all rows."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from django_dbqueue.models import (
    Failure,
    Job,
    Operation,
    Process,
    Queue,
    RecurringTask,
    TaskState,
)

from .conftest import EDIT, OPERATE, VIEW, a_client

PAGES = [
    "job",
    "hangedjob",
    "failure",
    "queue",
    "taskstate",
    "process",
    "recurringtask",
    "batch",
    "semaphore",
    "operation",
]
REQUIRED_PERMISSIONS = {
    ("job", "retry"): "retry_job",
    ("job", "discard"): "discard_job",
    ("job", "stop"): "stop_job",
    ("job", "reprioritise"): "reprioritise_job",
    ("failure", "retry"): "retry_job",
    ("failure", "retry_in_steps"): "retry_job",
    ("failure", "discard"): "discard_job",
    ("failure", "mute"): "triage_failure",
    ("failure", "mute_for"): "triage_failure",
    ("failure", "resolve"): "triage_failure",
    ("failure", "reopen"): "triage_failure",
    ("queue", "pause"): "pause_queue",
    ("queue", "restrict"): "restrict_queue",
    ("queue", "resume"): "pause_queue",
    ("queue", "pause_for"): "pause_queue",
    ("queue", "clear"): "discard_job",
    ("job", "move"): "move_job",
    ("job", "run_now"): "reschedule_job",
    ("job", "reschedule"): "reschedule_job",
    ("job", "stop_and_retry"): "stop_job",
    ("taskstate", "pause"): "pause_queue",
    ("taskstate", "resume"): "pause_queue",
    ("taskstate", "pause_for"): "pause_queue",
    ("batch", "retry"): "retry_job",
    ("batch", "discard"): "discard_job",
    ("process", "quiet"): "control_process",
    ("process", "resume"): "control_process",
    ("process", "stop"): "control_process",
    ("recurringtask", "run"): "run_recurringtask",
    ("recurringtask", "enable"): "enable_recurringtask",
    ("recurringtask", "disable"): "enable_recurringtask",
}
REQUIRED_PERMISSIONS |= {
    ("operation", "undo"): "undo_operation",
    ("operation", "stop"): "stop_operation",
    ("operation", "continue"): "stop_operation",
}
# What has the list of a page show all rows.
WITH_ALL = {"failure": "?state=all"}
VALUES = {
    "pause_for": "3600",
    "mute_for": "3600",
    "move": "slow",
    "restrict": "3",
    "reprioritise": "50",
    "reschedule": "2099-01-01T10:00",
}
ACTIONS = list(REQUIRED_PERMISSIONS)


def url(page: str, name: str = "changelist", *args: Any) -> str:
    return reverse(f"admin:dbqueue_{page}_{name}", args=[quote(arg) for arg in args])


def snapshot() -> list[Any]:
    return [
        list(
            Job.objects.values_list(
                "pk", "state", "stop_requested_at", "queue", "priority", "run_after"
            )
        ),
        list(TaskState.objects.values_list("pk", "paused_at")),
        list(Process.objects.values_list("pk", "request")),
        list(Queue.objects.values_list("pk", "paused_at", "limit")),
        list(Failure.objects.values_list("pk", "state")),
        list(RecurringTask.objects.values_list("pk", "is_enabled", "name")),
        list(Operation.objects.values_list("pk", "stop_requested_at", "job", "undone_by")),
        LogEntry.objects.count(),
    ]


def fields_of(action: str) -> dict[str, str]:
    """Return the fields of an action's confirmation."""
    return {"confirmed": "yes", "value": VALUES.get(action, ""), "stop_above": "10"}


def act(client: Client, page: str, action: str, pk: Any, across: str = "0") -> Any:
    fields = {
        "action": action,
        "_selected_action": [str(pk)],
        "select_across": across,
    }
    return client.post(url(page) + WITH_ALL.get(page, ""), {**fields, **fields_of(action)})


def prepare(rows: dict[str, Any], action: str, page: str = "") -> None:
    """Put the rows into a state that the action changes."""
    if page == "batch" and action == "discard":
        Job.objects.update(state="ready", finished_at=None)
    if page not in ("operation", "process") and action in ("stop", "stop_and_retry"):
        Job.objects.update(
            state="running", process=rows["process"], started_at=Now(), finished_at=None
        )
    if page == "operation" and action in ("stop", "continue"):
        Operation.objects.update(finished_at=None)
    if page == "operation" and action == "undo":
        Job.objects.update(state="ready", finished_at=None)
    if action in ("clear", "move", "reprioritise", "reschedule"):
        Job.objects.update(state="ready", finished_at=None)
    if action == "run_now":
        Job.objects.update(state="scheduled", finished_at=None)
    if page == "process" and action == "resume":
        Process.objects.quiet()
    elif action == "resume":
        Queue.objects.pause()
        TaskState.objects.pause()
    if action == "reopen":
        Failure.objects.mute()
    if action == "enable":
        RecurringTask.objects.all().disable()


@pytest.mark.parametrize("page", PAGES)
def test_list_requires_staff_status_and_view_permission(
    rows_by_page: dict[str, Any], viewer: Client, page: str
) -> None:
    assert viewer.get(url(page)).status_code == 200
    assert a_client("unprivileged", []).get(url(page)).status_code == 403
    assert a_client("not staff", VIEW, is_staff=False).get(url(page)).status_code == 302
    assert Client().get(url(page)).status_code == 302


@pytest.mark.parametrize("page", [page for page in PAGES if page != "hangedjob"])
def test_object_page_requires_staff_status_and_view_permission(
    rows_by_page: dict[str, Any], viewer: Client, superuser: Client, page: str
) -> None:
    address = url(page, "change", rows_by_page[page].pk)

    assert viewer.get(address).status_code == 200
    assert superuser.get(address).status_code == 200
    assert viewer.get(url(page, "history", rows_by_page[page].pk)).status_code == 200
    assert a_client("unprivileged", OPERATE).get(address).status_code == 403
    assert a_client("not staff", VIEW, is_staff=False).get(address).status_code == 302


LOOKUPS = [
    ("job", "kwargs__password__startswith"),
    ("job", "kwargs"),
    ("job", "args__0__startswith"),
    ("job", "metadata__token__gt"),
    ("job", "result__token__regex"),
    ("job", "state__in"),
    ("job", "batch__on_finish__kwargs__password__startswith"),
    ("job", "executions__log__contains"),
    ("job", "process__details__startswith"),
    ("hangedjob", "kwargs__password__startswith"),
    ("failure", "message__startswith"),
    ("failure", "execution__job__kwargs__password__startswith"),
    ("queue", "limit__gt"),
    ("taskstate", "name__startswith"),
    ("process", "details__startswith"),
    ("process", "job__kwargs__password__startswith"),
    ("process", "kind__startswith"),
    ("recurringtask", "kwargs__password__startswith"),
    ("recurringtask", "is_enabled__in"),
    ("batch", "on_finish__kwargs__password__startswith"),
    ("batch", "job__kwargs__password__startswith"),
    ("semaphore", "slots__job__kwargs__password__startswith"),
    ("operation", "scope__startswith"),
    ("operation", "undoes__items__job"),
]


def test_refused_lookups_cover_every_page() -> None:
    assert {page for page, _lookup in LOOKUPS} == set(PAGES)


@pytest.mark.parametrize(("page", "lookup"), LOOKUPS)
def test_lookup_not_offered_by_the_page_is_refused(
    rows_by_page: dict[str, Any], superuser: Client, page: str, lookup: str
) -> None:
    for value in ("a", "1"):
        assert (
            superuser.get(url(page), {lookup: value}).headers.get("Location") == f"{url(page)}?e=1"
        )


@pytest.mark.parametrize(
    ("page", "query"),
    [
        (
            "job",
            "state=failed&queue=default&task=x&failure=1&process=1&batch=0190a6c0-0000-7000-8000-000000000000&waits_for=a",
        ),
        ("failure", "state=all&hours=1&order=seen"),
        ("process", "kind__exact=worker"),
        ("recurringtask", "is_enabled__exact=1&is_from_code__exact=0"),
        ("batch", "finished=no"),
        ("semaphore", "which=all&q=a&p=1"),
    ],
)
def test_filter_offered_by_the_page_is_accepted(
    rows_by_page: dict[str, Any], viewer: Client, page: str, query: str
) -> None:
    assert viewer.get(f"{url(page)}?{query}").status_code == 200


@pytest.mark.parametrize("page", [page for page in PAGES if page != "recurringtask"])
def test_superuser_cannot_add_change_or_delete_rows(
    rows_by_page: dict[str, Any], superuser: Client, page: str
) -> None:
    pk = rows_by_page["job" if page == "hangedjob" else page].pk
    before = snapshot()

    assert superuser.get(url(page, "add")).status_code == 403
    assert superuser.post(url(page, "add"), {"name": "new", "task": "x"}).status_code == 403
    assert superuser.post(
        url(page, "change", pk), {"name": "new", "state": "ready"}
    ).status_code in (
        403,
        302 if page == "hangedjob" else 403,
    )
    assert superuser.post(url(page, "delete", pk), {"post": "yes"}).status_code == 403
    act(superuser, page, "delete_selected", pk)

    assert snapshot() == before


@pytest.mark.parametrize(("page", "action"), ACTIONS)
@pytest.mark.parametrize(
    "user", ["viewer", "other permissions", "no view permission", "not staff", "anonymous"]
)
def test_action_without_its_permission_is_refused(
    rows_by_page: dict[str, Any], page: str, action: str, user: str
) -> None:
    required = REQUIRED_PERMISSIONS[page, action]
    others = [name for name in OPERATE if name != required]
    client = {
        "viewer": lambda: a_client("user", VIEW),
        "other permissions": lambda: a_client("user", VIEW + others),
        "no view permission": lambda: a_client("user", OPERATE),
        "not staff": lambda: a_client("user", VIEW + OPERATE, is_staff=False),
        "anonymous": Client,
    }[user]()
    pk = rows_by_page[page].pk
    prepare(rows_by_page, action, page)
    before = snapshot()

    button_response = client.post(
        url(page, action, pk), {"confirmed": "yes", "value": VALUES.get(action, "")}
    )
    act(client, page, action, pk)
    act(client, page, action, pk, across="1")
    from_change_page = {
        "change-action": action,
        "action": action,
        "_selected_action": str(pk),
        "index": "0",
        "confirmed": "yes",
    }
    from_change_page["value"] = VALUES.get(action, "")
    client.post(url(page, "change", pk), from_change_page)

    assert button_response.status_code == (302 if user in ("not staff", "anonymous") else 403)
    assert snapshot() == before


@pytest.mark.parametrize(("page", "action"), ACTIONS)
@pytest.mark.parametrize("trigger", ["button", "selection", "all"])
def test_action_with_its_permission_is_executed(
    rows_by_page: dict[str, Any], page: str, action: str, trigger: str
) -> None:
    client = a_client("user", [*VIEW, REQUIRED_PERMISSIONS[page, action]])
    pk = rows_by_page[page].pk
    prepare(rows_by_page, action, page)
    before = snapshot()

    if trigger == "button":
        response = client.post(
            url(page, action, pk),
            fields_of(action),
        )
    else:
        response = act(client, page, action, pk, across="1" if trigger == "all" else "0")

    assert response.status_code == 302
    assert snapshot() != before
    assert LogEntry.objects.exists()


@pytest.mark.parametrize(("page", "action"), ACTIONS)
def test_button_is_shown_only_with_permission_for_its_action(
    rows_by_page: dict[str, Any], viewer: Client, operator: Client, page: str, action: str
) -> None:
    pk = rows_by_page[page].pk
    prepare(rows_by_page, action, page)
    address = f'action="{url(page, action, pk)}"'

    assert address in operator.get(url(page, "change", pk)).text
    assert address not in viewer.get(url(page, "change", pk)).text
    assert f'<option value="{action}">' in operator.get(url(page)).text
    assert f'<option value="{action}">' not in viewer.get(url(page)).text


def test_button_requires_a_csrf_token(rows_by_page: dict[str, Any], db: Any) -> None:
    client = a_client("operator", VIEW + OPERATE)
    client.handler.enforce_csrf_checks = True

    assert client.post(url("job", "retry", rows_by_page["job"].pk)).status_code == 403
    assert Job.objects.get().state == Job.State.FAILED


def test_get_request_to_an_action_changes_nothing(
    rows_by_page: dict[str, Any], operator: Client
) -> None:
    pk = rows_by_page["job"].pk

    response = operator.get(url("job", "retry", pk))

    assert response.headers["Location"] == url("job", "change", pk)
    assert Job.objects.get().state == Job.State.FAILED


def test_no_permissions_exist_besides_view_action_and_edit_permissions(
    db: Any,
) -> None:
    names = Permission.objects.filter(content_type__app_label="dbqueue").values_list(
        "codename", flat=True
    )

    assert set(names) == {*VIEW, *OPERATE, *EDIT}


@pytest.mark.parametrize("page", ["job", "failure", "queue", "taskstate", "recurringtask", "batch"])
def test_action_on_missing_row_returns_404(operator: Client, page: str) -> None:
    missing = "0190a6c0-0000-7000-8000-000000000000" if page in ("job", "batch") else "404"
    action = {"job": "retry", "failure": "mute", "recurringtask": "run", "batch": "discard"}.get(
        page, "pause"
    )

    assert operator.post(url(page, action, missing)).status_code == 404
