"""``django_dbqueue.beside`` with real web servers: gunicorn, uvicorn, hypercorn and runserver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from django_dbqueue import beside
from django_dbqueue.models import Execution, Job, Process

from . import tasks
from .conftest import LONG, address_of_the_test_database, log_of, until
from .management.test_runqueue import MANY
from .models import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

PROJECT = {
    "site_settings.py": """
from tests.settings import *
DEBUG = True
INSTALLED_APPS = [*INSTALLED_APPS, "site_app"]
""",
    "site_app.py": "",
    "manage.py": """
import os, sys
if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_settings")
    from django_dbqueue import beside
    beside.runserver()
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
""",
    "site_wsgi.py": """
import os
from django.core.wsgi import get_wsgi_application
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_settings")
application = get_wsgi_application()
""",
    "site_asgi.py": """
import os
from django.core.asgi import get_asgi_application
from django_dbqueue import beside
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_settings")
application = beside.asgi(get_asgi_application())
""",
    "gunicorn.conf.py": """
from django_dbqueue.beside import on_exit, on_reload, when_ready
raw_env = ["DJANGO_SETTINGS_MODULE=site_settings"]
""",
}
GUNICORN = ["gunicorn", "site_wsgi", "--bind", "unix:web.sock"]
UVICORN = ["uvicorn", "site_asgi:application", "--uds", "web.sock"]
HYPERCORN = ["hypercorn", "site_asgi:application", "--bind", "unix:web.sock"]
# A project's own settings module, as it is in the folder of manage.py.
RUNSERVER = ["manage.py", "runserver", "0"]


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in PROJECT.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def serve(transactional_db, project, tmp_path):
    """Start a web server in the project's folder. All of its processes end with the test."""
    started = []

    def start(name, *arguments, **env):
        log = (tmp_path / f"web-{len(started)}.log").open("w+")
        module = [name] if name.endswith(".py") else ["-m", name]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **address_of_the_test_database(), **env}
        env["PYTHONPATH"] = str(settings.BASE_DIR)
        del env["DJANGO_SETTINGS_MODULE"]
        if MANY:
            env["DBQUEUE_OPTIONS"] = json.dumps(
                {**json.loads(env.get("DBQUEUE_OPTIONS", "{}")), "embedded": True}
            )
        child = subprocess.Popen(
            [sys.executable, *module, *arguments],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=project,
            start_new_session=True,
            # A test run in the background of a shell ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        child.log = log
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(LONG)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        # The workers of a killed server.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        sys.stderr.write(log_of(child))
        child.log.close()
    until(lambda: all(map(is_gone, supervisors())))


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on. ``["X"]`` if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


def is_gone(pid: int) -> bool:
    return stat_of(pid)[0] in "XZ"


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


def zombies_of(pids: set[int]) -> list[int]:
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if (stat := stat_of(pid))[0] == "Z" and int(stat[1]) in pids]


def supervisors() -> list[int]:
    return list(Process.objects.filter(kind="supervisor").values_list("pid", flat=True))


def the_supervisor() -> int:
    """Wait for the one supervisor whose dispatcher runs, and return its process id."""
    until(lambda: Process.objects.filter(kind="dispatcher").exists())
    (pid,) = until(lambda: [pid for pid in supervisors() if not is_gone(pid)])
    return pid


def until_all_have_ended(*pids: int) -> None:
    until(lambda: all(map(is_gone, pids)))


@pytest.fixture(
    params=[
        pytest.param([*GUNICORN, "--workers", "2"], id="gunicorn"),
        pytest.param([*GUNICORN, "--workers", "2", "--preload"], id="gunicorn --preload"),
        pytest.param(UVICORN, id="uvicorn"),
        pytest.param([*UVICORN, "--workers", "2"], id="uvicorn --workers"),
        pytest.param([*HYPERCORN, "--workers", "2"], id="hypercorn"),
        pytest.param([*RUNSERVER, "--noreload"], id="runserver --noreload"),
        pytest.param(RUNSERVER, id="runserver"),
    ]
)
def command(request):
    """The command line of each kind of web server."""
    if request.param[0] == "hypercorn":
        pytest.importorskip("hypercorn")
    return request.param


def test_queue_runs_once_and_ends_with_the_server(serve, command):
    result = tasks.add.enqueue(1)
    server = serve(*command)
    assert result.wait(LONG).return_value == 1
    pid = the_supervisor()
    keeper = parent_of(pid)
    time.sleep(2)  # For a second one, if any were started.
    assert supervisors() == [pid]

    server.terminate()

    server.wait(LONG)
    until_all_have_ended(pid, keeper)
    assert not Process.objects.exists(), log_of(server)
    assert "Traceback" not in log_of(server)


