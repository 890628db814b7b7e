"""``runqueue --backend default,other``: several databases under one supervisor process."""

from __future__ import annotations

import os
import signal
import time
from urllib.parse import urlsplit

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import proxy as proxies
from .. import tasks
from ..conftest import LONG, log_of, until

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.timeout(240),
]

PING_PONG = """
import time
from django_dbqueue import task

@task
def play(rounds, backend):
    time.sleep(0.05)
    if rounds:
        play.using(backend=backend).enqueue(rounds - 1, "default" if backend == "other" else "other")
"""

WITH_PING_PONG = """
from tests.settings import *
for backend in TASKS.values():
    backend["OPTIONS"]["task_modules"] = ["ping_pong"]
"""


def successful(database):
    return Job.objects.using(database).filter(state="successful").count()


def kinds(database):
    return sorted(Process.objects.using(database).values_list("kind", flat=True))


@pytest.mark.parametrize(
    "names",
    [
        ["--backend", "default,other"],
        ["--backend", " other , default,other"],
        ["--backend", "default", "--backend", "other"],
        ["--backend", "all"],
    ],
    ids=" ".join,
)
def test_jobs_of_all_named_backends_run(runqueue, names):
    for backend in ("default", "other"):
        tasks.add.using(backend=backend).enqueue_many([(1,)] * 20)

    child = runqueue("--drain", "--embedded", *names)

    assert child.wait(LONG) == 0, log_of(child)
    assert (successful("default"), successful("other")) == (20, 20)
    assert (kinds("default"), kinds("other")) == ([], [])


def test_only_the_default_backend_is_served_without_the_flag(runqueue):
    tasks.add.using(backend="other").enqueue(1)
    tasks.add.enqueue(1)

    assert runqueue("--drain", "--embedded").wait(LONG) == 0

    assert (successful("default"), successful("other")) == (1, 0)


def test_each_backend_has_its_own_processes_in_its_database(runqueue):
    child = runqueue("--backend", "all")
    expected = ["dispatcher", "supervisor", "worker"]
    until(lambda: kinds("default") == kinds("other") == expected)

    pids = {
        Process.objects.using(database).get(kind="supervisor").pid
        for database in ("default", "other")
    }
    child.send_signal(signal.SIGTERM)

    assert pids == {child.pid}
    assert child.wait(LONG) == 0
    assert kinds("default") == kinds("other") == []


def test_drain_ends_when_jobs_have_stopped_to_enqueue_each_other(runqueue, tmp_path):
    (tmp_path / "ping_pong.py").write_text(PING_PONG)
    (tmp_path / "with_ping_pong.py").write_text(WITH_PING_PONG)
    Job.objects.create(task="ping_pong.play", queue="default", args=[60, "other"])

    child = runqueue(
        *("--drain", "--backend", "all"),
        PYTHONPATH=str(tmp_path),
        DJANGO_SETTINGS_MODULE="with_ping_pong",
    )

    assert child.wait(LONG) == 0, log_of(child)
    assert (successful("default"), successful("other")) == (31, 30)


def test_drain_exits_with_1_if_a_job_of_any_backend_failed(runqueue):
    tasks.fail.using(backend="other").enqueue()
    tasks.add.enqueue(1)

    child = runqueue("--drain", "--backend", "all", "--embedded")

    assert child.wait(LONG) == 1
    assert successful("default") == 1


def test_killed_worker_of_one_backend_is_replaced_and_others_stay(runqueue):
    child = runqueue("--backend", "all")
    until(lambda: kinds("default") == kinds("other") == ["dispatcher", "supervisor", "worker"])
    kept = Process.objects.get(kind="worker")

    killed = Process.objects.using("other").get(kind="worker")
    os.kill(killed.pid, signal.SIGKILL)
    until(
        lambda: Process.objects.using("other").filter(kind="worker").exclude(pk=killed.pk).exists()
    )

    assert Process.objects.get(kind="worker").pk == kept.pk
    assert log_of(child).count("was killed by signal 9") >= 1


THROUGH_PROXY = """
import os
from tests.settings import *
DATABASES["other"].update(HOST="127.0.0.1", PORT=os.environ["OTHER_PORT"])
TASKS["other"]["OPTIONS"]["give_up_after"] = float(os.environ.get("GIVE_UP", 300))
"""


@pytest.fixture
def through_proxy(runqueue, tmp_path):
    """Start runqueue for both backends, with a proxy in front of the second database."""
    if connections["default"].vendor == "sqlite":
        pytest.skip("There is no connection to cut.")
    proxy, url = proxies.to_the_test_database()
    (tmp_path / "through_proxy.py").write_text(THROUGH_PROXY)

    def start(*arguments, **env):
        env |= {"PYTHONPATH": str(tmp_path), "DJANGO_SETTINGS_MODULE": "through_proxy"}
        port = str(urlsplit(url).port)
        return runqueue("--backend", "all", *arguments, OTHER_PORT=port, **env)

    start.proxy = proxy
    yield start
    proxy.close()


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_outage_of_one_database_does_not_affect_the_other_backend(through_proxy, how):
    child = through_proxy()
    until(lambda: kinds("default") == kinds("other") == ["dispatcher", "supervisor", "worker"])
    getattr(through_proxy.proxy, how)()

    began = time.monotonic()
    while time.monotonic() - began < 12:
        assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    worker = Process.objects.get(kind="worker")
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: Process.objects.filter(kind="worker").exclude(pk=worker.pk).exists())
    through_proxy.proxy.heal()
    assert tasks.add.using(backend="other").enqueue(1).wait(LONG).return_value == 1
    assert child.poll() is None


def test_backend_is_served_while_the_other_waits_for_its_database(through_proxy):
    through_proxy.proxy.cut()
    child = through_proxy()
    until(lambda: "runqueue: database unavailable, retrying" in log_of(child))

    assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    through_proxy.proxy.heal()
    assert tasks.add.using(backend="other").enqueue(1).wait(LONG).return_value == 1


def test_all_shut_down_in_order_if_one_gives_up_on_its_database(through_proxy):
    through_proxy.proxy.cut()
    result = tasks.tell_and_sleep.enqueue(3)

    child = through_proxy(GIVE_UP="2")

    assert child.wait(LONG) == 1
    assert "Check that its server runs" in log_of(child)
    assert "Traceback" not in log_of(child)
    assert Execution.objects.filter(outcome="lost").count() == 0
    assert Job.objects.get(pk=result.id).state in ("successful", "ready")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["--backend", "default,nowhere"], "There is no backend 'nowhere' in TASKS."),
        (["--backend", ""], "There is no backend '' in TASKS. Choose from default, other."),
        (["--backend", "default,"], "There is no backend '' in TASKS."),
        (["--backend", "all,default"], "There is no backend 'all' in TASKS."),
        (["--backend", "all", "--threads", "0"], "threads=0 is not a whole number"),
        (["--max-memory", "0"], "max_memory=0 is not a whole number of at least 1"),
        (["--max-memory", "many"], "invalid int value: 'many'"),
        (["--max-age", "-1"], "max_age=-1.0 is not a number of seconds above 0"),
    ],
)
def test_bad_arguments_are_named_with_their_remedy(runqueue, names, message):
    child = runqueue(*names)

    assert child.wait(LONG) != 0
    assert message in log_of(child)
    assert "Traceback" not in log_of(child)
