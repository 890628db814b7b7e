"""Goals, and whether they are reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..scenarios import BESIDE, GRID, THREADS
from ..systems import RIVALS
from .figures import DJANGO_RIVALS, OUR, Figures, Run


@dataclass(frozen=True)
class Goal:
    """A goal of at least ``least`` or at most ``most``.

    reached: returns the measured value; None if it was not measured.
    """

    name: str
    reached: Callable[[Figures], float | None]
    least: float | None = None
    most: float | None = None
    unit: str = ""

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    @property
    def wanted(self) -> str:
        return (
            f"≥ {self.show(self.least)}"
            if self.least is not None
            else f"≤ {self.show(self.most or 0.0)}"
        )

    def show(self, value: float) -> str:
        return self.unit.format(value)


TIMES, PART, PER_SECOND, MS = "{:.3g} ×", "{:.1%}", "{:,.0f}/s", "{:.1f} ms"


def goals() -> list[Goal]:
    return [
        Goal(
            "appends, 1 × 8, of the best Django rival",
            beside("append 1 × 8", DJANGO_RIVALS),
            10,
            unit=TIMES,
        ),
        Goal("appends, 1 × 8, of Celery with Redis", beside("append 1 × 8", CELERY), 5, unit=TIMES),
        *[
            Goal(
                f"one read and one write, {s}, of the best loop without a queue",
                beside_best_loop(s),
                0.85,
                unit=PART,
            )
            for s in SHAPES
        ],
        *[
            Goal(
                f"one read and one write, {s}, of the best rival",
                beside(f"work {s}", RIVALS),
                2,
                unit=TIMES,
            )
            for s in SHAPES
        ],
        *[
            Goal(
                f"{what}, more threads, of the best rate of fewer",
                more_threads(kind),
                0.95,
                unit=PART,
            )
            for kind, what in KINDS.items()
        ],
        Goal(
            "enqueue, of the fastest Django rival", beside("enqueue", DJANGO_RIVALS), 1, unit=TIMES
        ),
        Goal("enqueue, of Celery with Redis", beside("enqueue", CELERY), 1, unit=TIMES),
        Goal(
            "time to enqueue, of Model.objects.create()", time_beside_create, most=1.3, unit=TIMES
        ),
        Goal("enqueue many", value("enqueue many", "rate"), 62_500, unit=PER_SECOND),
        Goal(
            "enqueue many, of the best Django rival",
            beside("enqueue many", DJANGO_RIVALS),
            3,
            unit=TIMES,
        ),
        Goal("enqueue many on MariaDB", bulk_on_mariadb, 25_000, unit=PER_SECOND),
        Goal("latency, median", value("latency", "p50"), most=2, unit=MS),
        Goal("latency, 99 of 100", value("latency", "p99"), most=5, unit=MS),
        *[
            Goal(
                f"latency on {name}, median: half of its shortest pause",
                waited(name),
                most=5,
                unit=MS,
            )
            for name in POLLING
        ],
        Goal("idle: statements a second", value("idle", "statements"), most=2, unit="{:.2g}"),
        Goal("idle: of a core", value("idle", "cpu_percent"), most=0.5, unit="{:.2g} %"),
        Goal(
            "idle: memory of a process, of Django's shell",
            memory_beside_a_shell,
            most=1.5,
            unit=TIMES,
        ),
        *[
            Goal(f"drain beside {name}, of nothing else", scaled(name), 0.95, unit=PART)
            for name in BESIDE
            if name != ALONE
        ],
        Goal("drain under an open snapshot, of none", under_a_snapshot, 0.8, unit=PART),
        Goal("one key with a limit of 1", value("hot key", "rate"), 1000, unit=PER_SECOND),
        Goal(
            "coroutines at a time, that wait for 1 s",
            value("waiting 1 s", "at_a_time"),
            2000,
            unit="{:,.0f}",
        ),
        Goal(
            "coroutines that wait for 0.1 s",
            value("waiting 0.1 s", "rate"),
            10_000,
            unit=PER_SECOND,
        ),
        Goal(
            "WAL of a job with 512 B of arguments",
            value("cost", "wal"),
            most=2700,
            unit="{:,.0f} B",
        ),
        Goal(
            "statements to run a job, under load",
            value("cost", "statements_to_run"),
            most=0.2,
            unit="{:.2g}",
        ),
    ]


SHAPES = ["1 × 8", "2 × 4"]
CELERY, LOOP = ["celery_redis"], "orm_loop"
KINDS = {
    "compute": "computations of 50 µs",
    "append": "appends",
    "work": "one read and one write",
    "sleep": "sleeps of 5 ms",
}
ALONE = "nothing else"
POLLING = ["MariaDB", "SQLite"]


def value(scenario: str, figure: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.of(scenario).median(scenario, OUR, figure)


def waited(database: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.on(database, "latency").median("latency", OUR, "p50")


def bulk_on_mariadb(figures: Figures) -> float | None:
    return figures.on("MariaDB", "enqueue many").median("enqueue many", OUR)


def beside(scenario: str, others: list[str]) -> Callable[[Figures], float | None]:
    """Return our rate as a multiple of the best rate of the others."""

    def ratio(figures: Figures) -> float | None:
        run = figures.of(scenario)
        return divided(run.median(scenario, OUR), run.best(scenario, others))

    return ratio


def beside_best_loop(shape: str) -> Callable[[Figures], float | None]:
    """Return our rate as a part of the loop's, with as many processes and its best threads."""
    processes = int(shape.partition(" ")[0])
    loops = [f"work {p} × {t}" for p, t in GRID if p == processes]

    def ratio(figures: Figures) -> float | None:
        run = figures.of(f"work {shape}", *loops)
        best = max(filter(None, (run.median(name, LOOP) for name in loops)), default=None)
        return divided(run.median(f"work {shape}", OUR), best)

    return ratio


def more_threads(kind: str) -> Callable[[Figures], float | None]:
    """Return the lowest rate of a number of threads, as a part of the best of no more threads."""
    names = [f"{kind} 1 × {threads}" for threads in THREADS]

    def ratio(figures: Figures) -> float | None:
        run = figures.of(*names)
        rates = [rate for name in names if (rate := run.median(name, OUR))]
        parts = [rate / max(rates[: place + 1]) for place, rate in enumerate(rates)]
        return min(parts) if len(parts) > 1 else None

    return ratio


def time_beside_create(figures: Figures) -> float | None:
    run = figures.of("enqueue")
    return divided(run.median("enqueue", "orm_loop"), run.median("enqueue", OUR))


def memory_beside_a_shell(figures: Figures) -> float | None:
    run = figures.of("idle")
    return divided(run.median("idle", OUR, "rss_most"), run.median("idle", OUR, "shell_rss"))


def scaled(name: str) -> Callable[[Figures], float | None]:
    ungrouped, crowded = f"scale, {ALONE}", f"scale, {name}"
    return lambda figures: within(figures.of(ungrouped, crowded), crowded, ungrouped)


def under_a_snapshot(figures: Figures) -> float | None:
    names = ("snapshot, held", "snapshot, none")
    return within(figures.of(*names), *names)


def within(run: Run, scenario: str, other: str) -> float | None:
    return divided(run.median(scenario, OUR), run.median(other, OUR))


def divided(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None
