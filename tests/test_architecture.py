"""The architecture: imports go down, and only one module knows which Django it runs on."""

from __future__ import annotations

import ast
from pathlib import Path

import django_dbqueue

PACKAGE = Path(django_dbqueue.__file__).parent
# From the ground up. A file imports from the floors below its own, and on its floor from the files before it.
FLOORS = [
    [
        *["compat", "moments", "exceptions", "ids", "transactions", "wakeup", "backoff", "log"],
        *["arguments", "keys", "limits", "errors", "selector", "options", "expression", "schedule", "recurrence"],
    ],
    [
        "models.locking",
        "models.primary",
        "models.cluster",
        "models.expressions",
        "models.writing",
        "models.identifier",
        "models.document",
        "models.counts",
        "models.states",
        "models.noted",
        "models.process",
        "models.failure",
        "models.slot",
        "models.served",
        "models.series",
        "models.semaphores",
        "models.semaphore",
        "models.batch_share",
        "models.claim_size",
        "models.keyed",
        "models.alike",
        "models.walking",
        "models.operated",
        "models.lanes",
        "models.at_once",
        "models.jobs",
        "models.job",
        "models.progress",
        "models.asked",
        "models.settlement",
        "models.execution",
        "models.batch",
        "models.clearing",
        "models.pausing",
        "models.queue",
        "models.known_task",
        "models.stack",
        "models.hanged",
        "models.recurring_execution",
        "models.recurring_tasks",
        "models.recurring",
        "models.chores",
        "models",
    ],
    [
        *["policy", "tasks", "pipeline", "batch", "recurring_calls", "recurring"],
        *["results", "context", "retry", "backend", "routers", ""],
    ],
    [
        *[
            "runtime",
            "runtime.stop",
            "runtime.deadline",
            "runtime.connection",
            "runtime.log",
            "runtime.signals",
            "runtime.host",
            "runtime.board",
        ],
        *[
            "runtime.heartbeat",
            "runtime.listener",
            "runtime.lines",
            "runtime.calls",
            "runtime.stages",
            "runtime.executor",
            "runtime.marks",
            "runtime.claimer",
            "runtime.settler",
            "runtime.following",
            "runtime.durations",
        ],
        *[
            "runtime.pool",
            "runtime.coroutines",
            "runtime.watch",
            "runtime.notes",
            "runtime.pace",
            "runtime.worker",
            "runtime.recovery",
            "runtime.announcer",
            "runtime.witness",
        ],
        *["runtime.scheduler", "runtime.dispatcher"],
        *["runtime.roles", "runtime.child", "runtime.members", "runtime.drain", "runtime.supervisor"],
    ],
    [
        "contrib",
        "contrib.output",
        "contrib.rows",
        "contrib.tasks",
        "checks",
        "apps",
        "testing",
        *["upkeep", "upkeep.finding", "upkeep.database", "upkeep.queue"],
        *["upkeep.snapshots", "upkeep.vacuum", "upkeep.bloat", "upkeep.postgresql"],
        *["upkeep.mysql", "upkeep.innodb", "upkeep.sqlite", "upkeep.examine"],
        "management",
        "management.commands",
        "management.commands.checkqueue",
        "management.commands.runqueue",
    ],
]
HEIGHT = {name: (floor, place) for floor, names in enumerate(FLOORS) for place, name in enumerate(names)}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if not name.startswith("migrations"):
            found[name] = path
    return found


def imports_of(name: str, path: Path) -> set[str]:
    """The modules of the package that a file imports when it runs."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                inner = ".".join(filter(None, [*target, alias.name]))
                found.add(inner if inner in modules() else ".".join(filter(None, target)))
    return found


def _without_type_checking(tree: ast.Module) -> ast.Module:
    class Drop(ast.NodeTransformer):
        def visit_If(self, node):
            return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)

    return Drop().visit(tree)


def height(name: str) -> tuple[int, int]:
    return (len(FLOORS) - 1, 10**6) if name.startswith("admin") else HEIGHT[name]


def test_imports_go_down():
    upwards = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        for imported in imports_of(name, path)
        if not name.startswith("admin") and height(imported) >= height(name)
    ]

    assert upwards == []


def test_nothing_below_knows_the_admin():
    assert not [
        name
        for name, path in modules().items()
        if not name.startswith("admin")
        for i in imports_of(name, path)
        if i.startswith("admin")
    ]


def test_only_compat_knows_which_django_this_is():
    knowing = [name for name, path in modules().items() if "django.tasks" in path.read_text() and name != "compat"]

    assert [name for name in knowing if "import" in "".join(_import_lines(modules()[name]))] == []


def _import_lines(path: Path) -> list[str]:
    return [
        line
        for line in path.read_text().splitlines()
        if line.startswith(("from django.tasks", "import django.tasks", "from django_tasks"))
    ]
