"""``runqueue --pidfile`` and ``--name``, and the SQL log, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from django.db import connections

from django_dbqueue.core.options import Options
from django_dbqueue.exceptions import InvalidOption
from django_dbqueue.models import Execution, Process

from .. import tasks
from ..conftest import LONG, log_of, until
from .test_runqueue import MANY

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "queue.pid"


def is_serving(child) -> bool:
    return Process.objects.filter(kind="dispatcher", supervisor__pid=child.pid).exists()


def test_pidfile_holds_the_process_id_and_is_removed_at_the_end(runqueue, path):
    child = runqueue("--pidfile", str(path), *MANY)
    until(lambda: is_serving(child))
    assert path.read_text() == f"{child.pid}\n"

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert not path.exists()


def test_second_process_is_refused_while_the_first_lives(runqueue, path):
    first = runqueue("--pidfile", str(path), *MANY)
    until(path.exists)
    until(path.read_text)

    second = runqueue("--pidfile", str(path), *MANY)

    assert second.wait(LONG) == 1
    assert f"belongs to the process {first.pid}, which is alive" in log_of(second)
    assert "Traceback" not in log_of(second)
    assert path.read_text() == f"{first.pid}\n"


def test_pidfile_of_a_killed_process_is_replaced(runqueue, path):
    first = runqueue("--pidfile", str(path), *MANY)
    until(lambda: is_serving(first))
    first.kill()

    # Not waited for before: the first process is a zombie meanwhile.
    second = runqueue("--pidfile", str(path), "--drain", *MANY)

    assert second.wait(LONG) == 0, log_of(second)
    assert not path.exists()
    first.wait()


@pytest.mark.parametrize("content", ["", "\n", "0", "999999999", "9" * 40, "{own}"], ids=str)
def test_stale_content_is_replaced(runqueue, path, content):
    path.write_text(content.format(own=os.getpid()))
    # The file is older than any process that has this id now.
    os.utime(path, (1, 1))

    child = runqueue("--pidfile", str(path), "--drain", *MANY)

    assert child.wait(LONG) == 0, log_of(child)
    assert not path.exists()


def test_pidfile_of_another_live_program_is_refused(runqueue, path):
    path.write_text(str(os.getpid()))

    child = runqueue("--pidfile", str(path), "--drain", *MANY)

    assert child.wait(LONG) == 1
    assert f"belongs to the process {os.getpid()}, which is alive" in log_of(child)
    assert path.read_text() == str(os.getpid())


@pytest.mark.parametrize("target", ["text", "folder", "link", "no folder", "device"])
def test_file_that_is_no_pidfile_is_left_unchanged(runqueue, path, tmp_path, target):
    precious = tmp_path / "precious"
    precious.write_text("12\nimport os\n")
    paths = {"text": precious, "folder": tmp_path, "link": path, "device": "/dev/null"}
    path.symlink_to(precious)

    child = runqueue("--pidfile", str(paths.get(target, tmp_path / "no" / "folder")), *MANY)

    assert child.wait(LONG) == 1
    assert f"The pidfile {str(paths.get(target, tmp_path / 'no' / 'folder'))!r}" in log_of(child)
    assert "orrect the path" in log_of(child) or "hoose another path" in log_of(child)
    assert "Traceback" not in log_of(child)
    assert precious.read_text() == "12\nimport os\n"


def test_pidfile_that_became_another_processs_is_not_removed(runqueue, path):
    child = runqueue("--pidfile", str(path), *MANY)
    until(lambda: is_serving(child))
    path.unlink()
    path.write_text("4711\n")

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert path.read_text() == "4711\n"


ALL_AT_ONCE = """
import sys, time
from django_dbqueue.runtime.pidfile import Pidfile, PidfileTaken
while time.time() < float(sys.argv[2]):
    pass
try:
    with Pidfile(sys.argv[1]):
        print("held", flush=True)
        time.sleep(2)
except PidfileTaken:
    print("refused", flush=True)
