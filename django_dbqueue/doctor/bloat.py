"""PostgreSQL: bloat, that is tables and indexes several times as large as their contents."""

from __future__ import annotations

from collections.abc import Iterator

from .database import QueueDatabase
from .finding import Finding, megabytes

# A relation of LARGE bytes or more is reported if it has at least TIMES the size of a rebuilt one.
TIMES, LARGE = 5, 100 * 2**20
# Page and row counts come from the last VACUUM or ANALYZE, so they belong together. The
# header and the line pointer of a row take 28 bytes in a table and 12 bytes in an index. Rows are
# rounded up to 8 bytes. Pages count as filled up to their fillfactor.
SIZES = """
SELECT c.oid::regclass::text AS name, c.relkind = 'i' AS is_index, c.relpages * block.size AS size,
    greatest(1, ceil(
        c.reltuples * (ceil((w.width + CASE c.relkind WHEN 'i' THEN 12 ELSE 28 END) / 8) * 8)
        / (block.size * fill.factor / 100)
    )) * block.size AS expected
FROM pg_class t
JOIN pg_class c
    ON c.oid = t.oid OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = t.oid)
CROSS JOIN (SELECT current_setting('block_size')::float AS size) AS block
CROSS JOIN LATERAL (
    SELECT
        coalesce(max(option_value::float), CASE c.relkind WHEN 'i' THEN 90 ELSE 100 END) AS factor
    FROM pg_options_to_table(c.reloptions) WHERE option_name = 'fillfactor'
) AS fill
CROSS JOIN LATERAL (
    SELECT coalesce(
        sum(s.avg_width * CASE c.relkind WHEN 'i' THEN 1 ELSE 1 - s.null_frac END), 0
    ) AS width
    FROM pg_attribute a
    JOIN pg_stats s ON s.schemaname = t.relnamespace::regnamespace::text
        AND s.tablename = t.relname AND s.attname = a.attname
    WHERE a.attrelid = c.oid AND a.attnum > 0
) AS w
WHERE t.oid = ANY (SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name)
    AND c.reltuples >= 0 AND w.width > 0
ORDER BY c.relpages DESC
"""


def bloat(database: QueueDatabase) -> Iterator[Finding]:
    for each in database.ask(SIZES, database.tables):
        if each.size < LARGE or each.size < TIMES * each.expected:
            continue
        what = (
            f"{each.name} has {megabytes(each.size)}; "
            f"its contents need about {megabytes(each.expected)}."
        )
        if each.is_index:
            yield Finding(
                what,
                "Its empty pages are read and cached too, and are not freed automatically.",
                f"REINDEX INDEX CONCURRENTLY {each.name};",
            )
        else:
            yield Finding(
                what,
                "New rows reuse its free space, but vacuum, backups and the cache process it all.",
                f"VACUUM (FULL, ANALYZE) {each.name};  "
                "-- Locks the table: stop runqueue first. pg_repack does not lock it.",
            )
