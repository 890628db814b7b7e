"""A rolling deploy: the last release and this code work on one database.

The old code is the commit in ``UPGRADE_FROM``, else the last tag ``v*``, else HEAD. The test's id names
it. If it is HEAD, a warning says that the same code plays both parts.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection, connections

from django_dbqueue.models import Batch, Execution, Job, Process
from django_dbqueue.models.enums import UNFINISHED
from django_dbqueue.models.expressions import Now

from ..conftest import log_of, most_at_a_time, until

SAME_CODE = "The same code plays both parts of the rolling deploy"
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(f"default:{SAME_CODE}"),
]

ALIAS = "upgraded"
# Long jobs, by the code that runs them first; and those that start at once.
BY_OLD, BY_NEW = "by the old one", "by the new one"
STARTED_AT_ONCE = ("plain", "once", "keyed", "limited", "stage", "member", "another")


def git(*arguments, folder=settings.BASE_DIR):
    # The checkout may belong to another user.
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments], cwd=folder, capture_output=True
    )


def last_release(folder=settings.BASE_DIR):
    if "UPGRADE_FROM" in os.environ:
        return os.environ["UPGRADE_FROM"]
    if not shutil.which("git"):
        return None
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD", folder=folder)
    return tag.stdout.decode().strip() if tag.returncode == 0 else "HEAD"


def warn_of_same_code(old, folder=settings.BASE_DIR):
    """Warn if the old code is that of HEAD."""
    commits = git("rev-parse", f"{old}^{{commit}}", "HEAD", folder=folder).stdout.split()
    if len(set(commits)) == 1:
        why = "no release is tagged yet, or its tag was not fetched"
        if old != "HEAD":
            why = f"HEAD is {old}"
        warnings.warn(f"{SAME_CODE}: {why}.", stacklevel=2)


OLD = last_release()


@pytest.fixture(scope="module")
def old_root(tmp_path_factory):
    archive = git("archive", "--format=zip", OLD, "django_dbqueue") if OLD else None
    if archive is None or archive.returncode:
        why = "The code of a release comes from git's history: " + (
            archive.stderr.decode() if archive else "there is no git."
        )
        pytest.fail(why) if "UPGRADE_FROM" in os.environ else pytest.skip(why)
    warn_of_same_code(OLD)
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as code:
        code.extractall(folder)
    return folder


class Code:
    """One version of the package in its own processes; both share project, database and folder."""

    def __init__(self, name, root, folder, config):
        self.name, self._folder = name, folder
        self.env = {
            "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}",
            "DJANGO_SETTINGS_MODULE": "upgrade.settings",
            "UPGRADE_CODE": name,
            "UPGRADE_ROOT": str(root),
            "UPGRADE_FOLDER": str(folder),
            "UPGRADE_DATABASES": json.dumps({"default": config}),
            "UPGRADE_OPTIONS": "{}",
        }
        command = [sys.executable, "-W", "error", "-m", "upgrade.shell"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._shell = subprocess.Popen(command, env={**os.environ, **self.env}, cwd=folder, **pipes)

    def call(self, source):
        """Run the source in one process for all calls."""
        self._shell.stdin.write(f"{json.dumps(source)}\n")
        self._shell.stdin.flush()
        error = json.loads(self._shell.stdout.readline())
        assert not error, error

    def migrate(self):
        self.call("call_command('migrate', verbosity=0)")

    def end(self):
        self._shell.communicate()
        assert self._shell.returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("upgrade")


@pytest.fixture(scope="module")
def new_database(folder, django_db_setup, django_db_blocker):
    """A second, empty database; tests read its rows with ``using(ALIAS)``."""
    mine = connection.settings_dict
    name = (
        str(folder / "queue.sqlite3")
        if connection.vendor == "sqlite"
        else f"{mine['NAME']}_{ALIAS}"
    )
    config = {
        key: mine[key] for key in ("ENGINE", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
    } | {"NAME": name}

    def execute(*statements):
        if connection.vendor != "sqlite":
            with django_db_blocker.unblock(), connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement.format(connection.ops.quote_name(name)))

    execute("DROP DATABASE IF EXISTS {}", "CREATE DATABASE {}")
    connections[ALIAS] = type(connections["default"])({**mine, **config}, ALIAS)
    yield config
    connections[ALIAS].close()
    del connections[ALIAS]
    execute("DROP DATABASE IF EXISTS {}")


@pytest.fixture(scope="module")
def versions(old_root, folder, new_database):
    codes = (
        Code("old", old_root, folder, new_database),
        Code("new", settings.BASE_DIR, folder, new_database),
    )
    yield codes
    for code in codes:
        code.end()


@pytest.fixture
def start(runqueue, tmp_path):
    """Start ``runqueue`` with this version."""

    def start(code, *arguments, **options):
        env = {**code.env, "UPGRADE_FOLDER": str(tmp_path), "UPGRADE_OPTIONS": json.dumps(options)}
        return runqueue(*arguments, cwd=tmp_path, **env)

    yield start
    for name in ("go", BY_OLD, BY_NEW):
        (tmp_path / name).touch()


@pytest.fixture
def marks(tmp_path):
    def marks(what=None):
        file = tmp_path / "marks"
        lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return [line for line in lines if what in (None, line["what"])]

    return marks


class Interval:
    def __init__(self, mark):
        self.began_at, self.ended_at = mark["began"], mark["ended"]


def jobs():
    return Job.objects.using(ALIAS)


def jobs_left(*states):
    return jobs().exclude(task="upgrade.tasks.tick").filter(state__in=states or UNFINISHED).exists()


def is_finished():
    # In this order: a batch's end enqueues its callback.
    return not Batch.objects.using(ALIAS).filter(finished_at=None).exists() and not jobs_left()


@pytest.mark.skipif(not shutil.which("git"), reason="There is no git.")
def test_rolling_deploy_starts_from_the_last_tag(tmp_path, monkeypatch):
    monkeypatch.delenv("UPGRADE_FROM", raising=False)

    def run(*arguments):
        made = git("-c", "user.name=a", "-c", "user.email=a@b.example", *arguments, folder=tmp_path)
        assert made.returncode == 0, made.stderr

    run("init")
    run("commit", "--allow-empty", "-m", "first")
    assert last_release(tmp_path) == "HEAD"
    with pytest.warns(UserWarning, match="no release is tagged yet"):
        warn_of_same_code("HEAD", tmp_path)

    run("tag", "v0.1.0")
    run("tag", "another")
    assert last_release(tmp_path) == "v0.1.0"
    with pytest.warns(UserWarning, match=r"HEAD is v0\.1\.0"):
        warn_of_same_code("v0.1.0", tmp_path)

    run("commit", "--allow-empty", "-m", "second")
    assert last_release(tmp_path) == "v0.1.0"
    warn_of_same_code("v0.1.0", tmp_path)


def test_hosted_tests_have_the_tags_of_releases():
    workflow = settings.BASE_DIR / ".github/workflows/ci.yml"
    if not workflow.exists():
        pytest.skip("A source distribution has no workflows.")
    _before, checkout, after = workflow.read_text().partition("uses: actions/checkout@")
    assert checkout and "fetch-depth: 0" in after.partition("- uses:")[0]


@pytest.mark.parametrize("release", [pytest.param(OLD, id=f"from {OLD}")])
def test_two_versions_share_a_queue_during_rolling_deploy(
    versions, start, marks, tmp_path, release
):
    old, new = versions
    at_once = connection.vendor != "sqlite"
    old.migrate()
    old.call("fill('before', 40); held.enqueue('over the migration')")
    old_one = start(old, *([] if at_once else ["--embedded"]))
    until(lambda: marks("holds") and marks("second") and marks("tick"))

    if at_once:
        # The old runqueue works, and a job is running, when the schema is migrated.
        new.migrate()
        old.call("fill('after the migration', 40)")
        new.call("fill('new, as the old one still runs', 40)")
        new_one = start(new)
        until(
            lambda: (
                Process.objects.using(ALIAS).alive().filter(kind=Process.Kind.WORKER).count() == 2
            ),
            120,
        )
        (tmp_path / "go").touch()
        ran = run_side_by_side(old, new, marks)
        # The old runqueue releases claimed jobs that have not started.
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
        new_one = start(new, "--embedded")

    until(is_finished, 120)
    ticks = len(marks("tick"))
    until(lambda: len(marks("tick")) > ticks)
    new_one.terminate()
    assert new_one.wait(60) == 0

    assert ran is None or ran == {("old", "old"), ("old", "new"), ("new", "old"), ("new", "new")}
    check_each_job_ended_once(marks)
    for child in (old_one, new_one):
        lines = log_of(child).splitlines()
        assert [
            line
            for line in lines
            if " INFO " not in line and not line.endswith("ZeroDivisionError: This is meant.")
        ] == []


def run_side_by_side(old, new, marks):
    """Enqueue from both until each version has run jobs of each. Return (runner, caller) pairs."""

    def ran():
        return {
            (mark["code"], mark["name"].partition(" ")[0])
            for mark in marks("plain")
            if " and " in mark["name"]
        }

    for number in range(20):
        for code in (old, new):
            code.call(f"fill('{code.name} and {number}', 40)")
        until(lambda: len(ran()) == 4 or not jobs_left("ready", "running"), 120)
        if len(ran()) == 4:
            break
    return ran()


def check_each_job_ended_once(marks):
    ended = Counter((job.task.rpartition(".")[2], job.state) for job in jobs().all())
    assert {(task, state) for task, state in ended if task != "tick"} == {
        *(
            (task, "successful")
            for task in (
                "plain",
                "coroutine",
                "atomic",
                "keyed",
                "limited",
                "second",
                "held",
                "finished",
            )
        ),
        ("fails", "failed"),
    }
    runs = Counter((mark["what"], mark["name"]) for mark in marks() if mark["what"] != "tick")
    assert {
        run: number for run, number in runs.items() if number > 1 and run != ("keyed", "everybody")
    } == {}
    for what in ("plain", "coroutine", "atomic", "limited", "second", "held", "finished", "fails"):
        assert len(marks(what)) == sum(
            number for (task, _state), number in ended.items() if task == what
        ), what
    assert (
        Job.objects.using(ALIAS)
        .filter(task="upgrade.tasks.tick")
        .exclude(state__in=["successful", "ready"])
        .count()
        == 0
    )
    assert not Batch.objects.using(ALIAS).filter(finished_at=None).exists()
    assert set(
        Execution.objects.using(ALIAS)
        .exclude(job__task="upgrade.tasks.fails")
        .values_list("outcome", flat=True)
    ) == {Execution.Outcome.SUCCESSFUL}
    assert most_at_a_time([Interval(mark) for mark in marks("limited")]) <= 2


@pytest.mark.parametrize("release", [pytest.param(OLD, id=f"from {OLD}")])
def test_each_version_recovers_jobs_of_the_other(versions, start, marks, tmp_path, release):
    old, new = versions
    new.migrate()
    at_once = connection.vendor != "sqlite"
    arguments = ["--threads", "8", *([] if at_once else ["--embedded"])]
    start = partial(start, beat_interval=0.5, dead_after=4)

    old.call(f"fill_with_lasting('{BY_OLD}')")
    old_one = start(old, *(["--processes", "2"] if at_once else arguments))
    until(lambda: len(began(marks, BY_OLD)) == len(STARTED_AT_ONCE))
    if at_once:
        new_one = start(new, *arguments)
        until(
            lambda: (
                Process.objects.using(ALIAS).alive().filter(kind=Process.Kind.DISPATCHER).count()
                == 2
            )
        )
        running = lasting().filter(state="running")
        worker, other = Process.objects.using(ALIAS).filter(pk__in=running.values("process"))
        os.kill(
            other.pid, signal.SIGSTOP
        )  # It does not start jobs that are recovered from the first worker.
        os.kill(worker.pid, signal.SIGKILL)
        # Its supervisor recovers it; the new dispatcher recovers the other worker's jobs.
        until(lambda: not running.filter(process=worker.pk).exists())
        assert running.exists()
        kill(old_one)
    else:
        kill(old_one)
        new_one = start(new, *arguments)
    let_group_end(tmp_path, BY_OLD)

    new.call(f"fill_with_lasting('{BY_NEW}')")
    until(lambda: len(began(marks, BY_NEW)) == len(STARTED_AT_ONCE))
    kill(new_one)
    # The supervisor recovers them at its start.
    old_one = start(old, *arguments)
    let_group_end(tmp_path, BY_NEW)
    old_one.terminate()
    assert old_one.wait(60) == 0

    for group, killed, other in ((BY_OLD, "old", "new"), (BY_NEW, "new", "old")):
        runs = began(marks, group)
        assert {code for _name, code in runs[: len(STARTED_AT_ONCE)]} == {killed}
        assert {code for _name, code in runs[len(STARTED_AT_ONCE) :]} == {other}
        counts = Counter(name for name, _code in runs)
        # Of two jobs that are claimed at the same time, either may get the slot.
        assert sorted([counts.pop("limited"), counts.pop("waiting")]) == [1, 2]
        others = {name: 2 for name in STARTED_AT_ONCE if name != "limited"}
        assert counts == {**others, "once": 1}
        assert {
            job.args[0]: outcomes_of(job) for job in lasting() if job.args[0].startswith(group)
        } == {
            **{f"{group}.{name}": ["lost", "successful"] for name in STARTED_AT_ONCE},
            f"{group}.stage": ["successful", "lost", "successful"],
            f"{group}.once": ["lost"],
            f"{group}.waiting": ["successful"],
        }
        assert lasting().get(task__endswith="once", args=[f"{group}.once"]).state == "failed"
        (batch,) = {
            job.batch_id
            for job in lasting()
            if job.args[0] in (f"{group}.member", f"{group}.another")
        }
        assert [mark["name"] for mark in marks("finished")].count(str(batch)) == 1


def lasting():
    return jobs().filter(task__startswith="upgrade.tasks.lasting")


def outcomes_of(job):
    return list(
        Execution.objects.using(ALIAS)
        .filter(job=job.pk)
        .order_by("attempt")
        .values_list("outcome", flat=True)
    )


def began(marks, group):
    """Return the name of each run, without its group, and the version that ran it."""
    names = [(mark["name"].split("."), mark["code"]) for mark in marks("began")]
    return [(name, code) for (of, name), code in names if of == group]


def kill(child):
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def let_group_end(tmp_path, group):
    """Let the group's jobs end. Lost jobs wait for some seconds, which are skipped here."""
    (tmp_path / group).touch()

    def is_finished_soon():
        lasting().filter(state="scheduled").update(run_after=Now())
        return is_finished()

    until(is_finished_soon)
