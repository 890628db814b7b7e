"""Run the README and the docs: every code block, every command, every table of options.

The blocks of a page run in order, with the settings of the quickstart. Each block that begins with
``# settings.py`` changes the settings, and the project must then pass the system checks. ``python``
blocks belong to the tasks module; after each block its jobs are run. ``pycon`` blocks are compared
with their output. Commands of ``console`` blocks must exist and accept their arguments; quick ones
are run. ``postgresql`` blocks run on PostgreSQL only. ``text`` blocks are not checked.

All modules of the app that a page names, as in ``# shop/orders.py``, are one module here. The models
in ``# shop/models.py`` are those of ``tests.models``, which have tables. No job may fail, except in a
block with the comment ``# This job fails``. ``test_newcomer`` runs some pages in a real project.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import doctest
import email.message
import importlib.metadata
import inspect
import io
import re
import shlex
import sys
import types
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import django
import pytest
import yaml
from asgiref.sync import async_to_sync
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_permission_codename
from django.core import signals as request_signals
from django.core.checks import run_checks
from django.core.management import BaseCommand, call_command, get_commands, load_command_class
from django.db import connection, connections
from django.db.models import signals as model_signals
from django.dispatch import Signal

from django_dbqueue import Constant, Exponential, Linear
from django_dbqueue import signals as queue_signals
from django_dbqueue.backend import DatabaseBackend
from django_dbqueue.compat import InvalidTask, signals, task_backends
from django_dbqueue.core import documentation
from django_dbqueue.core.options import Options
from django_dbqueue.doctor import runner
from django_dbqueue.models import Execution, Job, RecurringTask
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.recurrence.rule import MISSED
from django_dbqueue.routers import QueueRouter
from django_dbqueue.testing import drain

from . import direct, models

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
# In the order of the index.
LISTED = re.findall(
    r"^(\w+)$",
    "".join(re.findall(r"^```\{toctree\}(.*?)^```$", (DOCS / "index.md").read_text(), re.M | re.S)),
    re.M,
)
PAGES = [
    ROOT / "README.md",
    DOCS / "index.md",
    *(DOCS / f"{name}.md" for name in LISTED),
    *sorted((DOCS / "decisions").glob("*.md")),
]
FRAMEWORK = signals.__name__.removesuffix(".signals")
SETTINGS = "# settings.py\n"
MODELS = "# shop/models.py\n"
FAILS = "# This job fails"


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
    """Replace names of Django's Tasks framework by those of the backport on Django 5.2."""
    error = f"{InvalidTask.__module__}.{InvalidTask.__qualname__}"
    return text.replace("django.tasks.exceptions.InvalidTask", error).replace(
        "django.tasks", FRAMEWORK
    )


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_code_block_has_a_known_language():
    known = {"python", "pycon", "postgresql", "console", "text"}
    assert [
        block.place for page in PAGES for block in blocks(page) if block.language not in known
    ] == []


# Python


@pytest.fixture
def own_receivers() -> Iterator[None]:
    """Disconnect the receivers that the code blocks of a page connect."""
    every = [
        each
        for module in (queue_signals, signals, request_signals, model_signals)
        for each in vars(module).values()
        if isinstance(each, Signal)
    ]
    before = [list(each.receivers) for each in every]
    yield
    for each, receivers in zip(every, before, strict=True):
        each.receivers = receivers
        each.sender_receivers_cache.clear()


def is_run(block: Block) -> bool:
    return block.language in ("python", "pycon", "postgresql", "console")


def is_settings(block: Block) -> bool:
    return block.language == "python" and block.text.startswith(SETTINGS)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.usefixtures("own_receivers")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(is_run, blocks(page)))], ids=name_of
)
def test_code_blocks_of_a_page_run_in_order(
    page: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
):
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    module = module_of_the_app(page, monkeypatch)
    failed_before: set[int] = set()
    project = Project(settings)
    if page.name not in ("README.md", QUICKSTART.name):
        for block in filter(is_settings, blocks(QUICKSTART)):
            project.change(block)
    for block in filter(is_run, blocks(page)):
        before = set(vars(module))
        if is_settings(block):
            project.change(block)
        elif block.language == "console":
            run_commands(block)
        elif block.language == "pycon":
            compare(block, module)
        elif block.language == "postgresql":
            execute_sql(block)
        elif block.text.startswith(MODELS):
            use_models(block, module)
        else:
            execute(block, module)
        if project.has_a_queue():
            drain()
        failed = Execution.objects.filter(outcome=Execution.Outcome.FAILED)
        if FAILS in block.text:
            failed_before |= {each.pk for each in failed}
            assert failed_before
        for execution in failed.exclude(pk__in=failed_before):
            pytest.fail(f"A job of {block.place} failed.\n{execution.traceback}")
        run_test_cases(module, set(vars(module)) - before)


