"""``runqueue --health-port`` and ``queuehealth``."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import urllib.error
import urllib.request

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_dbqueue.models import Job, Process
from django_dbqueue.runtime.supervisor import health
from django_dbqueue.runtime.supervisor.supervisor import Supervisor

from .. import tasks
from ..conftest import LONG, a_process, log_of, until
from ..ports import free_port
from .test_several_backends import through_proxy  # noqa: F401

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and text; 0 if the connection is refused."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


class TestHealthPort:
    def test_ready_when_all_have_started(self, runqueue):
        port = free_port()
        runqueue("--health-port", str(port), "--processes", "2")
        seen = set()
        until(lambda: seen.add(ask(port, "/ready")) or (200, "ok\n") in seen)

        assert Process.objects.filter(kind="worker").count() == 2
        assert ask(port, "/live") == (200, "ok\n")
        assert ask(port, "/ready", "HEAD") == (200, "")
        assert ask(port, "/ready/?x=1") == (200, "ok\n")
        assert ask(port, "/") == (404, "Ask for /live or /ready.\n")

    def test_live_and_not_ready_while_the_database_is_away(self, through_proxy):  # noqa: F811
        port = free_port()
        through_proxy("--health-port", str(port))
        until(lambda: ask(port, "/ready")[0] == 200)

        through_proxy.proxy.cut()

        status, text = until(lambda: (found := ask(port, "/ready"))[0] == 503 and found)
        assert status == 503
        assert text.startswith("other: the database has not answered for ")
        assert "default" not in text
        assert ask(port, "/live") == (200, "ok\n")
        through_proxy.proxy.heal()
        until(lambda: ask(port, "/ready")[0] == 200)

    def test_missing_worker_is_named(self, runqueue):
        port = free_port()
        runqueue("--health-port", str(port))
        until(lambda: ask(port, "/ready")[0] == 200)
        os.kill(Process.objects.get(kind="worker").pid, signal.SIGKILL)

        seen = set()
        until(lambda: seen.add(ask(port, "/ready")) or len(seen) > 1)
        assert (503, "default: 0 of 1 workers have started\n") in seen
        until(lambda: ask(port, "/ready")[0] == 200)

    def test_not_ready_while_shutting_down(self, runqueue):
        port = free_port()
        child = runqueue("--health-port", str(port))
        until(lambda: ask(port, "/ready")[0] == 200)
        tasks.tell_and_sleep.enqueue(5)
        until(lambda: Job.objects.filter(state="running").exists())
        child.send_signal(signal.SIGTERM)

        until(lambda: ask(port, "/ready") == (503, "default: is shutting down\n"))
        assert ask(port, "/live")[0] in (200, 0)
        assert child.wait(LONG) == 0

    def test_stuck_main_loop_is_not_live(self, backend, monkeypatch):
        supervisor = Supervisor(backend, ["worker"], {})
        port = free_port()
        health.serve("127.0.0.1", port, [supervisor])
        assert ask(port, "/live") == (200, "ok\n")
        assert ask(port, "/ready")[1].startswith("default: is starting")

        monkeypatch.setattr(supervisor._status, "since_loop_tick", lambda: 1000.0)

        assert ask(port, "/live") == (
            503,
            "default: the main loop has made no progress for 1000 s\n",
        )

    def test_port_in_use_is_refused(self, runqueue):
        with socket.create_server(("127.0.0.1", 0)) as server:
            child = runqueue("--health-port", str(server.getsockname()[1]))
            assert child.wait(LONG) == 1
        assert "--health-port: 127.0.0.1:" in log_of(child)
        assert "Traceback" not in log_of(child)


class TestQueueHealth:
    def run(self, *arguments: str) -> tuple[int, str]:
        out = io.StringIO()
        try:
            call_command("queuehealth", "--database=default", *arguments, stdout=out)
        except SystemExit as end:
            return end.code, out.getvalue()
        return 0, out.getvalue()

    def test_working_queue_is_ok(self):
        for kind in ("worker", "dispatcher"):
            a_process(f"{kind}@a:1:x", kind=kind, details={"queues": "*"})

        assert self.run() == (0, "OK: no problem was found.\n")
        assert self.run("--json") == (0, "[]\n")

    def test_problems_are_listed_and_decide_the_exit_code(self):
        a_process("dispatcher@a:1:x", kind="dispatcher")

        code, text = self.run()

        assert code == 2
        assert text.splitlines()[0] == "CRITICAL: default: No worker is alive."
        (problem,) = json.loads(self.run("--json")[1])
        assert problem["check"] == "processes" and problem["severity"] == "critical"

    def test_missing_tables_are_one_critical_line(self):
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE dbqueue_job RENAME TO dbqueue_job_away")
        try:
            code, text = self.run()
        finally:
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE dbqueue_job_away RENAME TO dbqueue_job")

        assert code == 2
        assert text.startswith("CRITICAL: default: The queue's tables cannot be read")
        assert text.count("\n") == 1

    def test_misuse_is_unknown_to_monitoring(self):
        with pytest.raises(CommandError) as error:
            call_command("queuehealth", "--backend=rubbish")
        assert error.value.returncode == 3
