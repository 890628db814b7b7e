"""The README and the docs are run: every code block, every command, every table of options.

A ``python`` block is executed, in order within its file, in a module of its own; after each, the jobs that it enqueued are
run, as the worker in the reader's other terminal would. A ``pycon`` block is compared with its output. A block that begins
with ``# settings.py`` is executed on a project's settings, which must then pass the checks. The commands of a ``console``
block must exist, and take their arguments. An ``postgresql`` block is executed on PostgreSQL, for whose function it is. An ``ini`` block must be readable. ``text`` is read by people alone.
"""

from __future__ import annotations

import ast
import configparser
import copy
import dataclasses
import doctest
import inspect
import re
import shlex
import sys
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import django
import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_permission_codename
from django.core.checks import run_checks
from django.core.management import BaseCommand, get_commands, load_command_class
from django.db import connection, connections
from django.test import override_settings

from django_dbqueue import Constant, Exponential, Linear
from django_dbqueue.compat import InvalidTask, signals, task_backends
from django_dbqueue.models import Execution, Job, RecurringTask
from django_dbqueue.models.execution import ExecutionQuerySet
from django_dbqueue.models.jobs import JobQuerySet
from django_dbqueue.options import Options
from django_dbqueue.recurrence import MISSED
from django_dbqueue.routers import QueueRouter
from django_dbqueue.testing import drain

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = "# settings.py\n"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = for_this_django(page.read_text())
    for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S):
        language, body = found.groups()
        if not language.startswith("{toctree}"):
            yield Block(page, text.count("\n", 0, found.start()) + 2, language, body)


def for_this_django(text: str) -> str:
    """The pages name Django's own Tasks framework; on Django 5.2 the backport stands in, under other names."""
    error = f"{InvalidTask.__module__}.{InvalidTask.__qualname__}"
    return text.replace("django.tasks.exceptions.InvalidTask", error).replace(
        "django.tasks", signals.__name__.removesuffix(".signals")
    )


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def all_blocks(*languages: str) -> list[Any]:
    found = [block for page in PAGES for block in blocks(page) if block.language in languages]
    return [pytest.param(block, id=block.place) for block in found]


def test_every_block_is_of_a_language_that_is_run_or_is_plain_text():
    known = {"python", "pycon", "postgresql", "console", "ini", "text"}
    assert [block.place for page in PAGES for block in blocks(page) if block.language not in known] == []


# Python


def with_python(block: Block) -> bool:
    return block.language in ("python", "pycon", "postgresql")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(with_python, blocks(page)))], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, settings: Any):
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    module = types.ModuleType(f"docs_{page.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # By the path that its tasks would have in a project, SQL calls them.
    monkeypatch.setitem(sys.modules, "shop.tasks", module)
    for block in filter(with_python, blocks(page)):
        backend = task_backends["default"]
        monkeypatch.setitem(
            vars(backend), "config", backend.config.changed(allow_sql=["default"], allow_commands=["clearsessions"])
        )
        if block.text.startswith(SETTINGS):
            check_settings(block)
        elif block.language == "pycon":
            compare(block, module)
        elif block.language == "postgresql":
            execute_sql(block)
        else:
            execute(block, module)
        drain()
        for execution in Execution.objects.filter(outcome=Execution.Outcome.FAILED):
            pytest.fail(f"A job of {block.place} failed.\n{execution.traceback}")
    run_test_cases(module)


def execute(block: Block, module: types.ModuleType) -> None:
    # Empty lines in front: a traceback names the line of the page.
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        async_to_sync(types.FunctionType(code, module.__dict__))()
    else:
        exec(code, module.__dict__)


def execute_sql(block: Block) -> None:
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(block.text)


def compare(block: Block, module: types.ModuleType) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, module.__dict__, block.place, str(block.page), block.line - 1)
    test.globs = module.__dict__
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    if runner.run(test, out=output.append, clear_globs=False).failed:
        pytest.fail("".join(output))


def run_test_cases(module: types.ModuleType) -> None:
    """The TestCases of a page, as a project's test runner would."""
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    wanted = suite.countTestCases()
    result = unittest.TestResult()
    suite.run(result)
    assert [trace for _, trace in [*result.failures, *result.errors]] == []
    assert result.testsRun == wanted


def check_settings(block: Block) -> None:
    """The settings on a page, on top of a project's own, pass the system checks."""
    given: dict[str, Any] = {
        "INSTALLED_APPS": ["django.contrib.auth", "django.contrib.contenttypes"],
        "DATABASES": {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    }
    before = copy.deepcopy(given)
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), given)
    assert set(given["INSTALLED_APPS"]) - set(before["INSTALLED_APPS"]) <= {"django_dbqueue"}
    assert given.get("DATABASE_ROUTERS", []) in ([], ["django_dbqueue.routers.QueueRouter"])
    named = []
    with override_settings(TASKS=given["TASKS"]):
        for alias in task_backends:
            backend = task_backends[alias]
            options = getattr(backend, "config", Options())
            assert options.database in (None, *given["DATABASES"])
            named.append(options.database)
            assert list(backend.check()) == []
        if given.get("DATABASE_ROUTERS"):
            assert QueueRouter().db_for_write(Job) == named[0]
        if not any(named):
            assert [message for message in run_checks(tags=["dbqueue"]) if message.id != "dbqueue.W001"] == []


# Commands


@pytest.mark.parametrize("block", all_blocks("console"))
def test_the_commands_exist_and_take_their_arguments(block: Block):
    commands = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    assert commands
    for command in commands:
        # The settings on the page have that database; the tests have others.
        check_command(command.replace("--database queue", "--database other"))


