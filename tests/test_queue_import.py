"""``manage.py queue import``, with the real packages of the other queues.

Each runs in a project of its own, in a new process: see ``importing/``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

PACKAGES = {
    "django-tasks-db": "django_tasks_db",
    "django-q2": "django_q",
    "procrastinate": "procrastinate",
    "dj-queue": "dj_queue",
    "steady-queue": "steady_queue",
    "django-ox": "django_ox",
    "django-celery-beat": "django_celery_beat",
}
SCENARIOS = {"django-celery-beat": "beat_scenario"}


@pytest.fixture
def databases(transactional_db: None, tmp_path: Path) -> Iterator[list[str]]:
    """Create two databases, and return their URLs."""
    if connection.vendor == "sqlite":
        yield [f"sqlite:///{tmp_path}/{name}.sqlite3" for name in ("first", "second")]
        return
    server, name = os.environ["DATABASE_URL"].rsplit("/", 1)
    name = f"{connection.settings_dict['NAME']}_import"
    names = [connection.ops.quote_name(f"{name}_{each}") for each in ("first", "second")]
    with connection.cursor() as cursor:
        for each in names:
            cursor.execute(f"DROP DATABASE IF EXISTS {each}")
            cursor.execute(f"CREATE DATABASE {each}")
        yield [f"{server}/{name}_{each}" for each in ("first", "second")]
        for each in names:
            cursor.execute(f"DROP DATABASE {each}")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [1, 2], ids=["one database", "two databases"])
@pytest.mark.parametrize("source", PACKAGES)
def test_what_waits_is_moved_once_and_runs_here(databases, source, number):
    if not find_spec(PACKAGES[source]):
        pytest.skip(f"{source} is not installed.")
    if source == "procrastinate" and connection.vendor != "postgresql":
        pytest.skip("procrastinate needs PostgreSQL.")
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.importing.settings",
        "IMPORT_FROM": source,
        "IMPORT_DATABASE": databases[0],
        **({"IMPORT_QUEUE_DATABASE": databases[1]} if number == 2 else {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"tests.importing.{SCENARIOS.get(source, 'scenario')}"],
        env=env,
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_queue_that_is_not_installed_is_named():
    with pytest.raises(
        CommandError, match=r"django-ox is not installed here\. Keep it in INSTALLED_APPS"
    ):
        call_command("queue", "import", "django-ox")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nope"], "invalid choice: 'nope'"),
        (["django-ox", "--rename", "a.b"], "'a.b' is not such as old.tasks.send=shop.tasks.send"),
    ],
)
def test_wrong_arguments_are_refused(given, said):
    with pytest.raises(CommandError, match=said):
        call_command("queue", "import", *given)
