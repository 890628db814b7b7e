"""SIGHUP: settings are read anew, and processes are replaced one by one; with real processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.runtime.process_identity import lives

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Run

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.timeout(400),
]

# On SQLite, each statement of several processes waits for the others.
LOAD = 300 if connections["default"].vendor == "sqlite" else 1000


class Service:
    """``runqueue`` with a settings module of its own, which a test may rewrite."""

    def __init__(self, runqueue, folder, *arguments, text="", fresh=False, **options):
        self._folder = folder
        self.write(text, **options)
        self.process = runqueue(
            *arguments,
            fresh=fresh,
            PYTHONPATH=str(folder),
            DJANGO_SETTINGS_MODULE="own_settings",
            PYTHONDONTWRITEBYTECODE="1",
        )

    def write(self, text="", **options):
        more = f'TASKS["default"]["OPTIONS"].update({options!r})'
        path = self._folder / "own_settings.py"
        path.write_text(f"from tests.settings import *\n{more}\n{text}\n")

    def hang_up(self):
        self.process.send_signal(signal.SIGHUP)

    def log_has(self, text, times=1):
        return until(lambda: self.log.count(text) >= times)

    @property
    def log(self):
        return log_of(self.process)


@pytest.fixture
def service(runqueue, tmp_path):
    def start(*arguments, **values):
        return Service(runqueue, tmp_path, *arguments, **values)

    return start


def alive(kind="worker", database="default"):
    return set(Process.objects.using(database).filter(kind=kind).values_list("name", flat=True))


def workers_with(number, threads):
    """Return a condition: this number of workers run, each with that number of threads."""

    def holds():
        found = Process.objects.filter(kind="worker")
        return [each.details["threads"] for each in found] == [threads] * number

    return holds


def test_processes_are_replaced_under_load_and_no_job_is_lost(service):
    one = service("--processes", "2", threads=2)
    until(workers_with(2, 2))
    old = alive() | alive("dispatcher")
    tasks.record.enqueue_many([()] * LOAD)
    tasks.sleep.enqueue_many([(0.3,)] * 40)
    until(Run.objects.exists)

    one.write(threads=3)
    one.hang_up()
    one.log_has("was reloaded and runs")
    one.write(threads=4)
    one.hang_up()

    def replaced_under_load():
        tasks.record.enqueue_many([()] * 20)
        return workers_with(2, 4)()

    until(replaced_under_load)
    tasks.record.enqueue_many([()] * LOAD)
    until(lambda: not Job.objects.exclude(state="successful").exists())
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}
    assert Execution.objects.count() == Job.objects.count() > 2 * LOAD
    assert Run.objects.count() == Job.objects.filter(task="tests.tasks.record").count()
    assert Execution.objects.values("process").distinct().count() > 2
    until(lambda: not old & (alive() | alive("dispatcher")))
    until(lambda: len(alive("dispatcher")) == len(alive("supervisor")) == 1)
    assert "signal" not in one.log
    assert "lost" not in one.log


def test_running_job_ends_in_its_old_process_however_long_it_takes(service, tmp_path):
    one = service("--shutdown-timeout", "0.5")
    until(lambda: alive())
    line, end = tmp_path / "line", tmp_path / "end"
    result = tasks.leave_line.enqueue(str(line), until=str(end))
    until(line.exists)
    old = alive()

    one.hang_up()
    one.log_has("serves", times=2)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    time.sleep(2)  # Longer than the timeout of a shutdown.
    assert Job.objects.get(pk=result.id).state == "running"
    end.touch()

    result.wait(LONG)
    assert Execution.objects.get(job=result.id).process in old
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}


def test_groups_and_numbers_of_processes_are_those_of_the_new_settings(service):
    one = service(workers=[{"queues": "mail", "processes": 2}])
    until(lambda: len(alive()) == 2)

    one.write(workers=[{"queues": "reports", "threads": 1}, {"queues": "*"}, {"queues": "*"}])
    one.hang_up()

    def queues():
        found = Process.objects.filter(kind="worker")
        return sorted(each.details["queues"] for each in found) == ["*", "*", "reports"]

    until(queues)
    assert "for the queues reports; *." in one.log


def test_command_line_still_overrides_new_settings(service):
    one = service("--threads", "1", threads=2)
    until(workers_with(1, 1))
    old = alive()

    one.write(threads=5, processes=2)
    one.hang_up()

    until(lambda: workers_with(2, 1)() and not old & alive())


BROKEN = {
    "syntax": ("def", {}, "SyntaxError"),
    "option": ("", {"thread": 3}, "'thread' is not an option. Did you mean 'threads'?"),
    "tasks": ("", {"task_modules": ["no_such_tasks"]}, "Tasks cannot be imported"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_settings_change_nothing(service, how):
    text, options, message = BROKEN[how]
    one = service()
    until(lambda: alive() and alive("dispatcher"))
    before = alive() | alive("dispatcher") | alive("supervisor")

    one.write(text, **options)
    one.hang_up()

    one.log_has("settings not reloaded, all processes stay")
    assert message in one.log
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    assert alive() | alive("dispatcher") | alive("supervisor") == before


def test_settings_are_reloaded_once_they_are_mended(service):
    one = service(threads=2)
    until(workers_with(1, 2))
    one.write("def")
    one.hang_up()
    one.log_has("settings not reloaded")

    one.write(threads=3)
    one.hang_up()

    until(workers_with(1, 3))


DIES_IN_A_CHILD = """
import multiprocessing, os
if multiprocessing.current_process().name == "worker":
    os._exit(9)
