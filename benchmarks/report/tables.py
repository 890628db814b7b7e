"""Tables in Markdown. A cell holds the median of the rounds ± half of their range."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..scenarios import BATCHES, BESIDE, GRID, KEYS, PORTABLE, SIZES, THREADS
from ..systems import system
from .figures import NAMES, OUR, Figures, Run
from .goals import KINDS, goals, more_threads

# The shapes in which all systems are compared.
COMPARED = ("1 × 8", "2 × 4")
# A column's heading, its scenario, and the figure.
Column = tuple[str, str, str]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; empty without rows. All columns but the first hold numbers."""
    if not rows:
        return ""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_system(columns: Sequence[Column], figures: Figures, compared: bool = False) -> str:
    """Return a row for each system; if ``compared``, with its value as a multiple of ours."""
    scenarios = [scenario for _, scenario, _ in columns]
    run = figures.of(*scenarios)
    headings, rows = ["System"], []
    for heading, _, _ in columns:
        headings += [heading, "of ours"] if compared else [heading]
    for name in run.systems(scenarios):
        row = [NAMES[name]]
        for _, scenario, figure in columns:
            row += [
                cell(run, scenario, name, figure),
                *([part(run, scenario, name, figure)] if compared else []),
            ]
        rows.append(row)
    return table(headings, rows)


def by_scenario(first: str, names: Mapping[str, str], figures: Figures) -> str:
    """Return our rates in several scenarios, each also as a percentage of the first."""
    run, (ungrouped, *_) = figures.of(*names.values()), names.values()
    base = run.median(ungrouped, OUR)
    rows = []
    for name, scenario in names.items():
        if rate := run.median(scenario, OUR):
            rows.append(
                [name, cell(run, scenario, OUR, "rate"), f"{rate / base:.0%}" if base else "—"]
            )
    return table([first, "jobs a second", f"of {next(iter(names))}"], rows)


def cell(run: Run, scenario: str, name: str, figure: str) -> str:
    value = run.median(scenario, name, figure)
    if value is None:
        return "—"
    spread = f"{run.spread(scenario, name, figure):.0%}"
    return number(value) if spread == "0%" else f"{number(value)} ± {spread}"


def part(run: Run, scenario: str, name: str, figure: str) -> str:
    value, our = run.median(scenario, name, figure), run.median(scenario, OUR, figure)
    return f"{value / our:.2g} ×" if value is not None and our and name != OUR else ""


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def facts(figures: Figures) -> str:
    """Return the machine and the versions of all runs."""
    found: dict[str, dict[str, None]] = {}
    for run in figures.runs:
        for name, value in run.facts.items():
            if name != "packages":
                found.setdefault(name, {})[str(value)] = None
    return table(
        ["", "in all runs"],
        [[name.replace("_", " "), ", ".join(values)] for name, values in found.items()],
    )


def versions(figures: Figures) -> str:
    installed = {
        name: lines for run in figures.runs for name, lines in run.facts.get("packages", {}).items()
    }
    rows = [
        [NAMES[name], ", ".join(wanted(name, installed[name]))]
        for name in NAMES
        if name in installed
    ]
    return table(["System", "installed"], rows)


def wanted(name: str, lines: Sequence[str]) -> list[str]:
    """Select a rival's requirements and Django from its installed packages."""
    asked = {re.split(r"[\[=<>]", each)[0] for each in (*system(name).requires, "django")}
    return [
        line.replace("==", " ")
        for line in lines
        if line.partition("==")[0].lower().replace("_", "-") in asked
    ]


def reached(figures: Figures) -> str:
    rows = []
    for goal in goals():
        value = goal.reached(figures)
        said = (
            ["not measured", ""]
            if value is None
            else [goal.show(value), "✓" if goal.holds(value) else "✗"]
        )
        rows.append([goal.name, goal.wanted, *said])
    return table(["Goal", "wanted", "reached", ""], rows)


