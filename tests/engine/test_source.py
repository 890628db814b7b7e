"""OPTIONS["note_source"]: the source of a job, as its row records it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth import login, logout
from django.contrib.auth.models import User
from django.db import connection
from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, re_path
from django.utils.functional import SimpleLazyObject

from django_dbqueue import FanOut, batch, pipeline, task
from django_dbqueue.compat import task_backends
from django_dbqueue.core import source
from django_dbqueue.core.options import Options
from django_dbqueue.engine.recurring import run_now
from django_dbqueue.exceptions import InvalidOption
from django_dbqueue.models import Job, RecurringTask
from django_dbqueue.recurrence import target
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import LONG, address_of_the_test_database

pytestmark = pytest.mark.django_db
PROCESS = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture
def noted(monkeypatch):
    """Turn the option on, and clear what the process knows of itself."""
    backend = task_backends["default"]
    monkeypatch.setitem(vars(backend), "config", backend.config.changed(note_source=True))
    monkeypatch.setattr(sys, "argv", ["/srv/bin/gunicorn", "shop.wsgi"])
    source._program.cache_clear()
    yield
    source._program.cache_clear()


@pytest.fixture
def argv(noted, monkeypatch):
    def argv(*given):
        monkeypatch.setattr(sys, "argv", list(given))
        source._program.cache_clear()

    return argv


@task
def enqueue_another():
    return tasks.nothing.enqueue().id


@task
async def enqueue_another_async():
    return (await tasks.nothing.aenqueue()).id


@task
def split():
    return FanOut([1, 2])


def the_source():
    return Job.objects.order_by("pk").last().source


def enqueued_in(request, **kwargs):
    """A view that enqueues; its response tells nothing."""
    if "user" in request.GET:
        assert request.user.is_authenticated
    tasks.nothing.enqueue()
    return HttpResponse()


async def enqueued_in_async(request):
    if "user" in request.GET:
        await request.auser()
    await tasks.nothing.aenqueue()
    return HttpResponse()


def with_login(request):
    assert request.user.is_anonymous
    login(request, User.objects.get(username="alice"))
    tasks.nothing.enqueue()
    return HttpResponse()


def with_logout(request):
    assert request.user.is_authenticated
    logout(request)
    tasks.nothing.enqueue()
    return HttpResponse()


urlpatterns = [
    path("orders/<int:pk>/", enqueued_in),
    path("reset/<uidb64>/<token>/", enqueued_in),
    path("with/<str:name>", enqueued_in),
    path("in/", with_login),
    path("out/", with_logout),
    path("async/", enqueued_in_async),
    re_path(r"^any/(?P<rest>.*)$", enqueued_in),
]


@pytest.fixture
def web(noted, settings):
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = ["django_dbqueue.middleware.source_middleware", *settings.MIDDLEWARE]
    return Client()


@pytest.fixture
def alice(db):
    return User.objects.create_user("alice")


def test_nothing_is_recorded_by_default():
    tasks.nothing.enqueue()
    tasks.nothing.enqueue_many([(), ()])
    tasks.nothing.using(key="a").enqueue()

    assert set(Job.objects.values_list("source", flat=True)) == {None}


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_option_that_is_not_a_bool_is_refused(value):
    with pytest.raises(InvalidOption, match="note_source="):
        Options.from_settings({"note_source": value})


class TestProcess:
    def test_program_and_process_are_recorded(self, noted):
        tasks.nothing.enqueue()

        assert the_source() == {"process": PROCESS, "program": "gunicorn"}

    @pytest.mark.parametrize(
        ("argv_", "expected"),
        [
            (["manage.py", "migrate", "--secret=x"], {"command": "migrate"}),
            (["/venv/django/__main__.py", "check"], {"command": "check"}),
            (["manage.py", "no_such_command"], {"program": "manage.py"}),
            (["/venv/pytest/__main__.py", "tests"], {"program": "pytest"}),
            (["-c"], {"program": "-c"}),
            ([""], {}),
            ([], {}),
            (["/bin/\udcff\0x"], {"program": "?\ufffdx"}),
            (["/bin/" + "x" * 1000], {"program": "x" * 300}),
        ],
    )
    def test_program_or_command_without_arguments_is_recorded(self, argv, argv_, expected):
        argv(*argv_)

        tasks.nothing.enqueue()

        assert the_source() == {"process": PROCESS, **expected}

    @pytest.mark.django_db(transaction=True)
    def test_real_command_records_itself_and_its_own_process(self, tmp_path):
        script = tmp_path / "manage.py"
        script.write_text(
            "import sys, django; from django.core.management import execute_from_command_line as run; run(sys.argv)"
        )
        child = subprocess.run(
            [
                sys.executable,
                script,
                "shell",
                "-c",
                "from tests import tasks; tasks.nothing.enqueue()",
            ],
            env={
                **os.environ,
                **address_of_the_test_database(),
                "PYTHONPATH": os.getcwd(),
                "DBQUEUE_OPTIONS": json.dumps({"note_source": True}),
            },
            capture_output=True,
            text=True,
            timeout=LONG,
        )

        assert child.returncode == 0, child.stderr
        assert the_source()["command"] == "shell"
        assert the_source()["process"] != PROCESS


class TestWays:
    def test_many_jobs_share_one_source(self, noted, django_assert_max_num_queries):
        tasks.add.enqueue_many([(n,) for n in range(300)])

        assert Job.objects.filter(source={"process": PROCESS, "program": "gunicorn"}).count() == 300

    def test_latest_call_of_a_key_wins(self, noted, argv):
        one = tasks.nothing.using(key="k")
        one.enqueue()
        argv("manage.py", "migrate")
        one.enqueue()

        assert the_source()["command"] == "migrate"

    @pytest.mark.parametrize("conflict", ["skip", "once"])
    def test_ignored_call_of_a_key_leaves_the_source(self, noted, argv, conflict):
        one = tasks.nothing.using(key="k", on_conflict=conflict)
        one.enqueue()
        argv("manage.py", "migrate")
        one.enqueue()

        assert the_source()["program"] == "gunicorn"

    def test_later_call_with_the_option_off_clears_the_source(self, noted):
        one, backend = tasks.nothing.using(key="k"), task_backends["default"]
        one.enqueue()
        vars(backend)["config"] = backend.config.changed(note_source=False)
        one.enqueue()

        assert the_source() is None

    @pytest.mark.skipif(
        connection.vendor != "postgresql", reason="PostgreSQL alone has the function"
    )
    def test_later_call_from_sql_clears_the_source(self, noted):
        tasks.nothing.using(key="k").enqueue()
        with connection.cursor() as cursor:
            cursor.execute("SELECT dbqueue_enqueue('tests.tasks.nothing', key => 'k')")

        assert Job.objects.get().source is None

    def test_callback_of_a_batch_has_the_source_of_its_opener(self, noted, argv):
        with batch(on_finish=tasks.sum_up):
            tasks.nothing.enqueue()
        argv("manage.py", "runqueue")
        drain()

        callback = Job.objects.get(task=tasks.sum_up.module_path)
        assert callback.source == {"process": PROCESS, "program": "gunicorn"}

    def test_pipeline_keeps_its_source_and_its_new_jobs_name_it(self, noted, argv):
        pipeline(split, tasks.echo).enqueue()
        parent = Job.objects.get()
        argv("manage.py", "runqueue")
        drain()

        sources = {job.pk: job.source for job in Job.objects.all()}
        assert sources.pop(parent.pk) == {"process": PROCESS, "program": "gunicorn"}
        assert [each["job"] for each in sources.values()] == [str(parent.pk)] * 2

    def test_later_stage_keeps_the_source(self, noted, argv):
        pipeline(tasks.nothing, tasks.echo).enqueue()
        argv("manage.py", "runqueue")
        drain()

        assert the_source() == {"process": PROCESS, "program": "gunicorn"}

    @pytest.mark.parametrize("outer", [enqueue_another, enqueue_another_async])
    @pytest.mark.django_db(transaction=True)
    def test_job_enqueued_by_a_job_names_its_parent(self, noted, outer):
        parent = outer.enqueue().id
        drain()

        child = Job.objects.get(task=tasks.nothing.module_path)
        assert child.source["job"] == parent
        assert "job" not in Job.objects.get(pk=parent).source
        tasks.nothing.enqueue()
        assert "job" not in the_source()

    def test_recurring_task_is_named(self, noted):
        RecurringTask.objects.create(
            name="nightly", task="tests.tasks.nothing", cron="0 2 * * *", timezone="UTC"
        )

        run_now(RecurringTask.objects.all(), target.enqueue)

        assert the_source()["recurring"] == "nightly"
        tasks.nothing.enqueue()
        assert "recurring" not in the_source()

    def test_retried_and_released_jobs_keep_their_source(self, noted, claim):
        tasks.fail.enqueue()
        before = the_source()
        drain()
        Job.objects.failed().retry()
        claim()

        assert the_source() == before


class TestRequests:
    def test_path_without_query_is_recorded(self, web):
        web.get("/orders/7/?token=secret#x")

        assert the_source() == {"process": PROCESS, "program": "gunicorn", "path": "/orders/7/"}

    def test_nothing_of_a_request_is_left_after_it(self, web):
        web.get("/orders/7/")
        tasks.nothing.enqueue()

        assert "path" not in the_source()

    def test_path_is_forgotten_after_an_error(self, web):
        with pytest.raises(AssertionError):
            web.get("/orders/7/?user")
        tasks.nothing.enqueue()

        assert "path" not in the_source()

    def test_path_with_a_hidden_part_is_recorded_as_its_route(self, web):
        web.get("/reset/MTc/c9xsecret/")

        assert the_source()["path"] == "/reset/<uidb64>/<token>/"

    @pytest.mark.parametrize(
        "address", ["/any/%00", "/any/%ff%fe", "/any/%ED%A0%80", "/any/" + "%F0%9F%98%80" * 900]
    )
    def test_hostile_path_does_not_fail_the_enqueue(self, web, address):
        assert web.get(address).status_code == 200

        assert len(the_source()["path"]) <= 300

    def test_loaded_user_is_recorded(self, web, alice):
        web.force_login(alice)
        web.get("/orders/7/?user")

        assert the_source()["user"] == str(alice.pk)
        assert the_source()["username"] == "alice"

    def test_user_is_not_loaded_for_the_note(self, web, alice):
        web.force_login(alice)
        response = web.get("/orders/7/")

        assert "user" not in the_source()
        assert "Cookie" not in response.headers.get("Vary", "")

    def test_user_that_logs_in_is_recorded(self, web, alice):
        web.get("/in/")

        assert the_source()["username"] == "alice"

    def test_user_that_has_logged_out_is_not_recorded(self, web, alice):
        web.force_login(alice)
        web.get("/out/")

        assert "user" not in the_source()

    @pytest.mark.parametrize(
        "user", [lambda: None, lambda: "alice", lambda: SimpleLazyObject(lambda: 1 / 0)]
    )
    def test_other_users_are_not_recorded(self, noted, rf, user):
        request = rf.get("/x/")
        request.user = user()
        with source.request_noted(request):
            tasks.nothing.enqueue()

        assert "user" not in the_source()

    def test_deferred_user_is_recorded_without_a_query(self, noted, rf, alice):
        request = rf.get("/x/")
        request.user = User.objects.only("id").get()
        with source.request_noted(request), CaptureQueriesContext(connection) as queries:
            tasks.nothing.enqueue()

        assert not [query for query in queries if User._meta.db_table in query["sql"]]
        assert (the_source()["path"], the_source()["user"]) == ("/x/", str(alice.pk))
        assert "username" not in the_source()

    @pytest.mark.parametrize("broken", ["is_authenticated", "pk", "get_username", "__str__"])
    def test_error_of_the_user_class_leaves_the_path(self, noted, rf, broken):
        def fail(self):
            raise RuntimeError("no profile")

        values = {"is_authenticated": True, "pk": 1, "get_username": lambda self: "alice"}
        values[broken] = fail if broken == "get_username" else property(fail)
        if broken == "__str__":
            values["pk"] = type("Key", (), {"__str__": fail, "__eq__": fail, "__hash__": None})()
        request = rf.get("/x/")
        request.user = type("Member", (), values)()
        with source.request_noted(request):
            tasks.nothing.enqueue()

        assert the_source() == {"process": PROCESS, "program": "gunicorn", "path": "/x/"}

    def test_error_of_the_request_leaves_the_path(self, noted, rf):
        class Request(type(rf.get("/x/"))):
            @property
            def user(self):
                raise RuntimeError("no session")

        request = rf.get("/x/")
        request.__class__ = Request
        with source.request_noted(request):
            tasks.nothing.enqueue()

        assert the_source()["path"] == "/x/"

    def test_user_of_another_class_is_recorded(self, noted, rf):
        request = rf.get("/x/")
        pk = uuid4()
        request.user = SimpleLazyObject(lambda: SimpleNamespace(is_authenticated=True, pk=pk))
        str(request.user)
        with source.request_noted(request):
            tasks.nothing.enqueue()

        assert the_source()["user"] == str(pk)

    @pytest.mark.django_db(transaction=True)
    def test_async_view_records_path_and_user(self, web, alice, settings):
        settings.TASKS = {
            "default": {
                **settings.TASKS["default"],
                "OPTIONS": {"database": "default", "note_source": True},
            }
        }

        async def get():
            client = AsyncClient()
            await client.aforce_login(alice)
            await asyncio.gather(client.get("/async/?user"), client.get("/orders/7/"))

        async_to_sync(get)()

        sources = [job.source for job in Job.objects.all()]
        assert {(each["path"], each.get("username")) for each in sources} == {
            ("/async/", "alice"),
            ("/orders/7/", None),
        }

    @pytest.mark.django_db(transaction=True)
    def test_jobs_enqueued_on_commit_have_the_request(self, web, settings, monkeypatch):
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        web.get("/orders/7/")

        assert the_source()["path"] == "/orders/7/"