"""


def test_old_process_goes_on_while_its_successors_die(service):
    one = service(threads=2)
    until(workers_with(1, 2))
    old = alive()

    one.write(DIES_IN_A_CHILD, threads=3)
    one.hang_up()
    one.log_has("died at its start", times=3)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    assert alive() == old

    one.write(threads=3)

    until(workers_with(1, 3))


def test_new_code_of_a_task_runs_after_reload(service, tmp_path):
    code = "from django_dbqueue import task\n@task\ndef version():\n    return {}\n"
    (tmp_path / "versions.py").write_text(code.format(1))
    one = service(task_modules=["versions"])
    until(lambda: alive())
    old = alive()

    def run():
        job = Job.objects.create(task="versions.version", queue="default")
        return until(lambda: Execution.objects.filter(job=job).exists()) and (
            Job.objects.get(pk=job.pk).result
        )

    assert run() == 1
    (tmp_path / "versions.py").write_text(code.format(22))
    one.hang_up()
    until(lambda: alive() and not old & alive())

    assert run() == 22


def test_sigterm_during_reload_ends_all_processes_in_order(service):
    one = service("--processes", "2")
    until(lambda: len(alive()) == 2)
    result = tasks.tell_and_sleep.enqueue(2)
    until(Run.objects.exists)

    one.hang_up()
    one.log_has("was reloaded and runs")
    one.process.send_signal(signal.SIGTERM)

    assert one.process.wait(LONG) == 0
    assert result.wait(1).status.name == "SUCCESSFUL"
    assert not Process.objects.exists()


def test_hangup_of_the_process_group_reloads_once_and_ends_no_job(service):
    one = service(fresh=True)
    until(lambda: alive() and alive("dispatcher"))
    old = alive()
    result = tasks.tell_and_sleep.enqueue(2)
    until(Run.objects.exists)

    os.killpg(one.process.pid, signal.SIGHUP)

    until(lambda: alive() and not old & alive())
    assert Execution.objects.get(job=result.id).outcome == "successful"
    assert one.log.count("was reloaded and runs") == 1


def test_hangup_during_start_does_not_end_runqueue(service):
    one = service()
    one.log_has("serves")
    for _ in range(3):
        one.hang_up()
        time.sleep(0.1)

    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    assert one.process.poll() is None


HANGS_UP_ONCE_ITS_PIDFILE_IS_WRITTEN = """
import os, signal
write = os.pwrite
def pwrite(*args):
    write(*args)
    os.kill(os.getpid(), signal.SIGHUP)
os.pwrite = pwrite
"""


def test_hangup_as_soon_as_the_pidfile_is_written_reloads_after_the_start(service, tmp_path):
    pidfile = tmp_path / "queue.pid"
    one = service("--pidfile", str(pidfile), text=HANGS_UP_ONCE_ITS_PIDFILE_IS_WRITTEN)

    until(lambda: one.process.poll() is not None or "was reloaded and runs" in one.log)
    assert one.process.poll() is None
    assert pidfile.read_text() == f"{one.process.pid}\n"
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(LONG) == 0
    assert not pidfile.exists()


def test_shorter_shutdown_timeout_does_not_hold_for_processes_that_were_not_replaced_yet(
    service, tmp_path
):
    one = service(shutdown_timeout=90.0)
    until(lambda: alive())
    line, end = tmp_path / "line", tmp_path / "end"
    result = tasks.leave_line.enqueue(str(line), until=str(end))
    until(line.exists)
    old = alive()
    one.write(shutdown_timeout=0.5)
    one.hang_up()
    until(lambda: len(alive()) == 2)

    one.process.send_signal(signal.SIGTERM)
    time.sleep(13)  # Longer than all of a shutdown by the new settings.
    end.touch()

    assert one.process.wait(LONG) == 0
    assert result.wait(1).status.name == "SUCCESSFUL"
    assert Execution.objects.get(job=result.id).process in old


HANGS_IN_THE_READER = """
import multiprocessing, os, pathlib, time
if multiprocessing.current_process().daemon:
    pathlib.Path({path!r}).write_text(str(os.getpid()))
    time.sleep(3600)
"""


def test_process_that_reads_the_settings_ends_with_its_supervisor(service, tmp_path):
    one, path = service(), tmp_path / "reader"
    until(lambda: alive() and alive("dispatcher"))
    one.write(HANGS_IN_THE_READER.format(path=str(path)))
    one.hang_up()
    pids = [int(until(lambda: path.exists() and path.read_text()))]
    pids += Process.objects.exclude(kind="supervisor").values_list("pid", flat=True)
    assert all(lives(pid, time.time()) for pid in pids)

    one.process.kill()

    until(lambda: not any(lives(pid, time.time()) for pid in pids))


def test_embedded_process_cannot_reload_and_goes_on(service):
    one = service("--embedded")
    until(lambda: alive())
    before = alive()

    one.hang_up()

    one.log_has("with embedded, nothing can be imported anew. Restart runqueue.")
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    assert alive() == before


def test_all_backends_are_reloaded(service):
    one = service("--backend", "all")
    until(lambda: alive() and alive(database="other"))
    before = alive() | alive(database="other")

    one.write('TASKS["other"]["OPTIONS"]["threads"] = 3', threads=2)
    one.hang_up()

    until(workers_with(1, 2))
    until(lambda: not before & (alive() | alive(database="other")) and alive(database="other"))
    (other,) = Process.objects.using("other").filter(kind="worker")
    assert other.details["threads"] == 3


def test_one_broken_backend_keeps_all_as_they_are(service):
    one = service("--backend", "all")
    until(lambda: alive() and alive(database="other"))
    before = alive() | alive(database="other")

    one.write('TASKS["other"]["OPTIONS"]["threads"] = "3"', threads=2)
    one.hang_up()

    one.log_has("threads='3' is not a whole number")
    assert alive() | alive(database="other") == before