def module_of_the_app(page: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return the module ``shop.tasks``, which is all other modules of the app, too."""
    app, module = types.ModuleType("shop"), types.ModuleType("shop.tasks")
    monkeypatch.setitem(sys.modules, "shop", app)
    for name in {"tasks", *re.findall(r"^# shop/(\w+)\.py$", page.read_text(), re.M)}:
        setattr(app, name, module)
        monkeypatch.setitem(sys.modules, f"shop.{name}", module)
    return module


def use_models(block: Block, module: types.ModuleType) -> None:
    """Add the models of the tests that have the names in the block. Their code must be the same."""
    found = [each for each in ast.parse(block.text).body if isinstance(each, ast.ClassDef)]
    assert found
    for each in found:
        model = getattr(models, each.name)
        assert ast.unparse(each) == ast.unparse(ast.parse(inspect.getsource(model)))
        setattr(module, each.name, model)


class Project:
    """The reader's settings: those of ``startproject``, changed by the blocks of the docs."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._given: dict[str, Any] = {
            "INSTALLED_APPS": [
                "django.contrib.admin",
                "django.contrib.auth",
                "django.contrib.contenttypes",
                "django.contrib.sessions",
                "django.contrib.messages",
                "django.contrib.staticfiles",
            ],
            "DATABASES": {
                "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}
            },
        }
        self._apply()

    def change(self, block: Block) -> None:
        """Apply the block. The project must then pass the system checks."""
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), self._given)
        assert set(self._given["INSTALLED_APPS"]) <= set(settings.INSTALLED_APPS)
        assert {each["ENGINE"] for each in self._given["DATABASES"].values()} <= {
            "django.db.backends.sqlite3",
            "django.db.backends.postgresql",
        }
        for each in self._given["TASKS"].values():
            assert each.get("OPTIONS", {}).get("database", "default") in self._given["DATABASES"]
        self._apply()
        for alias in task_backends:
            assert list(task_backends[alias].check()) == []
        tags = ["dbqueue", "dbqueue_recurring"]
        known = OF_THE_TESTS | (set() if self.has_a_queue() else {"dbqueue.W004"})
        assert [message for message in run_checks(tags=tags) if message.id not in known] == []
        if self.has_a_queue() and self._given.get("DATABASE_ROUTERS"):
            assert QueueRouter().db_for_write(Job) == task_backends["default"].database

    def has_a_queue(self) -> bool:
        return isinstance(task_backends["default"], DatabaseBackend)

    def _apply(self) -> None:
        # The first database of the docs beside the project's is the second one of the tests.
        tasks = copy.deepcopy(self._given.get("TASKS", {}))
        ours: dict[str, str] = {"default": "default"}
        for each in tasks.values():
            options = each.setdefault("OPTIONS", {})
            name = options.get("database", "default")
            options["database"] = ours.setdefault(name, "other" if len(ours) == 1 else "default")
        self._settings.TASKS = tasks or {
            "default": {"BACKEND": f"{FRAMEWORK}.backends.immediate.ImmediateBackend"}
        }
        self._settings.DATABASE_ROUTERS = self._given.get("DATABASE_ROUTERS", [])


def execute(block: Block, module: types.ModuleType) -> None:
    # Leading empty lines: a traceback then names the line of the page.
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
    test = doctest.DocTestParser().get_doctest(
        block.text, module.__dict__, block.place, str(block.page), block.line - 1
    )
    test.globs = module.__dict__
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    if runner.run(test, out=output.append, clear_globs=False).failed:
        pytest.fail("".join(output))


def run_test_cases(module: types.ModuleType, names: set[str]) -> None:
    """Run the TestCases of these names, as a project's test runner does: without older jobs."""
    found = [
        each
        for name in sorted(names)
        if isinstance(each := getattr(module, name), type) and issubclass(each, unittest.TestCase)
    ]
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, found))
    wanted = suite.countTestCases()
    if wanted:
        # A job of the page that a rate holds back may be due only now.
        Job.objects.all().delete()
    result = unittest.TestResult()
    suite.run(result)
    assert [trace for _, trace in [*result.failures, *result.errors]] == []
    assert result.testsRun == wanted


# Commands