def test_queue_ends_when_the_server_is_killed(serve, command):
    server = serve(*command)
    pid = the_supervisor()
    keeper = parent_of(pid)
    web = parent_of(keeper)

    os.kill(web, signal.SIGKILL)
    server.kill()

    server.wait(LONG)
    until_all_have_ended(pid, keeper)


def test_killed_queue_is_restarted_and_the_server_goes_on(serve):
    server = serve(*GUNICORN)
    first = the_supervisor()

    os.kill(first, signal.SIGKILL)

    until(lambda: "beside: runqueue ended with exit code -9; restarting in 1 s" in log_of(server))
    result = tasks.add.enqueue(1)
    assert result.wait(LONG).return_value == 1
    assert server.poll() is None


def test_queue_that_cannot_start_is_tried_again_less_and_less_often(serve):
    server = serve(*GUNICORN, DBQUEUE_OPTIONS=json.dumps({"threads": 0}))

    until(lambda: "restarting in 4 s" in log_of(server))

    assert "threads=0 is not a whole number of at least 1" in log_of(server)
    assert log_of(server).count("restarting in 2 s") == 1
    began = time.monotonic()
    server.terminate()
    assert server.wait(LONG) == 0
    assert time.monotonic() - began < 30


def test_queue_with_wrong_arguments_is_not_tried_again(serve, project):
    conf = project / "gunicorn.conf.py"
    own = "def when_ready(server):\n    beside.start('--threds', '4')\n"
    conf.write_text(f"{conf.read_text()}from django_dbqueue import beside\n{own}")
    server = serve(*GUNICORN)

    until(lambda: "does not take its arguments; not starting it again" in log_of(server))

    assert "unrecognized arguments: --threds 4" in log_of(server)
    assert "restarting" not in log_of(server)
    assert server.poll() is None
    server.terminate()
    assert server.wait(LONG) == 0


def test_queue_ends_when_its_keeper_is_killed(serve):
    serve(*GUNICORN)
    pid = the_supervisor()

    os.kill(parent_of(pid), signal.SIGKILL)

    until_all_have_ended(pid)


def test_end_of_a_web_worker_leaves_the_queue_alone(serve):
    server = serve(*GUNICORN)
    pid = the_supervisor()
    (worker,) = until(
        lambda: [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit()
            and stat_of(int(path.name))[1:2] == [str(server.pid)]
            and int(path.name) != parent_of(pid)
        ]
    )

    os.kill(worker, signal.SIGTERM)

    until_all_have_ended(worker)
    result = tasks.add.enqueue(1)
    assert result.wait(LONG)
    assert supervisors() == [pid]


@pytest.mark.skipif(bool(MANY), reason="A single process has no workers to replace.")
def test_reload_of_gunicorn_replaces_the_workers(serve):
    server = serve(*GUNICORN)
    pid = the_supervisor()
    old = until(lambda: Process.objects.filter(kind="worker").first())

    server.send_signal(signal.SIGHUP)

    until(lambda: not Process.objects.filter(pk=old.pk).exists())
    until(lambda: Process.objects.filter(kind="worker").exists())
    assert supervisors() == [pid]


@pytest.mark.parametrize("seconds", [0, 0.05, 0.8])
def test_reload_soon_after_the_start_ends_nothing(serve, project, seconds):
    (project / "gunicorn.conf.py").write_text(
        PROJECT["gunicorn.conf.py"]
        + "import time\n"
        + "from django_dbqueue import beside\n"
        + "def when_ready(server):\n"
        + f"    beside.start(); time.sleep({seconds}); on_reload(server)\n"
    )
    result = tasks.add.enqueue(1)

    server = serve(*GUNICORN)

    assert result.wait(LONG).return_value == 1
    assert "beside: " not in log_of(server)


def test_reload_starts_a_killed_keeper_again(serve):
    server = serve(*GUNICORN)
    first = the_supervisor()
    os.kill(parent_of(first), signal.SIGKILL)
    until_all_have_ended(first)

    server.send_signal(signal.SIGHUP)

    second = the_supervisor()
    keeper = parent_of(second)
    assert "beside: the keeper of runqueue has ended; starting it again" in log_of(server)
    result = tasks.add.enqueue(1)
    assert result.wait(LONG).return_value == 1
    server.terminate()
    server.wait(LONG)
    until_all_have_ended(second, keeper)


