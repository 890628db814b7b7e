"""The choice of a backend, and so of its database, on all pages of the admin."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.test import Client

from django_dbqueue import task
from django_dbqueue.compat import task_backends
from django_dbqueue.core.chosen_backend import chosen_backend
from django_dbqueue.models import Job, Process, Queue, RecurringTask, TaskState
from django_dbqueue.models.expressions import now_plus

from .. import tasks
from .conftest import EDIT, OPERATE, VIEW, a_client, a_job, a_recurring_task, act
from .test_permissions import PAGES, url
from .test_recurring import FORM_DATA

pytestmark = pytest.mark.django_db(databases=["default", "other"])


@task(backend="other")
def elsewhere(a):
    return a


@pytest.fixture
def one_backend() -> None:
    """Offer the choice."""


@pytest.fixture
def editor(db: Any) -> Client:
    return a_client("editor", VIEW + OPERATE + EDIT)


@pytest.fixture
def there(rows_by_page: dict[str, Any]) -> dict[str, Any]:
    """Rows of the second database; the first has rows of each page too."""
    values = {"database": "other", "hostname": "there", "pid": 2, "kind": "worker"}
    process = Process.objects.using(values.pop("database")).create(
        name="worker@there:2:abc", expires_at=now_plus(3600), **values
    )
    return {
        "job": Job.objects.using("other").create(task="tests.tasks.add", queue="there", args=[1]),
        "queue": Queue.objects.using("other").create(name="there"),
        "taskstate": TaskState.objects.using("other").create(name="tests.tasks.there"),
        "process": process,
        "recurringtask": RecurringTask.objects.using("other").create(
            name="there", task="tests.tasks.nothing", cron="30 2 * * *"
        ),
    }


def messages_of(response: Any) -> list[Any]:
    return list(get_messages(response.wsgi_request))


def text_of(response: Any) -> str:
    assert response.status_code == 200
    return response.content.decode()


def test_list_without_a_choice_leads_to_the_address_of_the_first_backend(
    there: dict[str, Any], editor: Client
) -> None:
    response = editor.get(url("queue"))

    # An address that names its backend shows the same rows after TASKS is reordered.
    assert response.url == f"{url('queue')}?backend=default"
    text = text_of(editor.get(response.url))
    assert "<strong>default</strong>" in text
    assert '<a href="?backend=other">other</a>' in text
    assert "there" not in re.sub("<script.*?</script>", "", text, flags=re.S)


@pytest.mark.parametrize("page", PAGES)
def test_chosen_list_shows_the_rows_of_its_database(
    there: dict[str, Any], editor: Client, page: str
) -> None:
    text = text_of(editor.get(url(page), {"backend": "other"}))

    assert "<strong>other</strong>" in text
    if row := there.get(page):
        assert f"/{row.pk}/" in text or "there" in text
    assert "worker@here" not in text


@pytest.mark.parametrize("page", ["job", "queue", "taskstate", "process", "recurringtask"])
def test_chosen_row_is_shown_from_its_database(
    there: dict[str, Any], editor: Client, page: str
) -> None:
    address = url(page, "change", there[page].pk)

    assert "(other)" in text_of(editor.get(address, {"backend": "other"}))
    assert editor.get(address, {"backend": "default"}).status_code == 302 or page in (
        # Their ids are numbers, which another database gives out too.
        "queue",
        "taskstate",
        "recurringtask",
    )


def test_choice_is_kept_for_addresses_that_name_no_backend(
    there: dict[str, Any], editor: Client
) -> None:
    editor.get(url("queue"), {"backend": "other"})

    response = editor.get(url("job"), {"state": "ready"})

    assert response.status_code == 302
    assert response.url == f"{url('job')}?state=ready&backend=other"
    assert str(there["job"].pk) in text_of(editor.get(response.url))
    editor.get(url("queue"), {"backend": "default"})
    assert "<strong>default</strong>" in text_of(editor.get(url("job"), follow=True))


@pytest.mark.parametrize("page", PAGES)
def test_all_links_to_rows_name_the_backend(
    there: dict[str, Any], editor: Client, page: str
) -> None:
    text = text_of(editor.get(url(page), {"backend": "other"}))

    links = re.findall(r'href="(/admin/dbqueue/\w+/[^"]*(?:change/|\?)[^"]*)"', text)
    assert [
        link for link in links if "backend%3Dother" not in link and "backend=other" not in link
    ] == []


def test_all_links_of_the_overview_name_the_backend(there: dict[str, Any], editor: Client) -> None:
    text = text_of(editor.get("/admin/dbqueue/overview/", {"backend": "other"}))

    content = text[text.index('<div class="dbq-overview">') :]
    links = set(re.findall(r'href="([^"]*\?[^"]*)"', content)) - {"?backend=default"}
    assert len(links) > 3
    assert [link for link in links if "backend=other" not in link] == []


def test_filters_pages_and_search_keep_the_backend(there: dict[str, Any], editor: Client) -> None:
    Job.objects.using("other").bulk_create(
        Job(task="tests.tasks.add", queue="there", args=[1]) for _ in range(60)
    )
    text = text_of(editor.get(url("job"), {"backend": "other", "queue": "there"}))

    links = re.findall(r'href="(\?[^"]*)"', text)
    assert len(links) > 5
    assert {link for link in links if "backend=other" not in link} <= {"?", "?backend=default"}
    assert '<input type="hidden" name="backend" value="other">' in text


@pytest.mark.parametrize("trigger", ["button", "selection", "all"])
def test_action_changes_the_database_of_its_page(
    there: dict[str, Any], editor: Client, trigger: str
) -> None:
    here = a_job()
    # Meanwhile, another window has chosen the other backend.
    editor.get(url("job"), {"backend": "default"})

    pk = there["job"].pk
    if trigger == "button":
        page = text_of(editor.get(url("job", "change", pk), {"backend": "other"}))
        editor.get(url("job"), {"backend": "default"})
        (address,) = re.findall(r'action="([^"]*/discard/[^"]*)"', page)
        response = editor.post(address.replace("&amp;", "&"), {"confirmed": "yes"})
        assert "backend=other" in response.url
    elif trigger == "selection":
        response = act(editor, "discard", [pk], "?backend=other", confirmed="yes")
    else:
        query = "?backend=other&state=ready"
        question = act(editor, "discard", [pk], query, select_across="1", confirmed="yes")
        assert question.status_code in (200, 302)

    assert Job.objects.using("other").get(pk=pk).state == "discarded"
    here.refresh_from_db()
    assert here.state == "ready"


def test_button_of_an_old_window_acts_on_the_rows_that_it_shows(
    there: dict[str, Any], editor: Client
) -> None:
    Queue.objects.all().delete()
    here = Queue.objects.create(pk=there["queue"].pk, name="here")
    page = text_of(editor.get(url("queue", "change", here.pk), {"backend": "default"}))
    editor.get(url("queue"), {"backend": "other"})

    (address,) = re.findall(r'action="([^"]*/pause/[^"]*)"', page)
    editor.post(address.replace("&amp;", "&"))

    here.refresh_from_db()
    assert here.paused_at
    assert not Queue.objects.using("other").get().paused_at


def test_recurring_task_is_added_changed_and_deleted_in_the_chosen_database(
    there: dict[str, Any], editor: Client
) -> None:
    query = "?backend=other"
    form = {**FORM_DATA, "task": "tests.admin.test_backend_choice.elsewhere"}
    assert editor.post(url("recurringtask", "add") + query, form).status_code == 302
    row = RecurringTask.objects.using("other").get(name="report")
    assert not RecurringTask.objects.using("default").filter(name="report").exists()

    a_recurring_task(pk=row.pk, name="same id") if not RecurringTask.objects.filter(
        pk=row.pk
    ).exists() else None
    change = url("recurringtask", "change", row.pk) + query
    assert editor.post(change, {**form, "args": "[2]"}).status_code == 302
    assert RecurringTask.objects.using("other").get(name="report").args == [2]

    page = text_of(editor.get(change))
    editor.get(url("queue"), {"backend": "default"})
    (address,) = re.findall(r'href="([^"]*/delete/[^"]*)"', page)
    address = address.replace("&amp;", "&")
    assert "report" in text_of(editor.get(address))
    assert editor.post(address, {"post": "yes"}).status_code == 302
    assert not RecurringTask.objects.using("other").filter(name="report").exists()
    assert RecurringTask.objects.using("default").filter(pk=row.pk).exists()


@pytest.mark.parametrize("name", ["nowhere", "", "OTHER", "x" * 10_000, "\x00", "default,other"])
def test_unknown_backend_is_not_found(there: dict[str, Any], editor: Client, name: str) -> None:
    response = editor.get(url("job"), {"backend": name})

    assert response.status_code == (302 if name == "" else 404)


def test_choice_ends_with_the_request(there: dict[str, Any], editor: Client) -> None:
    editor.get(url("job"), {"backend": "other"})

    assert chosen_backend.get() is None
    assert Job.objects.all().db == "default"
    assert task_backends["default"].database == "default"


def test_backend_without_a_database_of_its_own_is_not_moved_by_a_choice(
    there: dict[str, Any], editor: Client, settings: Any
) -> None:
    ours = "django_dbqueue.backend.DatabaseBackend"
    settings.TASKS = {
        "default": {"BACKEND": ours, "QUEUES": []},
        "other": {"BACKEND": ours, "QUEUES": [], "OPTIONS": {"database": "other"}},
        "more": {"BACKEND": ours, "QUEUES": [], "OPTIONS": {"database": "default"}},
    }
    editor.get(url("job"), {"backend": "other"})

    assert task_backends["more"].database == "default"
    job = tasks.add.using(backend="more").enqueue(1)
    assert Job.objects.using("default").filter(pk=job.id).exists()


@pytest.mark.parametrize("how", ["one database", "no router"])
def test_nothing_is_to_choose(editor: Client, settings: Any, how: str) -> None:
    ours = "django_dbqueue.backend.DatabaseBackend"
    if how == "no router":
        settings.DATABASE_ROUTERS = ["tests.routers.ReplicaRouter"]
    else:
        settings.TASKS = {
            name: {"BACKEND": ours, "OPTIONS": {"database": "default"}} for name in ("a", "b")
        }

    row = a_recurring_task()
    for address in (url("queue"), url("recurringtask", "change", row.pk)):
        text = text_of(editor.get(address))

        assert "dbq-backends" not in text
        assert "backend=" not in text
        assert "(default)" not in text
    response = editor.post(url("queue"), {"action": "pause", "_selected_action": ["0"]})
    assert [str(each) for each in messages_of(response)] == ["Nothing was changed."]


def test_visitor_without_login_chooses_nothing(db: Any) -> None:
    client = Client()

    response = client.get(url("job"), {"backend": "other"})

    assert response.status_code == 302
    assert "login" in response.url
    assert not client.session.keys()


@pytest.mark.parametrize("method", ["get", "post"])
@pytest.mark.parametrize("page", ["change", "history", "delete", "run", "disable"])
def test_address_of_one_row_without_a_backend_asks_which(
    there: dict[str, Any], editor: Client, page: str, method: str
) -> None:
    RecurringTask.objects.all().delete()
    here = a_recurring_task(pk=there["recurringtask"].pk, name="here")
    editor.get(url("recurringtask"), {"backend": "other"})
    address = url("recurringtask", page, here.pk)

    response = getattr(editor, method)(f"{address}?_to=1")

    assert response.status_code == 300
    text = response.content.decode()
    for alias in ("default", "other"):
        assert f"{address}?_to=1&amp;" in text and f'backend={alias}">{alias}</a>' in text
    assert "here" not in text and "there" not in text
    for database in ("default", "other"):
        assert RecurringTask.objects.using(database).get().is_enabled
        assert not Job.objects.using(database).filter(task=here.task).exists()


def test_visitor_without_login_is_not_asked_which_backend(db: Any) -> None:
    response = Client().get(url("queue", "change", 1))

    assert response.status_code == 302
    assert "login" in response.url


def test_link_to_an_added_row_and_recent_actions_do_not_open_another_row(
    there: dict[str, Any], editor: Client
) -> None:
    form = {**FORM_DATA, "task": "tests.admin.test_backend_choice.elsewhere"}
    added = editor.post(url("recurringtask", "add") + "?backend=other", form)
    editor.get(url("queue"), {"backend": "default"})

    (link,) = re.findall(r'href="([^"]*)"', str(messages_of(added)[-1]))
    entry = LogEntry.objects.get()
    assert editor.get(link).status_code == 300
    assert editor.get(entry.get_admin_url()).status_code == 300
    assert entry.get_change_message() == "Added. (other)"


def test_history_names_the_backend_of_each_change(there: dict[str, Any], editor: Client) -> None:
    row = there["recurringtask"]
    query = "?backend=other"
    form = {**FORM_DATA, "task": "tests.admin.test_backend_choice.elsewhere"}
    editor.post(url("recurringtask", "change", row.pk) + query, form)
    editor.post(url("recurringtask", "disable", row.pk) + query)

    found = [each.get_change_message() for each in LogEntry.objects.order_by("pk")]

    assert [text.endswith(" (other)") for text in found] == [True, True]
    assert found[0].startswith("Changed ")
    assert "(other)" in text_of(editor.get(url("recurringtask", "history", row.pk) + query))


@pytest.mark.parametrize("trigger", ["button", "selection"])
def test_confirmation_and_result_name_the_backend(
    there: dict[str, Any], editor: Client, trigger: str
) -> None:
    pk = there["job"].pk

    def run(**fields: str) -> Any:
        if trigger == "button":
            return editor.post(url("job", "move", pk) + "?backend=other", fields)
        return act(editor, "move", [pk], "?backend=other", **fields)

    assert "<h1>Move to another queue (other)</h1>" in text_of(run())
    result = run(confirmed="yes", value="elsewhere")
    (message,) = messages_of(result)
    assert " (other)" in str(message)


@pytest.mark.parametrize("page", ["add", "delete"])
def test_pages_that_add_and_delete_name_the_backend(
    there: dict[str, Any], editor: Client, page: str
) -> None:
    pks = [] if page == "add" else [there["recurringtask"].pk]

    text = text_of(editor.get(url("recurringtask", page, *pks), {"backend": "other"}))

    assert re.search(r"<h1>[^<]* \(other\)</h1>", text)


def test_recurring_task_whose_jobs_are_in_another_database_is_refused(
    there: dict[str, Any], editor: Client
) -> None:
    task, backend = "tests.admin.test_backend_choice.elsewhere", "default"
    before = RecurringTask.objects.using(backend).count()
    row = RecurringTask.objects.using(backend).get()
    RecurringTask.objects.using(backend).update(is_from_code=False)
    query = f"?backend={backend}"

    for page in (url("recurringtask", "add"), url("recurringtask", "change", row.pk)):
        response = editor.post(page + query, {**FORM_DATA, "task": task})

        (error,) = response.context["adminform"].form.errors["task"]
        assert f"not in the database '{backend}'" in error
    assert RecurringTask.objects.using(backend).count() == before