"""


def test_of_many_processes_that_find_a_stale_file_at_once_one_starts(path):
    path.write_text("999999999\n")
    at = str(time.time() + 3)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ALL_AT_ONCE, str(path), at], stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]

    said = sorted(child.communicate(timeout=LONG)[0].strip() for child in children)

    # On a busy machine, some may come after the first has ended.
    assert set(said) <= {"held", "refused"} and "held" in said
    assert not path.exists()


def test_pidfile_with_reload_is_of_the_process_that_serves(runqueue, path):
    child = runqueue("--reload", "--pidfile", str(path))
    serving = until(lambda: Process.objects.filter(kind="supervisor").first())

    assert path.read_text() == f"{serving.pid}\n"
    assert serving.pid != child.pid
    child.send_signal(signal.SIGTERM)
    child.wait(LONG)


# --name


def test_name_is_in_process_rows_and_log_lines(runqueue):
    child = runqueue("--name", "mail-1", *MANY)
    until(lambda: Process.objects.count() == 3)

    for process in Process.objects.all():
        assert process.name.startswith(f"{process.kind}-mail-1@{process.hostname}:{process.pid}:")
        # The row is written before the line.
        until(lambda name=process.name: name in log_of(child))


def test_name_comes_from_options_too(runqueue):
    runqueue(*MANY, DBQUEUE_OPTIONS=json.dumps({"name": "mail"}))

    until(lambda: Process.objects.filter(name__startswith="worker-mail@").exists())


def test_name_is_shown_in_ps(runqueue):
    pytest.importorskip("setproctitle")
    runqueue("--name", "mail", *MANY)
    until(lambda: Process.objects.count() == 3)

    kinds = {process.kind: process for process in Process.objects.all()}
    for process in [kinds["supervisor"]] if MANY else kinds.values():
        path = Path(f"/proc/{process.pid}/cmdline")
        until(lambda: path.read_text().startswith(f"runqueue {process.name}"))  # noqa: B023


def test_title_in_ps_is_unchanged_without_a_name(runqueue):
    child = runqueue(*MANY, fresh=True)
    until(lambda: Process.objects.count() == 3)

    with open(f"/proc/{child.pid}/cmdline") as file:
        assert "-m\0django\0runqueue" in file.read()


@pytest.mark.parametrize("name", ["a b", "x" * 51, "a\n", "a@b", "a:b", 5, None])
def test_bad_name_is_refused_with_the_remedy(name):
    with pytest.raises(InvalidOption, match=r"name=.* is not a name\. Give up to 50 letters"):
        Options(name=name)


def test_long_host_name_leaves_room_for_the_name(backend, monkeypatch):
    from django_dbqueue.runtime import heartbeat
    from django_dbqueue.runtime.shared_status import SharedStatus

    monkeypatch.setattr(heartbeat.socket, "gethostname", lambda: "h" * 300)
    options = backend.config.changed(name="n" * 50)
    made = heartbeat.Heartbeat(
        Process.Kind.DISPATCHER, "default", options, SharedStatus.private(), {}
    )
    made.start()
    try:
        assert Process.objects.get().name.startswith(f"dispatcher-{'n' * 50}@hhh")
    finally:
        made.stop()


# The SQL log

SQL_LOG = """
from tests.settings import *

DEBUG = True
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"django.db.backends": {"handlers": ["console"], "level": "DEBUG"}},
}
"""


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("silence_polling", [True, False, None])
def test_sql_log_has_statements_of_tasks_and_polls_unless_silenced(
    runqueue, tmp_path, silence_polling, embedded
):
    (tmp_path / "sql_log.py").write_text(SQL_LOG)
    result = tasks.record.enqueue()
    options = {} if silence_polling is None else {"silence_polling": silence_polling}

    child = runqueue(
        *["--embedded"] * embedded,
        PYTHONPATH=str(tmp_path),
        DJANGO_SETTINGS_MODULE="sql_log",
        DBQUEUE_OPTIONS=json.dumps(options),
    )
    result.wait(LONG)
    until(lambda: Execution.objects.exists())
    time.sleep(1)  # For some polls.
    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    (table,) = {connections["default"].ops.quote_name("tests_run")}
    lines = log_of(child).splitlines()
    assert any(f"INSERT INTO {table}" in line for line in lines)
    polls = [line for line in lines if "UPDATE" in line and "dbqueue_job" in line]
    assert bool(polls) == (silence_polling is False)