@pytest.mark.parametrize("moment", ["before runqueue", "while the project is imported"])
def test_signal_during_the_start_reaches_runqueue_once_and_is_not_left_blocked(
    tmp_path, monkeypatch, moment
):
    """A process that ``_run`` starts is sent SIGHUP before ``runqueue`` can handle it."""
    (tmp_path / "slow_settings.py").write_text(
        """
import os, signal, sys, threading, time
from django.core import management
from django.core.management.base import BaseCommand
SECRET_KEY = "x"
early = sys.argv[1] == "while the project is imported"
if early:
    os.kill(os.getpid(), signal.SIGHUP)
blocked = []
def look():
    blocked.append(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))
thread = threading.Thread(target=look)
thread.start()
thread.join()
class Runqueue(BaseCommand):
    requires_system_checks, stealth_options = [], ("beside", "skip_checks")
    def add_arguments(self, parser):
        parser.add_argument("moment")
    def handle(self, **options):
        look()
        received = []
        # As runqueue does.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, lambda number, frame: received.append(number))
        end = time.monotonic() + 60
        while not received and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)  # For a second one, if any were sent.
        print(blocked, len(received))
management.get_commands = lambda: {"runqueue": "django_dbqueue"}
management.load_command_class = lambda app, name: Runqueue()
"""
    )
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "slow_settings")
    monkeypatch.syspath_prepend(tmp_path)
    read, write = os.pipe()
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, stdout=write))
    child = beside._spawn("_run", moment)
    os.close(write)

    if moment == "before runqueue":
        child.send_signal(signal.SIGHUP)

    with open(read) as output:
        assert output.read() == "[False, False] 1\n"
    assert child.wait(LONG) == 0
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signal_to_all_processes_lets_running_jobs_finish(serve):
    result = tasks.tell_and_sleep.enqueue(3)
    server = serve(*GUNICORN)
    until(Run.objects.exists)
    pid = the_supervisor()

    # As a service manager does. A terminal signals the server's process group alone.
    os.kill(pid, signal.SIGTERM)
    os.kill(parent_of(pid), signal.SIGTERM)
    os.killpg(server.pid, signal.SIGTERM)

    assert server.wait(LONG) == 0
    until_all_have_ended(pid)
    assert Job.objects.get(pk=result.id).state == "successful"


def test_interrupt_from_the_terminal_lets_running_jobs_finish(serve):
    result = tasks.tell_and_sleep.enqueue(3)
    server = serve(*GUNICORN)
    until(Run.objects.exists)

    os.killpg(server.pid, signal.SIGINT)

    server.wait(LONG)
    assert Job.objects.get(pk=result.id).state == "successful"


@pytest.mark.parametrize("given", [(5,), (["--threads", "4"],), ("--threads", 4), ("\x00",)])
def test_argument_that_is_no_text_is_refused(given):
    for call in (beside.start, partial(beside.asgi, str), beside.runserver):
        with pytest.raises(ImproperlyConfigured, match=r"is no argument of runqueue\. Give text"):
            call(*given)


def test_gunicorn_without_settings_says_how_to_name_them(serve, project):
    conf = project / "gunicorn.conf.py"
    conf.write_text(conf.read_text().partition("raw_env")[0])

    server = serve(*GUNICORN)

    assert server.wait(LONG) != 0
    assert "DJANGO_SETTINGS_MODULE is not set" in log_of(server)
    assert "raw_env = ['DJANGO_SETTINGS_MODULE=mysite.settings']" in log_of(server)


def test_queue_moves_to_another_process_when_its_web_worker_is_killed(serve):
    serve(*UVICORN, "--workers", "2")
    pid = the_supervisor()

    os.kill(parent_of(parent_of(pid)), signal.SIGKILL)

    until_all_have_ended(pid)
    until(lambda: [each for each in supervisors() if each != pid and not is_gone(each)])
    result = tasks.add.enqueue(1)
    assert result.wait(LONG).return_value == 1


# runserver


def test_edit_replaces_the_queue_and_leaves_no_zombie(serve, project):
    result = tasks.tell_and_sleep.enqueue(3600)
    server = serve(*RUNSERVER)
    until(Run.objects.exists)
    first = the_supervisor()
    until(lambda: "Quit the server" in log_of(server))
    time.sleep(2)  # The reloader sees changes after its first look at the files only.

    with (project / "site_settings.py").open("a") as file:
        file.write("# changed\n")

    until(lambda: is_gone(first))
    second = the_supervisor()
    assert second != first
    until(lambda: Execution.objects.filter(job=result.id, outcome="interrupted").exists())
    assert parent_of(parent_of(parent_of(second))) == server.pid
    assert zombies_of({server.pid, parent_of(parent_of(second))}) == []


