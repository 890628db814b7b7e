"""``docs/from_celery.md`` and ``contrib.celery``, compared with the public names of Celery itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest.importorskip("celery")

import celery
from celery import canvas, exceptions, result, schedules, signals, states
from celery.app import autoretry, control, defaults
from celery.app.task import Context
from celery.bin.celery import celery as command

PAGE = (Path(__file__).parent.parent / "docs" / "from_celery.md").read_text()
# A name, or the beginning of names: ``broker_…``.
NAME = re.compile(r"([A-Za-z_]\w*)(…?)")


def first_cells(section: str) -> list[str]:
    """Return the first cells of the section's tables whose first column is Celery's."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, section
    tables = re.findall(r"^\| Celery \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.M)
    return [line.split("|")[1] for table in tables for line in table.splitlines()]


def answered(*sections: str) -> tuple[set[str], tuple[str, ...]]:
    """Return the names that the sections answer, and the prefixes of those that they answer."""
    sections = sections or tuple(re.findall(r"^## (.+)$", PAGE, re.M))
    cells = [cell for section in sections for cell in first_cells(section)]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    found = [each for span in spans for each in NAME.findall(span)]
    return (
        {name for name, more in found if not more},
        tuple(name for name, more in found if more),
    )


def unanswered(names: Iterable[str], *sections: str) -> list[str]:
    exact, prefixes = answered(*sections)
    return [each for each in names if each not in exact and not each.startswith(prefixes)]


def public(of: object, beside: type = object) -> list[str]:
    return [name for name in dir(of) if not name.startswith("_") and not hasattr(beside, name)]


def parameters(*functions: object) -> list[str]:
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [
        name
        for function in functions
        for name, each in inspect.signature(function).parameters.items()  # type: ignore[arg-type]
        if each.kind not in kinds and name != "self"
    ]


SETTINGS = [name for name, _ in defaults.flatten(defaults.NAMESPACES)]
TASKS = (
    "Tasks",
    "Calls",
    "Canvas",
    "Results",
    "Stop and control",
    "Exceptions",
    "Signals",
    "In tests",
)
# What to look for, the names, the sections that may answer them, and Celery's own internals.
FAMILIES = {
    "settings": (SETTINGS, (), ""),
    "celery": (
        [name for name in celery.__all__ if not name.startswith("_")],
        (),
        "SERIES VERSION VERSION_BANNER version_info version_info_t bugreport execute local log "
        "maybe_patch_concurrency messaging registry",
    ),
    "celery.result": (result.__all__, ("Results", "In tests"), "ResultBase"),
    "celery.exceptions": (
        exceptions.__all__,
        ("Exceptions",),
        "CDeprecationWarning CPendingDeprecationWarning CeleryCommandException "
        "DuplicateNodenameWarning DuplicateTaskNameWarning FixupWarning SecurityWarning reraise",
    ),
    "celery.schedules": (schedules.__all__, ("Periodic tasks",), ""),
    "celery.canvas": (canvas.__all__, ("Canvas",), ""),
    "celery.signals": (signals.__all__, ("Signals",), ""),
    "Task": (
        public(celery.Task),
        TASKS,
        "Request Strategy add_around add_trail annotate from_config on_bound on_replace "
        "request_stack signature_from_request start_strategy subtask_from_request",
    ),
    "Task.request": (
        public(Context),
        ("Tasks",),
        "as_execution_options clear get replaced_task_nesting taskset update utc",
    ),
    "apply_async()": (
        parameters(celery.Task.apply_async, celery.Celery.send_task),
        ("Tasks", "Calls"),
        "add_to_parent group_id replaced_task_nesting route_name task_type",
    ),
    "retry()": (parameters(celery.Task.retry), ("Tasks",), ""),
    "AsyncResult": (public(result.AsyncResult), ("Results", "Stop and control"), ""),
    "GroupResult": (public(result.GroupResult), ("Results", "Stop and control"), ""),
    "Signature": (
        public(canvas.Signature, dict),
        ("Canvas", "Calls"),
        "AsyncResult TYPES app append_to_list_option election extend_list_option flatten_links id "
        "name options parent_id register_type reprcall root_id subtask_type type",
    ),
    "control": (public(control.Control), ("Stop and control",), "Mailbox election"),
    "inspect": (public(control.Inspect), ("Stop and control",), "clock hello"),
    "celery.states": (states.ALL_STATES, ("Results",), ""),
    "automatic retries": (
        re.findall(r"getattr\(task, '(\w+)'", inspect.getsource(autoretry)),
        ("Tasks",),
        "",
    ),
    "the command celery": (command.commands, (), ""),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_page_answers_each_public_name_of_celery(family):
    names, sections, internals = FAMILIES[family]
    assert len(names) > 4
    assert unanswered(set(names) - set(internals.split()), *sections) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_internals_are_names_that_the_page_does_not_answer(family):
    _, sections, internals = FAMILIES[family]
    assert unanswered(internals.split(), *sections) == internals.split()


def test_page_answers_each_name_that_a_setting_had_before_celery_4():
    former = defaults.flatten(defaults.NAMESPACES, keyfilter=defaults._to_compat)
    names = {old for old, new, _ in former if old != new.upper()}
    assert "CELERYD_CONCURRENCY" in names
    assert unanswered(names) == []


def test_page_answers_settings_of_a_django_project():
    assert unanswered(f"CELERY_{name.upper()}" for name in SETTINGS) == []


@pytest.mark.parametrize("name", ["worker", "beat"])
def test_page_answers_each_flag_of_a_process(name):
    flags = {max(each.opts, key=len) for each in command.commands[name].params}
    parts = "Workers", "Stop and control", "Periodic tasks"
    cells = " ".join(cell for part in parts for cell in first_cells(part))
    assert len(flags) > 10
    assert flags - set(re.findall(r"--[a-z-]+", cells)) == set()


def test_each_prefix_on_the_page_has_names():
    _, prefixes = answered()
    names = [*SETTINGS, *signals.__all__, "CELERY_", "CELERYD_", "CELERYBEAT_"]
    assert len(prefixes) > 10
    assert [each for each in prefixes if not any(name.startswith(each) for name in names)] == []


@pytest.mark.parametrize(
    "words",
    ["result backend", "visibility_timeout", "worker_max_tasks_per_child", "chord", "canvas",
     "revoke", "CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "CELERY_BEAT_SCHEDULE",
     "CELERY_TIMEZONE", "CELERY_TASK_ALWAYS_EAGER", "CELERY_TASK_TIME_LIMIT"],
)  # fmt: skip
def test_page_has_the_words_that_are_searched_most(words):
    assert words.lower() in PAGE.lower()
