"""The figures of some runs. What is compared is of one run: machines and hours differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..systems import LIMITS, OURS, RIVALS

OUR = OURS[0]
DJANGO_RIVALS = [name for name in RIVALS if name != "celery_redis"]
ORDER = [*OURS, *RIVALS, *LIMITS]
NAMES = {
    "dbqueue": "django-dbqueue-tasks",
    "celery_redis": "Celery with Redis",
    "dj_queue": "dj-queue",
    "django_ox": "django-ox",
    "django_q2": "Django Q2",
    "django_tasks_db": "django-tasks-db",
    "procrastinate": "Procrastinate",
    "steady_queue": "steady-queue",
    "pgbench": "no queue: pgbench",
    "psycopg_loop": "no queue: psycopg",
    "orm_loop": "no queue: the ORM",
}


@dataclass(frozen=True)
class Run:
    """One file of figures: by scenario and by system, one for each round."""

    facts: dict[str, Any]
    runs: dict[str, dict[str, list[dict[str, Any]]]]

    @classmethod
    def read(cls, file: Path) -> Run:
        return cls(**json.loads(file.read_text()))

    def values(self, scenario: str, system: str, figure: str = "rate") -> list[Any]:
        rounds = self.runs.get(scenario, {}).get(system, [])
        return [each[figure] for each in rounds if figure in each]

    def median(self, scenario: str, system: str, figure: str = "rate") -> float | None:
        values = self.values(scenario, system, figure)
        return median(values) if values else None

    def spread(self, scenario: str, system: str, figure: str = "rate") -> float:
        """Half of what lies between the lowest and the highest, as a part of the median."""
        values = self.values(scenario, system, figure)
        return (max(values) - min(values)) / 2 / median(values) if median(values) else 0.0

    def systems(self, scenarios: Iterable[str]) -> list[str]:
        return [
            name
            for name in ORDER
            if any(name in self.runs.get(scenario, {}) for scenario in scenarios)
        ]

    def size(self, scenarios: Iterable[str]) -> tuple[int, int]:
        """How many of them it has, and how many systems in all of these."""
        systems = [len(self.runs[scenario]) for scenario in scenarios if scenario in self.runs]
        return len(systems), sum(systems)

    def best(self, scenario: str, systems: Iterable[str]) -> float | None:
        """The highest rate that one of them has."""
        return max(filter(None, (self.median(scenario, name) for name in systems)), default=None)


NONE = Run({}, {})


class Figures:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def of(self, *scenarios: str) -> Run:
        """On PostgreSQL with its defaults."""
        return self.on("PostgreSQL", *scenarios)

    def on(self, database: str, *scenarios: str) -> Run:
        """The run on this database that has the most of these scenarios, and the most systems in them."""
        runs = (run for run in self.runs if run.facts["database"] == database)
        return max(runs, key=lambda run: run.size(scenarios), default=NONE)