def test_edit_with_an_error_and_its_correction_end_with_one_queue(serve, project):
    server = serve(*RUNSERVER)
    the_supervisor()
    path = project / "site_app.py"
    time.sleep(2)

    path.write_text("(\n")
    until(lambda: "SyntaxError" in log_of(server))
    time.sleep(2)
    path.write_text("# correct again\n")

    result = tasks.add.enqueue(1)
    assert result.wait(LONG).return_value == 1
    until(lambda: len(supervisors()) == 1)


def test_edit_that_ends_runserver_ends_the_queue(serve, project):
    server = serve(*RUNSERVER)
    pid = the_supervisor()

    def has_ended():
        # More than once: the reloader sees no change that was made before its first look.
        (project / "site_settings.py").write_text("(\n")
        return server.poll() is not None

    # runserver waits for the correction of an error in an application, but not in the settings.
    until(has_ended)
    assert server.returncode != 0
    until_all_have_ended(pid)


def test_interrupt_of_runserver_ends_the_queue(serve):
    server = serve(*RUNSERVER)
    pid = the_supervisor()

    os.killpg(server.pid, signal.SIGINT)

    server.wait(LONG)
    until_all_have_ended(pid)


def test_settings_of_the_command_line_are_those_of_the_queue(serve, project):
    (project / "other_settings.py").write_text(
        "from site_settings import *\nTASKS['default']['OPTIONS']['name'] = 'other'\n"
    )
    serve(*RUNSERVER, "--noreload", "--settings", "other_settings")

    until(lambda: Process.objects.filter(name__startswith="supervisor-other@").exists())


@pytest.mark.parametrize("arguments", [["check"], ["runserver", "--help"]], ids=str)
def test_other_commands_start_no_queue(serve, arguments):
    server = serve("manage.py", *arguments)

    assert server.wait(LONG) == 0
    assert not supervisors()


# The functions


class EndedChild:
    """A ``runqueue`` that has ended by itself, as with an error in the settings."""

    returncode = 1

    def poll(self):
        return self.returncode


@pytest.mark.parametrize("moment", [0.1, 0.9, 1.1, 3.1], ids="after {} s".format)
def test_keeper_ends_by_a_signal_at_any_time_of_a_pause(monkeypatch, moment):
    clock, handlers, children = [100.0], {}, []

    def spawn(*_arguments):
        children.append(EndedChild())
        assert len(children) < 5, "The signal was forgotten."
        return children[-1]

    def sleep(seconds):
        begin = clock[0]
        clock[0] += seconds
        if begin < 100 + moment <= clock[0]:
            handlers[signal.SIGQUIT](signal.SIGQUIT, None)

    monkeypatch.setattr(beside, "_spawn", spawn)
    monkeypatch.setattr(beside.time, "sleep", sleep)
    monkeypatch.setattr(beside.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(beside.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(beside.signal, "pthread_sigmask", lambda *_arguments: None)

    beside._keep(os.getppid(), "SIGQUIT")

    assert clock[0] < 104


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT"])
def test_early_signal_reaches_the_keeper_of_a_server_that_ignores_it(name):
    """A script that starts a server with "&" has it ignore SIGQUIT."""
    code = (
        f"import signal; signal.signal(signal.{name}, signal.SIG_IGN); "
        "from django_dbqueue import beside; "
        f"beside._Beside({name!r}, ('--embedded',)).stop(); print('ended')"
    )

    server = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=False
    )

    assert server.stdout == "ended\n", server.stderr


def test_stop_in_a_forked_process_ends_nothing(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    made = object.__new__(beside._Beside)
    made._owner, made._signal, made._process = os.getpid() + 1, signal.SIGTERM, child
    monkeypatch.setattr(beside, "_started", [made])
    try:
        beside.stop()
        beside.on_reload(None)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_start_twice_starts_one(monkeypatch):
    spawned = []
    monkeypatch.setattr(beside, "_started", [])
    monkeypatch.setattr(beside, "_spawn", lambda *arguments: spawned.append(arguments))

    beside.start("--threads", "2")
    beside.start()

    assert spawned == [("_keep", "SIGTERM", "--threads", "2")]


def test_arguments_reach_runqueue(serve, project):
    (project / "gunicorn.conf.py").write_text(
        PROJECT["gunicorn.conf.py"]
        + "from django_dbqueue import beside\n"
        + "def when_ready(server): beside.start('--name', 'web', '--embedded')\n"
    )
    serve(*GUNICORN)

    until(lambda: Process.objects.filter(name__startswith="worker-web@").exists())