def check_command(command: str) -> None:
    match shlex.split(command):
        case ["python", "manage.py", name, *arguments]:
            parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
            parser.parse_args(arguments)
        case ["make", *arguments]:
            check_make(arguments)
        case ["pip", "install", requirement]:
            check_requirement(requirement)
        case _:
            pytest.fail(f"Nobody knows whether this works: {command}")


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable, given, value = argument.partition("=")
        if given:
            assert f"$({variable})" in makefile
            assert value in "".join(path.read_text() for path in (ROOT / "example_project").rglob("*.py"))
        else:
            assert re.search(rf"^{argument}\b.*:(?!=)", makefile, re.M), f"The Makefile has no target {argument}."


def check_requirement(requirement: str) -> None:
    found = re.fullmatch(r"django-dbqueue(?:\[([\w,]+)\])?", requirement)
    assert found
    optional = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for extra in filter(None, (found[1] or "").split(",")):
        assert re.search(rf"^{extra} = \[", optional, re.M)


@pytest.mark.parametrize("block", all_blocks("ini"))
def test_a_unit_for_systemd_starts_a_command_that_exists(block: Block):
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block.text)
    start = unit["Service"]["ExecStart"]
    check_command("python " + start.partition(" ")[2])
    assert int(unit["Service"]["TimeoutStopSec"]) > Options().shutdown_timeout + 10


# Tables


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column is headed so."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_every_option_is_in_the_docs_with_its_default():
    documented = {name: eval(default) for name, default, _ in table("docs/configuration.md", "Option")}
    assert documented == {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}


def test_every_flag_of_runqueue_is_in_the_docs():
    of_every_command = flags(BaseCommand())
    ours = [flag for flag in flags(load_command_class("django_dbqueue", "runqueue")) if flag not in of_every_command]
    assert [flag for flag, _ in table("docs/configuration.md", "Flag")] == ours


def flags(command: BaseCommand) -> list[str]:
    parser = command.create_parser("manage.py", "any")
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def test_every_option_of_the_decorator_is_in_the_docs():
    from django_dbqueue import Task

    fields = {field.name for field in dataclasses.fields(Task)} - {"func", "run_after", "metadata"}
    assert {row[0] for row in table("docs/tasks.md", "Option")} == fields


def test_every_option_of_recurring_is_in_the_docs_with_its_default():
    from django_dbqueue import recurring

    documented = {name: eval(default, {"timedelta": timedelta}) for name, _, default in table("docs/recurring.md", "Option")}
    assert documented == {each.name: each.default for each in inspect.signature(recurring).parameters.values()}


def test_every_way_with_missed_runs_is_in_the_docs():
    documented = [eval(row[0]) for row in table("docs/recurring.md", "Missed")]
    assert documented == list(MISSED) == RecurringTask.Missed.values


def test_every_strategy_is_in_the_docs():
    documented = [type(eval(row[0])) for row in table("docs/tasks.md", "Strategy")]
    assert documented == [Constant, Linear, Exponential]
    for text, waits in ((row[0], row[1]) for row in table("docs/tasks.md", "Strategy")):
        strategy = eval(text)
        assert [f"{strategy.seconds(number):g}" for number in (1, 2, 3)] == waits.removesuffix(", …").split(", ")


def test_every_state_and_every_outcome_is_in_the_docs():
    assert [row[0] for row in table("docs/lifecycle.md", "State")] == [state.name for state in Job.State]
    assert {row[0] for row in table("docs/lifecycle.md", "Outcome")} == {outcome.name for outcome in Execution.Outcome}


def test_every_verb_in_the_diagram_is_a_verb_of_the_queryset():
    (diagram,) = (block.text for block in blocks(ROOT / "docs/lifecycle.md") if block.language == "text")
    states = set(re.findall(r"\b[A-Z]{5,}\b", diagram))
    assert states == {state.name for state in Job.State} - {"BLOCKED"}
    verbs = ["claim", "release", "dispatch", "retry", "discard"]
    assert all(verb in diagram and hasattr(JobQuerySet, verb) for verb in verbs)
    assert "settle" in diagram and hasattr(ExecutionQuerySet, "settle")


def test_every_system_check_is_in_the_docs():
    source = "".join(path.read_text() for path in (ROOT / "django_dbqueue").rglob("*.py"))
    assert [row[0] for row in table("docs/configuration.md", "Id")] == sorted(set(re.findall(r"dbqueue\.[EWI]\d{3}", source)))


def test_every_permission_is_in_the_docs():
    own = set()
    for model in apps.get_app_config("dbqueue").get_models():
        codenames = [codename for codename, _ in model._meta.permissions]
        own |= {*codenames, *(get_permission_codename(action, model._meta) for action in model._meta.default_permissions)}
    assert {row[0] for row in table("docs/admin.md", "Permission")} == {f"dbqueue.{codename}" for codename in own}


# Links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_every_page_is_reachable_from_the_index():
    index = (ROOT / "docs/index.md").read_text()
    listed = set(re.findall(r"^(\w+)$", "".join(re.findall(r"^```\{toctree\}(.*?)^```$", index, re.M | re.S)), re.M))
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}


def test_there_is_no_debris_of_a_database_in_the_settings():
    """The settings blocks above must not leave a connection behind."""
    assert set(connections) == set(settings.DATABASES)


def test_each_test_that_the_docs_name_is_there():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 30
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []
