"""Figures of several runs. Systems are compared within one run only: machines and hours differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..systems import LIMITS, OURS, RIVALS

OUR = OURS[0]
# Those that know nothing of Django, or need more than the project's database.
OTHER_RIVALS = ["oban", "pgqueuer", "celery_redis"]
DJANGO_RIVALS = [name for name in RIVALS if name not in OTHER_RIVALS]
ORDER = [*OURS, *RIVALS, *LIMITS]
NAMES = {
    "dbqueue": "django-dbqueue-tasks",
    "celery_redis": "Celery with Redis",
    "dj_queue": "dj-queue",
    "django_ox": "django-ox",
    "django_q2": "Django Q2",
    "django_tasks_db": "django-tasks-db",
    "oban": "Oban for Python",
    "pgqueuer": "PgQueuer",
    "procrastinate": "Procrastinate",
    "steady_queue": "steady-queue",
    "pgbench": "no queue: pgbench",
    "psycopg_loop": "no queue: psycopg",
    "orm_loop": "no queue: the ORM",
}


@dataclass(frozen=True)
class Run:
    """One file of figures, by scenario and system, with one entry per round."""

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
        """Return half of the range, as a fraction of the median."""
        values = self.values(scenario, system, figure)
        return (max(values) - min(values)) / 2 / median(values) if median(values) else 0.0

    def systems(self, scenarios: Iterable[str]) -> list[str]:
        return [
            name
            for name in ORDER
            if any(name in self.runs.get(scenario, {}) for scenario in scenarios)
        ]

    def size(self, scenarios: Iterable[str]) -> tuple[int, int]:
        """Return the number of these scenarios in the run, and of systems in them."""
        systems = [len(self.runs[scenario]) for scenario in scenarios if scenario in self.runs]
        return len(systems), sum(systems)

    def best(self, scenario: str, systems: Iterable[str]) -> float | None:
        """Return the highest rate of these systems."""
        return max(filter(None, (self.median(scenario, name) for name in systems)), default=None)


NONE = Run({}, {})


class Figures:
    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def of(self, *scenarios: str) -> Run:
        """Return the run on PostgreSQL with its defaults. As ``on()``."""
        return self.on("PostgreSQL", *scenarios)

    def on(self, database: str, *scenarios: str) -> Run:
        """Return the run on a database with most of these scenarios, then with most systems."""
        runs = (run for run in self.runs if run.facts["database"] == database)
        return max(runs, key=lambda run: run.size(scenarios), default=NONE)