# Warnings about the tests' own settings and tasks; and commands that are quick and change nothing.
OF_THE_TESTS = {"dbqueue.W001", "dbqueue.W005"}
RUN = {"check", "migrate", "checkqueue"}


def run_commands(block: Block) -> None:
    commands = [
        line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")
    ]
    assert commands
    for command in commands:
        # The database of the page's settings has another name in the tests.
        command = command.replace("--database queue", "--database other")
        check_command(command)
        match shlex.split(command):
            case ["python", "manage.py", name] if name in RUN:
                # Exit code 1: something needs a change, such as no running workers.
                with (
                    contextlib.suppress(SystemExit)
                    if name == "checkqueue"
                    else contextlib.nullcontext()
                ):
                    call_command(name, stdout=io.StringIO(), stderr=io.StringIO())


def check_command(command: str) -> None:
    match shlex.split(command):
        case ["python", "manage.py", name, *arguments]:
            parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
            parser.parse_args(arguments)
        case ["make", *arguments]:
            check_make(arguments)
        case ["pip", "install", requirement]:
            check_requirement(requirement)
        case [variable, *_rest] if found := re.match(r"([A-Z_]+)=\S+ ", command):
            assert found[1] in (ROOT / "tests" / "__main__.py").read_text(), (
                f"Nothing reads {variable}."
            )
            check_command(command[found.end() :])
        case _:
            pytest.fail(f"The test cannot check this command: {command}")


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable, given, value = argument.partition("=")
        if given:
            assert f"$({variable})" in makefile
            example = "".join(path.read_text() for path in (ROOT / "example_project").rglob("*.py"))
            assert value in example or (ROOT / value.split()[0]).is_file()
        else:
            assert re.search(rf"^{argument}\b.*:(?!=)", makefile, re.M), (
                f"The Makefile has no target {argument}."
            )


def check_requirement(requirement: str) -> None:
    found = re.fullmatch(r"django-dbqueue-tasks(?:\[([\w,]+)\])?", requirement)
    assert found
    optional = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    for extra in filter(None, (found[1] or "").split(",")):
        assert re.search(rf"^{extra} = \[", optional, re.M)


# Tables


