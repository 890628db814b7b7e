"""Settings that another process has read anew: which ones are handed to the supervisors."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from django_dbqueue.runtime.supervisor.reload import Reload
from django_dbqueue.runtime.supervisor.settings_reader import settings_of

from ...conftest import address_of_the_test_database

pytestmark = pytest.mark.django_db

# Without the tests' own tasks, which use many queues.
WITH_QUEUES = """
TASKS["default"]["QUEUES"] = ["default", "mail"]
INSTALLED_APPS.remove("tests")
"""


@pytest.fixture
def reload(backend, monkeypatch, tmp_path):
    """Reload settings with this text and these options, and return what the supervisor got."""
    for name, value in address_of_the_test_database().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "own_settings")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    def reload(text="", changes=None, **options):
        more = f'TASKS["default"]["OPTIONS"].update({options!r})'
        (tmp_path / "own_settings.py").write_text(f"from tests.settings import *\n{more}\n{text}\n")
        got = []
        supervisor = SimpleNamespace(
            alias="default",
            changes=changes or {},
            settings=settings_of(backend),
            options=backend.config.changed(**(changes or {})),
            take_over=got.append,
        )
        Reload([supervisor], threading.Event())._reload()
        return got

    return reload


def test_options_and_queues_are_read_anew(reload):
    (settings,) = reload(WITH_QUEUES, threads=3, processes=2)

    assert (settings.config.threads, settings.config.processes) == (3, 2)
    assert settings.queues == {"default", "mail"}


def test_options_that_cannot_be_sent_to_another_process_are_left_out(reload):
    text = 'TASKS["default"]["OPTIONS"].update(backoff=lambda error, result: 1, threads=3)'

    (settings,) = reload(text)

    assert settings.config.threads == 3


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("def", {}, "SyntaxError"),
        ("import no_such_module", {}, "No module named 'no_such_module'"),
        ("raise SystemExit('no')", {}, "SystemExit: no"),
        ("import os; os._exit(3)", {}, "ended with exit code 3"),
        ("import time; time.sleep(3600)", {}, "reading them took longer than 10 s"),
        ("", {"thread": 3}, "'thread' is not an option. Did you mean 'threads'?"),
        ("", {"max_age": "1 h"}, "max_age='1 h' is not a number of seconds above 0"),
        ("", {"workers": [{"queues": "a*b"}]}, "'a*b' is not a queue pattern"),
        ("", {"workers": [{"thread": 1}]}, "workers[0]: 'thread' is not an option"),
        ("", {"allow_commands": ["none"]}, "'none' is not a management command"),
        ("", {"task_modules": ["no_such_tasks"]}, "Tasks cannot be imported"),
        ("TASKS = {}", {}, "default"),
        (
            'TASKS["default"] = {"BACKEND": TASKS["default"]["BACKEND"][:-15] + "BaseTaskBackend"}',
            {},
            "BaseTaskBackend",
        ),
        ("", {"database": "other"}, "has changed. Restart runqueue."),
        ('DATABASES["default"]["NAME"] += "x"', {}, "has changed. Restart runqueue."),
        ('DATABASES["default"]["PASSWORD"] = "new"', {}, "has changed. Restart runqueue."),
        ("", {"embedded": True}, "with embedded, nothing can be imported anew"),
    ],
)
def test_unusable_settings_are_refused_with_the_reason(
    reload, caplog, monkeypatch, text, options, message
):
    if "sleep" in text:
        monkeypatch.setattr(Reload, "LONGEST", 10.0)

    assert reload(text, **options) == []

    (error,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert error.startswith("supervisor: settings not reloaded, all processes stay: ")
    assert message in error
    assert "password" not in error.lower() or "PASSWORD" not in text


def test_command_line_is_checked_against_the_new_settings(reload, caplog):
    assert reload(WITH_QUEUES, changes={"queues": "reports"}) == []

    assert "'reports' matches no queue" in caplog.text


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """Two releases; the working directory is that of the first, by way of a symbolic link."""
    for name in ("r1", "r2"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("r1")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PWD", str(tmp_path / "current"))
    monkeypatch.setattr(Reload, "_read", lambda self: "they were read.")
    return tmp_path


@pytest.mark.parametrize("is_replaced", [True, False])
def test_working_directory_that_has_been_replaced_is_refused(releases, caplog, is_replaced):
    reload = Reload([], threading.Event())
    (releases / "current").unlink()
    (releases / "current").symlink_to("r2" if is_replaced else "r1")

    reload._reload()

    reason = "the working directory has been replaced. Restart runqueue."
    assert (reason in caplog.text) == is_replaced
    assert ("they were read." in caplog.text) != is_replaced


@pytest.mark.parametrize("shell", ["r2", "no such folder", ""])
def test_folder_of_another_shell_says_nothing(releases, caplog, monkeypatch, shell):
    monkeypatch.setenv("PWD", shell and str(releases / shell))

    Reload([], threading.Event())._reload()

    assert "they were read." in caplog.text
