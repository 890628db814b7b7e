"""``python -m benchmarks``: measures how fast queues are, side by side. See ``--help``, and README.md beside this file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import environments, machine, scenarios
from .bench import Bench
from .server import Server, server
from .systems import LIMITS, OURS, RIVALS, Unsupported, system

EVERY = [*OURS, *LIMITS, *RIVALS]

SCENARIOS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "enqueue": partial(scenarios.enqueue, jobs=5000),
    "enqueue many": partial(scenarios.enqueue_many, jobs=20_000),
    "drain 1 × 1": partial(scenarios.drain, processes=1, threads=1, jobs=50_000),
    "drain 1 × 8": partial(scenarios.drain, processes=1, threads=8, jobs=50_000),
    "drain 2 × 4": partial(scenarios.drain, processes=2, threads=4, jobs=50_000),
    "drain 1 × 8, one read and one write each": partial(
        scenarios.drain, processes=1, threads=8, jobs=10_000, task="pay", args=(1,)
    ),
    "latency": scenarios.latency,
    "idle": scenarios.idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--systems", nargs="+", choices=[*EVERY, "all"], default=[*OURS, *LIMITS])
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3, help="How often each is measured, in turn (default: %(default)s).")
    parser.add_argument("--output", type=Path, help="Where the figures are written, as JSON.")
    given = parser.parse_args()
    systems = [name for name in (EVERY if "all" in given.systems else given.systems) if is_possible(name)]
    pythons = {name: environments.python(name) for name in systems}
    with server() as where:
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for scenario in given.scenarios:
            for _ in range(given.rounds):
                for name, python in pythons.items():
                    try:
                        figures = measure(scenario, name, where, python)
                    except Unsupported as error:
                        print(f"{scenario:<24}{name:<16}— {error}", flush=True)
                        continue
                    found.setdefault(scenario, {}).setdefault(name, []).append(figures)
                    print(
                        f"{scenario:<24}{name:<16}" + "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()),
                        flush=True,
                    )
        packages = {name: environments.packages(name) for name in systems if name in RIVALS}
        facts = {**machine.facts(), **where.facts(), "packages": packages}
    if given.output:
        given.output.write_text(json.dumps({"facts": facts, "runs": found}, indent=1))


def is_possible(name: str) -> bool:
    if lacks := system(name).lacks():
        print(f"{name} is left out: {lacks}")
    return not lacks


def measure(scenario: str, name: str, where: Server, python: str) -> dict[str, Any]:
    bench = Bench(name, where, python)
    try:
        return SCENARIOS[scenario](bench)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
