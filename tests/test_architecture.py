"""Imports point downwards, without cycles, and only compat depends on Django's version."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import django_dbqueue

PACKAGE = Path(django_dbqueue.__file__).parent
# From the bottom up. A module imports from its own layer and lower ones; folders include modules.
LAYERS = [
    [
        "compat",
        "exceptions",
        "backoff",
        "limits",
        "log",
        "signals",
        "core",
        "recurrence.rule",
        "recurrence.cron",
        "recurrence.cron_syntax",
    ],
    ["models"],
    ["engine"],
    [
        "task_options",
        "tasks",
        "registry",
        "pipelines",
        "batches",
        "bulk",
        "results",
        "context",
        "backend",
        "routers",
        "middleware",
        "recurrence",
        "",
    ],
    ["checks", "doctor"],
    ["runtime"],
    ["apps", "testing", "contrib", "command_line", "management", "beside"],
    ["pytest_plugin"],
    ["admin"],
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            .removesuffix("__init__")
            .rstrip(".")
        )
        if not name.startswith("migrations"):
            found[name] = path
    return found


MODULES = modules()


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports."""
    path = MODULES[name]
    package = [part for part in name.split(".") if part]
    package = package if path.name == "__init__.py" else package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = [
                *package[: len(package) - node.level + 1],
                *(node.module.split(".") if node.module else []),
            ]
            for alias in node.names:
                inner = ".".join([*target, alias.name])
                found.add(inner if inner in MODULES else ".".join(target))
    return found - {name}


def layer(name: str) -> int:
    while name not in LAYER:
        assert "." in name, f"{name} is in no layer. Name it in LAYERS."
        name = name.rpartition(".")[0]
    return LAYER[name]


def test_imports_point_downwards():
    upwards = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in imports_of(name)
        if layer(imported) > layer(name)
    ]

    assert upwards == []


def test_imports_have_no_cycles():
    TopologicalSorter(
        {name: imports_of(name) for name in MODULES}
    ).prepare()  # Raises CycleError, which names the modules.


def test_only_compat_imports_the_tasks_framework():
    importing = [
        name
        for name, path in MODULES.items()
        for line in path.read_text().splitlines()
        if line.startswith(("from django.tasks", "import django.tasks", "from django_tasks"))
    ]

    assert set(importing) <= {"compat"}
