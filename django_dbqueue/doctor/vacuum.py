"""PostgreSQL: autovacuum, dead rows and statistics of the queue's tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .database import QueueDatabase
from .finding import Finding, format_duration

# A table with this many updates since its statistics were reset is busy.
BUSY = 1_000_000
# Maximum number of dead rows at which autovacuum should begin.
LATE = 100_000
# Dead rows matter above DEAD, if the table was not vacuumed for IDLE seconds.
DEAD, IDLE = 100_000, 600
# Table size in bytes from which statistics are worthwhile.
LARGE = 16 * 2**20
TABLES = """
SELECT c.relname AS name, s.n_live_tup AS live, s.n_dead_tup AS dead, s.n_tup_upd AS updated,
    pg_relation_size(c.oid) AS size, c.reloptions AS options,
    EXTRACT(
        EPOCH FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum)
    )::float AS vacuumed,
    EXISTS (
        SELECT 1 FROM pg_stats p WHERE p.schemaname = s.schemaname AND p.tablename = s.relname
    ) AS is_known,
    current_setting('autovacuum_vacuum_threshold')::float AS threshold,
    current_setting('autovacuum_vacuum_scale_factor')::float AS scale_factor
FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid = ANY (SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name)
ORDER BY pg_relation_size(c.oid) DESC
"""


class Table(Protocol):
    """A row of ``TABLES``. ``vacuumed`` is in seconds; None for a table without any vacuum."""

    name: str
    live: int
    dead: int
    updated: int
    size: int
    options: list[str] | None
    vacuumed: float | None
    is_known: bool
    threshold: float
    scale_factor: float


def tables(database: QueueDatabase) -> list[Table]:
    return database.ask(TABLES, database.tables)


def autovacuum(database: QueueDatabase) -> Iterator[Finding]:
    for setting in ("autovacuum", "track_counts"):
        if database.value(f"SHOW {setting}") == "off":
            yield Finding(
                f"{setting} is off.",
                "Dead rows are not removed (each job leaves two), and statistics are not updated.",
                f"ALTER SYSTEM SET {setting} = on; SELECT pg_reload_conf();",
            )
    for table in tables(database):
        if _options(table).get("autovacuum_enabled", "on").lower() in ("off", "false", "no", "0"):
            yield Finding(
                f"Autovacuum is turned off for {table.name}, which has {table.dead:,} dead rows.",
                "They are not removed: the table and its indexes grow, and claims scan over them.",
                f"ALTER TABLE {table.name} RESET (autovacuum_enabled);",
            )


def late_autovacuum(database: QueueDatabase) -> Iterator[Finding]:
    """Check that autovacuum of busy tables begins early enough.

    Autovacuum waits for a share of the table. With a long history, that share is far larger than
    the rows of unfinished jobs.
    """
    for table in tables(database):
        if table.updated >= BUSY and _threshold(table) > LATE:
            yield Finding(
                f"Autovacuum begins when {table.name} has {_threshold(table):,.0f} dead rows: "
                f"a share of its {table.live:,} rows, most of which are history.",
                "Until then, claims scan over more and more dead rows, and the indexes of "
                "unfinished jobs grow. A fixed threshold keeps both small with a history of any "
                "length.",
                f"ALTER TABLE {table.name} SET (autovacuum_vacuum_scale_factor = 0, "
                "autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);",
            )


def dead_rows(database: QueueDatabase) -> Iterator[Finding]:
    for table in tables(database):
        is_left = table.vacuumed is None or table.vacuumed > IDLE
        if is_left and table.dead > max(DEAD, 2 * _threshold(table)):
            last = (
                "none since the statistics were reset"
                if table.vacuumed is None
                else f"{format_duration(table.vacuumed)} ago"
            )
            yield Finding(
                f"{table.name} has {table.dead:,} dead and {table.live:,} live rows; "
                f"last vacuum: {last}.",
                "Claims scan over dead rows, and new rows extend the table instead of reusing "
                "their space.",
                f"VACUUM (VERBOSE, ANALYZE) {table.name};  "
                "-- End old transactions first: until then, it removes nothing.",
            )


def statistics(database: QueueDatabase) -> Iterator[Finding]:
    for table in tables(database):
        if not table.is_known and table.size >= LARGE:
            yield Finding(
                f"{table.name} has about {table.live:,} rows and was never analysed.",
                "Without statistics the planner guesses, and may scan the table, not an index.",
                f"ANALYZE {table.name};",
            )


def _options(table: Table) -> dict[str, str]:
    return dict(option.split("=", 1) for option in table.options or ())


def _threshold(table: Table) -> float:
    """Return the number of dead rows at which autovacuum begins."""
    own = _options(table)
    least = float(own.get("autovacuum_vacuum_threshold", table.threshold))
    return least + float(own.get("autovacuum_vacuum_scale_factor", table.scale_factor)) * float(
        table.live
    )