def databases(figures: Figures) -> str:
    """Return our figures on each database, from the most complete run."""
    columns = [
        *((scenario, "rate") for scenario in PORTABLE[:-1]),
        ("latency", "p50"),
        ("latency", "p99"),
    ]
    runs = [
        figures.on(name, *PORTABLE)
        for name in dict.fromkeys(run.facts["database"] for run in figures.runs)
    ]
    rows = [
        [run.facts["database"], *(cell(run, scenario, OUR, figure) for scenario, figure in columns)]
        for run in runs
    ]
    return table(["Database", *PORTABLE[:-1], "latency p50, ms", "p99, ms"], rows)


def grid() -> dict[str, str]:
    return {f"{p} × {t}": f"append {p} × {t}" for p, t in GRID}


def threads(figures: Figures) -> str:
    """Return our rates of each kind of job by the number of threads, in one process."""
    rows = []
    for kind, what in KINDS.items():
        names = [f"{kind} 1 × {number}" for number in THREADS]
        run, lowest = figures.of(*names), more_threads(kind)(figures)
        if lowest is not None:
            rates = (cell(run, name, OUR, "rate") for name in names)
            rows.append([what, *rates, f"{lowest:.0%}"])
    headings = ["Jobs", *(f"1 × {number}" for number in THREADS), "lowest, of the best before"]
    return table(headings, rows)


COST = {
    "WAL, B": "wal",
    "to enqueue, B": "wal_to_enqueue",
    "to run, B": "wal_to_run",
    "statements to enqueue": "statements_to_enqueue",
    "to run": "statements_to_run",
    "commits to run": "commits_to_run",
}
IDLE = {
    "transactions/s": "commits",
    "statements/s": "statements",
    "of a core, %": "cpu_percent",
    "processes": "processes",
    "RSS, MB": "rss",
    "PSS, MB": "pss",
    "largest, MB": "rss_most",
    "shell, MB": "shell_rss",
}

TABLES: dict[str, Callable[[Figures], str]] = {
    "facts": facts,
    "versions": versions,
    "goals": reached,
    "append": partial(by_system, [(s, f"append {s}", "rate") for s in COMPARED], compared=True),
    "work": partial(by_system, [(s, f"work {s}", "rate") for s in COMPARED], compared=True),
    "threads": threads,
    "enqueue": partial(
        by_system,
        [("one by one", "enqueue", "rate"), ("20,000 with one call", "enqueue many", "rate")],
        compared=True,
    ),
    "latency": partial(
        by_system, [(f"{each}, ms", "latency", each) for each in ("p50", "p95", "p99")]
    ),
    "idle": partial(by_system, [(heading, "idle", figure) for heading, figure in IDLE.items()]),
    "cost": partial(by_system, [(heading, "cost", figure) for heading, figure in COST.items()]),
    "scale": partial(by_scenario, "Beside", {name: f"scale, {name}" for name in BESIDE}),
    "snapshot": partial(
        by_scenario, "Open snapshot", {name: f"snapshot, {name}" for name in ("none", "held")}
    ),
    "limited": partial(
        by_system,
        [
            ("one key, limit of 1", "hot key", "rate"),
            *((f"{number:,} keys, limit of 2", f"{number:,} keys", "rate") for number in KEYS),
        ],
    ),
    "waiting": partial(
        by_system,
        [
            *[
                ("0.1 s: jobs a second", "waiting 0.1 s", "rate"),
                ("at a time", "waiting 0.1 s", "at_a_time"),
            ],
            *[
                ("1 s: jobs a second", "waiting 1 s", "rate"),
                ("at a time", "waiting 1 s", "at_a_time"),
            ],
        ],
    ),
    "grid": partial(by_scenario, "Processes × threads", grid()),
    "batches": partial(
        by_system, [(f"{size:,} a call", f"enqueue by {size:,}", "rate") for size in BATCHES]
    ),
    "sizes": partial(
        by_system,
        [
            (f"{verb} {size}", f"{verb} {size}", "rate")
            for size in SIZES
            for verb in ("enqueue", "drain")
        ],
    ),
    "databases": databases,
}