def table(page: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this heading."""
    lines = (ROOT / page).read_text().splitlines()
    heading = f"| {first} |" if first else "| |"
    start = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_every_option_is_in_the_docs_with_its_default():
    documented = {
        name: eval(default) for name, default, _ in table("docs/configuration.md", "Option")
    }
    assert documented == {
        field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)
    }


def test_every_flag_of_runqueue_is_in_the_docs():
    of_every_command = flags(BaseCommand())
    ours = [
        flag
        for flag in flags(load_command_class("django_dbqueue", "runqueue"))
        if flag not in of_every_command
    ]
    assert [flag for flag, _ in table("docs/configuration.md", "Flag")] == ours


def test_every_flag_of_other_commands_is_in_the_docs():
    text = "".join(page.read_text() for page in (settings.BASE_DIR / "docs").glob("*.md"))
    words = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    of_every_command = flags(BaseCommand())
    for name in ("queue", "checkqueue", "queuehealth"):
        parser = load_command_class("django_dbqueue", name).create_parser("manage.py", name)
        verbs = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), {})
        ours = {each for of in (parser, *verbs.values()) for each in flags_of(of)}
        assert ours - {*of_every_command} <= words, name


def flags(command: BaseCommand) -> list[str]:
    return flags_of(command.create_parser("manage.py", "any"))


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]


def test_every_option_of_the_decorator_is_in_the_docs():
    from django_dbqueue import Task

    others = {"func", "run_after", "metadata", "own_options", "enqueue_when"}
    fields = {field.name for field in dataclasses.fields(Task)} - others | {"enqueue"}
    assert {row[0] for row in table("docs/tasks.md", "Option")} == fields


def test_every_option_of_recurring_is_in_the_docs_with_its_default():
    from django_dbqueue import recurring

    documented = {
        name: eval(default, {"timedelta": timedelta})
        for name, _, default in table("docs/recurring.md", "Option")
    }
    assert documented == {
        each.name: each.default for each in inspect.signature(recurring).parameters.values()
    }


def test_every_missed_option_is_in_the_docs():
    documented = [eval(row[0]) for row in table("docs/recurring.md", "Missed")]
    assert documented == list(MISSED) == RecurringTask.Missed.values


def test_every_strategy_is_in_the_docs():
    documented = [type(eval(row[0])) for row in table("docs/tasks.md", "Strategy")]
    assert documented == [Constant, Linear, Exponential]
    for text, waits in ((row[0], row[1]) for row in table("docs/tasks.md", "Strategy")):
        strategy = eval(text)
        assert [f"{strategy.seconds(number):g}" for number in (1, 2, 3)] == waits.removesuffix(
            ", …"
        ).split(", ")


def test_every_state_and_every_outcome_is_in_the_docs():
    assert [row[0] for row in table("docs/lifecycle.md", "State")] == [
        state.name for state in Job.State
    ]
    assert {row[0] for row in table("docs/lifecycle.md", "Outcome")} == {
        outcome.name for outcome in Execution.Outcome
    }


def test_every_verb_in_the_diagram_exists():
    (diagram,) = (
        block.text for block in blocks(ROOT / "docs/lifecycle.md") if block.language == "text"
    )
    states = set(re.findall(r"\b[A-Z]{5,}\b", diagram))
    assert states == {state.name for state in Job.State} - {"BLOCKED"}
    assert all(verb in diagram and hasattr(JobQuerySet, verb) for verb in ["retry", "discard"])
    assert all(
        verb in diagram and hasattr(direct, verb)
        for verb in ["claim", "release", "dispatch", "settle"]
    )


def explained(section: str) -> list[str]:
    """Return the names that a section of the page of errors explains, each under a heading."""
    text = (DOCS / "errors.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^### `(\S+)`$", text, re.M)


def test_every_system_check_is_explained():
    source = "".join(path.read_text() for path in (ROOT / "django_dbqueue").rglob("*.py"))
    assert explained("System checks") == sorted(set(re.findall(r"dbqueue\.[EWI]\d{3}", source)))


def test_every_finding_of_checkqueue_is_explained():
    # A database that cannot be used has findings of its own.
    assert sorted(explained("Findings of checkqueue")) == sorted(
        [*runner.names(), "connection", "tables"]
    )


def test_every_public_exception_is_explained():
    of_the_framework = ["InvalidTask", "TaskResultDoesNotExist", "TaskResultMismatch"]
    ours = re.findall(r"autoexception:: [\w.]*\.(\w+)", (DOCS / "api.md").read_text())
    assert sorted(explained("Exceptions")) == sorted([*of_the_framework, *ours])


def test_every_explanation_has_effect_and_remedy():
    text = (DOCS / "errors.md").read_text()
    assert [
        part.partition("\n")[0]
        for part in re.split(r"^### ", text, flags=re.M)[1:]
        if not (part.count("\n- **Effect.** ") == part.count("\n- **Remedy.** ") == 1)
    ] == []


@pytest.mark.parametrize("site", ["", "https://example.com/docs"])
def test_hint_of_a_system_check_leads_to_its_explanation(site: str, settings: Any, monkeypatch):
    package = email.message.Message()
    package["Project-URL"] = "Source, https://example.com/source"
    if site:
        package["Project-URL"] = f"Documentation, {site}"
    monkeypatch.setattr(documentation, "_site", documentation._site.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "metadata", {documentation.DISTRIBUTION: package}.get)
    settings.TASKS = {
        "default": {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "OPTIONS": {"allow_sql": ["nowhere"]},
        },
        "other": {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "OPTIONS": {"thread": 4},
        },
    }
    found = {
        each.id: each.hint
        for each in (*task_backends["other"].check(), *run_checks(tags=["dbqueue"]))
    }
    page = f"{site}/errors.html" if site else "docs/errors.md"
    assert found["dbqueue.E001"] == f"See {page}#dbqueuee001."
    assert found["dbqueue.E010"].endswith(f" See {page}#dbqueuee010.")


def listed(cell: str) -> list[str]:
    return re.findall(r"\d+\.\d+|\d+", cell)


def test_supported_versions_are_those_of_the_package():
    package = (ROOT / "pyproject.toml").read_text()
    supported = {row[0]: listed(row[1]) for row in table("docs/stability.md", "")}
    assert supported["Python"] == re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', package
    )
    assert supported["Django"] == re.findall(r'"Framework :: Django :: (\d\.\d)"', package)
    required = (ROOT / "README.md").read_text().partition("\n## Requirements\n")[2]
    for database in ("PostgreSQL", "MariaDB", "MySQL", "SQLite"):
        assert f"{database} {supported[database][0]}+" in required.partition("\n## ")[0]


def test_versions_in_continuous_integration_are_those_of_its_scripts():
    script, workflow = ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "ci.yml"
    if not script.exists():
        pytest.skip("The source distribution has no continuous integration.")
    tested = {row[0]: listed(row[2]) for row in table("docs/stability.md", "")}
    legs = re.findall(r"\bleg (3\.\d+) (\d\.\d)", script.read_text())
    images = dict(re.findall(r"image: (\w+):([\d.]+)", workflow.read_text()))
    assert tested["Python"] == sorted({python for python, _ in legs}, key=natural)
    assert tested["Django"] == sorted({django for _, django in legs}, key=natural)
    assert tested["PostgreSQL"] == [images["postgres"]]
    assert tested["MariaDB"] == [images["mariadb"]]
    assert tested["MySQL"] == [images["mysql"]]


def test_every_row_of_the_comparison_has_its_evidence():
    rows, evidence = table("README.md", ""), table("docs/comparison.md", "Row")
    assert [row[0] for row in rows] == [row[0] for row in evidence]
    kinds = {kind for row in evidence for kind in row[1].lower().split(", ")}
    assert kinds == {"declared", "read", "run", "measured"}


def natural(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_hosted_documentation_is_built_from_existing_files():
    file = ROOT / ".readthedocs.yaml"
    if not file.exists():
        pytest.skip("The source distribution is not built there.")
    build = yaml.safe_load(file.read_text())
    groups = (ROOT / "pyproject.toml").read_text().partition("\n[dependency-groups]\n")[2]
    assert (ROOT / build["sphinx"]["configuration"]) == DOCS / "conf.py"
    assert build["build"]["jobs"]["install"][-1] == "pip install --editable . --group docs"
    assert re.search(r"^docs = \[", groups, re.M)
    assert build["sphinx"]["fail_on_warning"]


def test_deprecations_are_listed():
    source = "".join(path.read_text() for path in (ROOT / "django_dbqueue").rglob("*.py"))
    is_none = "Nothing is deprecated now." in (DOCS / "stability.md").read_text()
    assert is_none == ("DeprecationWarning" not in source)


def test_every_permission_is_in_the_docs():
    own = set()
    for model in apps.get_app_config("dbqueue").get_models():
        codenames = [codename for codename, _ in model._meta.permissions]
        own |= {
            *codenames,
            *(
                get_permission_codename(action, model._meta)
                for action in model._meta.default_permissions
            ),
        }
    assert {row[0] for row in table("docs/admin.md", "Permission")} == {
        f"dbqueue.{codename}" for codename in own
    }


# Links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_a_target(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


def prose_of(page: Path) -> str:
    """Return the text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_anchor_of_a_page_is_its_own(page: Path):
    """Of two equal headings, Sphinx gives the second one another anchor."""
    headings = re.findall(r"^#{1,3} (.+)$", prose_of(page), re.M)
    assert len(headings) == len({heading.lower() for heading in headings})


def test_pages_that_messages_refer_to_exist():
    source = "".join(path.read_text() for path in (ROOT / "django_dbqueue").rglob("*.py"))
    named = re.findall(r"\bdocs/([\w/]+)\.md(?:#([\w-]+))?", source)
    called = re.findall(r"\breference\(['\"](\w+)['\"](?:, ['\"]([\w-]+)['\"])?\)", source)
    assert named and ("from_celery", "refused") in called
    for name, anchor in [*named, *called]:
        path = f"{name}.md"
        assert (DOCS / path).exists(), path
        assert not anchor or anchor in anchors_of(DOCS / path), f"{path}#{anchor}"


def test_external_links_are_well_formed_and_spelt_in_one_way():
    """Whether they answer needs a network: see docs/releasing.md."""
    found = {
        link for page in PAGES for link in re.findall(r"\]\((\w+://[^)\s]*)\)", prose_of(page))
    }
    assert found
    for link in found:
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), link
        assert re.fullmatch(r"[\w/.~%+-]*", parts.path), link
        assert not (parts.query or link.endswith((".", ","))), link
    spellings = {link.partition("#")[0].rstrip("/").removesuffix("/index.html") for link in found}
    assert len(spellings) == len({link.partition("#")[0] for link in found})


def test_every_page_is_reachable_from_the_index():
    assert sorted(LISTED) == sorted({page.stem for page in DOCS.glob("*.md")} - {"index"})


def test_settings_blocks_leave_no_connection_behind():
    """The settings blocks above leave no connection behind."""
    assert set(connections) == set(settings.DATABASES)


def test_each_test_named_in_the_docs_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 30
    assert [
        f"{file}::{name}"
        for file, name in named
        if f"def {name}(" not in (ROOT / "tests" / file).read_text()
    ] == []
