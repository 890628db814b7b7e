"""Measure the speed of queues, side by side. See README.md beside this file."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import environments, machine
from .bench import Bench
from .scenarios import PORTABLE, SCENARIOS, USUAL
from .servers import DATABASES, Server, server
from .systems import LIMITS, OURS, RIVALS, Unsupported, system

EVERY = [*OURS, *LIMITS, *RIVALS]

Found = dict[str, dict[str, list[dict[str, Any]]]]


def main() -> None:
    given = parser().parse_args()
    others = given.database != "postgresql"
    wanted = given.systems or (OURS if others else [*OURS, *LIMITS])
    systems = [name for name in (EVERY if "all" in wanted else wanted) if is_possible(name)]
    pythons = {name: environments.python(name) for name in systems}
    scenarios = chosen(given.scenarios or (PORTABLE if others else USUAL))
    packages = {name: environments.packages(name) for name in systems if name in RIVALS}
    found: Found = {}
    with server(given.database, given.set) as where:
        facts = {"database": where.name, **machine.facts(), **where.facts(), "packages": packages}
        for number in range(given.rounds):
            measure_all(scenarios, pythons, where, found)
            if given.output:
                given.output.write_text(
                    json.dumps({"facts": {**facts, "rounds": number + 1}, "runs": found}, indent=1)
                )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="\n  ".join(["Systems:", *EVERY]) + "\n\n" + "\n  ".join(["Scenarios:", *SCENARIOS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    systems = [*EVERY, "all"]
    add(
        "--systems",
        nargs="+",
        choices=systems,
        metavar="NAME",
        help='Default: ours and the limits. "all" for every system.',
    )
    add(
        "--scenarios",
        nargs="+",
        metavar="NAME",
        help='Names, or patterns such as "drain*". Default: the usual ones.',
    )
    add(
        "--rounds",
        type=int,
        default=3,
        help="Number of measurements of each, in turn (default: %(default)s).",
    )
    add("--output", type=Path, help="File for the figures, written as JSON after each round.")
    add("--database", choices=DATABASES, default="postgresql", help="Default: %(default)s.")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Settings of the PostgreSQL server that the benchmark starts.",
    )
    return found


def chosen(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in SCENARIOS):
            raise SystemExit(f"There is no scenario {pattern!r}. See --help.")
    return [name for name in SCENARIOS if any(fnmatch(name, pattern) for pattern in patterns)]


def is_possible(name: str) -> bool:
    if lacks := system(name).lacks():
        print(f"{name} is left out: {lacks}")
    return not lacks


def measure_all(scenarios: list[str], pythons: dict[str, str], where: Server, found: Found) -> None:
    """Run one round: the systems are measured within minutes of each other."""
    for scenario in scenarios:
        for name, python in pythons.items():
            try:
                figures = measure(scenario, name, where, python)
            except Unsupported as error:
                print(f"{scenario:<27}{name:<16}— {error}", flush=True)
                continue
            found.setdefault(scenario, {}).setdefault(name, []).append(figures)
            print(
                f"{scenario:<27}{name:<16}" + "  ".join(map(show, figures, figures.values())),
                flush=True,
            )


def measure(scenario: str, name: str, where: Server, python: str) -> dict[str, Any]:
    bench = Bench(name, where, python)
    try:
        return SCENARIOS[scenario](bench)
    finally:
        bench.close()


def show(name: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return f"{name} {' '.join(f'{each:,.4g}' for each in values)}"


if __name__ == "__main__":
    main()
