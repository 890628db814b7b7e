"""A rolling deploy: the code of the last release and this code work on one database, and nobody notices.

The old code is that of the last tag ``v*``; or of the commit that ``UPGRADE_FROM`` names; or, as long as there is neither, of
HEAD, so that what is seen then is that two copies of one code get along. The name of the test says which.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection, connections

from django_dbqueue.models import Batch, Execution, Job, Process

from ..conftest import log_of, most_at_a_time, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

ALIAS = "upgraded"


def git(*arguments):
    # A checkout may belong to somebody else than who runs the tests.
    return subprocess.run(["git", "-c", "safe.directory=*", *arguments], cwd=settings.BASE_DIR, capture_output=True)


def last_release():
    if "UPGRADE_FROM" in os.environ:
        return os.environ["UPGRADE_FROM"]
    if not shutil.which("git"):
        return None
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD")
    return tag.stdout.decode().strip() if tag.returncode == 0 else "HEAD"


OLD = last_release()


@pytest.fixture(scope="module")
def old_root(tmp_path_factory):
    archive = git("archive", "--format=zip", OLD, "django_dbqueue") if OLD else None
    if archive is None or archive.returncode:
        why = "The code of a release comes from git's history: " + (archive.stderr.decode() if archive else "there is no git.")
        pytest.fail(why) if "UPGRADE_FROM" in os.environ else pytest.skip(why)
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as code:
        code.extractall(folder)
    return folder


class Code:
    """One version of the queue, in processes of its own. Both have the same project, database and folder."""

    def __init__(self, name, root, folder, runqueue):
        self._runqueue = runqueue
        self.env = {
            "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}",
            "DJANGO_SETTINGS_MODULE": "upgrade.settings",
            "UPGRADE_CODE": name,
            "UPGRADE_ROOT": str(root),
            "UPGRADE_FOLDER": str(folder),
            "UPGRADE_DATABASES": json.dumps({"default": database(folder)}),
        }
        self.name = name
        self._folder = folder

    def migrate(self):
        self._run("-m", "django", "migrate", "--verbosity", "0")

    def call(self, call):
        self._run("-c", f"import django; django.setup(); from upgrade.tasks import *; {call}")

    def runqueue(self, *arguments):
        return self._runqueue(*arguments, cwd=self._folder, **self.env)

    def _run(self, *arguments):
        command = [sys.executable, "-W", "error", *arguments]
        done = subprocess.run(command, env={**os.environ, **self.env}, cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def database(folder):
    """A database of its own, beside that of the tests."""
    mine = connection.settings_dict
    name = str(folder / "queue.sqlite3") if connection.vendor == "sqlite" else f"{mine['NAME']}_{ALIAS}"
    return {key: mine[key] for key in ("ENGINE", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")} | {"NAME": name}


@pytest.fixture
def empty_database(tmp_path):
    """Its rows can be read in the test with ``using(ALIAS)``."""
    config = database(tmp_path)

    def execute(*statements):
        if connection.vendor != "sqlite":
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement.format(connection.ops.quote_name(config["NAME"])))

    execute("DROP DATABASE IF EXISTS {}", "CREATE DATABASE {}")
    connections[ALIAS] = type(connections["default"])({**connection.settings_dict, **config}, ALIAS)
    yield
    connections[ALIAS].close()
    del connections[ALIAS]
    execute("DROP DATABASE IF EXISTS {}")


@pytest.fixture
def marks(tmp_path):
    def marks(what=None):
        file = tmp_path / "marks"
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return [line for line in lines if what in (None, line["what"])]

    return marks


@pytest.fixture
def old(old_root, tmp_path, empty_database, runqueue):
    yield Code("old", old_root, tmp_path, runqueue)
    (tmp_path / "go").touch()


@pytest.fixture
def new(tmp_path, empty_database, runqueue):
    return Code("new", settings.BASE_DIR, tmp_path, runqueue)


class Interval:
    def __init__(self, mark):
        self.began_at, self.ended_at = mark["began"], mark["ended"]


def jobs():
    return Job.objects.using(ALIAS)


def have_ended():
    return not jobs().filter(finished_at=None).exclude(task="upgrade.tasks.tick").exists()


@pytest.mark.parametrize("release", [pytest.param(OLD, id=f"from {OLD}")])
def test_two_versions_of_the_code_work_off_one_queue_during_a_rolling_deploy(old, new, marks, tmp_path, release):
    at_once = connection.vendor != "sqlite"
    old.migrate()
    old.call("fill('before', 40); held.enqueue('over the migration')")
    old_one = old.runqueue(*([] if at_once else ["--embedded"]))
    until(lambda: marks("holds") and marks("second") and marks("tick"))

    if at_once:
        # The old runqueue runs, with a job that has begun under the schema from before.
        new.migrate()
        old.call("fill('after the migration', 40)")
        new.call("fill('new, as the old one still runs', 40)")
        new_one = new.runqueue()
        until(lambda: Process.objects.using(ALIAS).alive().filter(kind=Process.Kind.WORKER).count() == 2, 120)
        (tmp_path / "go").touch()
        ran = beside_each_other(old, new, marks)
        # What the old one has claimed and not begun, it gives back.
        new.call("fill('last', 200)")
        old_one.terminate()
        assert old_one.wait(60) == 0
    else:
        (tmp_path / "go").touch()
        old.call("fill('last', 200)")
        old_one.terminate()
        assert old_one.wait(60) == 0
        new.migrate()
        old.call("fill('after the migration', 40)")
        new.call("fill('new', 40)")
        ran = None
        new_one = new.runqueue("--embedded")

    until(have_ended, 120)
    ticks = len(marks("tick"))
    until(lambda: len(marks("tick")) > ticks)
    new_one.terminate()
    assert new_one.wait(60) == 0

    assert ran is None or ran == {("old", "old"), ("old", "new"), ("new", "old"), ("new", "new")}
    everything_ended_once(marks)
    for child in (old_one, new_one):
        lines = log_of(child).splitlines()
        assert [line for line in lines if " INFO " not in line and not line.endswith("ZeroDivisionError: This is meant.")] == []


def beside_each_other(old, new, marks):
    """More work of both, until each has run jobs of each. Returns who has run whose."""

    def ran():
        return {(mark["code"], mark["name"].partition(" ")[0]) for mark in marks("plain") if " and " in mark["name"]}

    for number in range(20):
        for code in (old, new):
            code.call(f"fill('{code.name} and {number}', 40)")
        until(have_ended, 120)
        if len(ran()) == 4:
            break
    return ran()


def everything_ended_once(marks):
    ended = Counter((job.task.rpartition(".")[2], job.state) for job in jobs().all())
    assert {(task, state) for task, state in ended if task != "tick"} == {
        *((task, "successful") for task in ("plain", "coroutine", "atomic", "keyed", "limited", "second", "held", "finished")),
        ("fails", "failed"),
    }
    runs = Counter((mark["what"], mark["name"]) for mark in marks() if mark["what"] != "tick")
    assert {run: number for run, number in runs.items() if number > 1 and run != ("keyed", "everybody")} == {}
    for what in ("plain", "coroutine", "atomic", "limited", "second", "held", "finished", "fails"):
        assert len(marks(what)) == sum(number for (task, _state), number in ended.items() if task == what), what
    assert Job.objects.using(ALIAS).filter(task="upgrade.tasks.tick").exclude(state__in=["successful", "ready"]).count() == 0
    assert not Batch.objects.using(ALIAS).filter(finished_at=None).exists()
    assert set(Execution.objects.using(ALIAS).exclude(job__task="upgrade.tasks.fails").values_list("outcome", flat=True)) == {
        Execution.Outcome.SUCCESSFUL
    }
    assert most_at_a_time([Interval(mark) for mark in marks("limited")]) <= 2
