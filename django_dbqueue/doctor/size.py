"""The sizes of the queue's tables, and the size that they grow to at the rate of the last week."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from ..core.counts import Counts
from ..core.options import DAY, Options
from ..models import Execution, Job, Statistic
from .database import QueueDatabase

# With indexes and, on PostgreSQL, large values beside the rows. Row counts are estimates.
SIZES = {
    "postgresql": """
        SELECT c.oid::regclass::text AS name, pg_total_relation_size(c.oid) AS size,
            greatest(c.reltuples, 0)::bigint AS number
        FROM pg_class c
        WHERE c.oid = ANY (SELECT to_regclass(name)::oid FROM unnest(%s::text[]) AS name)
        ORDER BY size DESC
        """,
    "mysql": """
        SELECT table_name AS name, data_length + index_length AS size, table_rows AS number
        FROM information_schema.tables
        WHERE table_schema = database() AND table_name IN ({})
        ORDER BY size DESC
        """,
}
# The rate is that of the last week. With fewer rows, the size of one is not known well.
RATE_OF, LEAST_ROWS = timedelta(days=7), 1000


@dataclass(frozen=True)
class TableSize:
    """A table's size in bytes, and about how many rows it has."""

    name: str
    size: int
    rows: int


@dataclass(frozen=True)
class Forecast:
    """The jobs that the retention will keep, and the bytes of these with their attempts.

    jobs_a_day: jobs that were enqueued on a day of the last week, on average.
    """

    jobs_a_day: float
    jobs: float
    size: float


def sizes(database: QueueDatabase) -> list[TableSize]:
    """Return the sizes of the queue's tables, the largest first; none on SQLite."""
    vendor, names = database.connection.vendor, database.tables
    if vendor not in SIZES:
        return []
    query = SIZES[vendor].format(", ".join(["%s"] * len(names)))
    found = database.ask(query, *([names] if vendor == "postgresql" else names))
    return [TableSize(str(each[0]), int(each[1] or 0), int(each[2] or 0)) for each in found]


def forecast(database: QueueDatabase, tables: list[TableSize], options: Options) -> Forecast | None:
    """Return the size that the jobs' tables grow to, if each week is like the last one.

    By the options of the backend; those of single queues are not counted. None if too few jobs are
    there to tell, or if jobs are kept for ever.
    """
    by_name = {table.name.rpartition(".")[2].strip('"'): table for table in tables}
    jobs, attempts = (by_name.get(each._meta.db_table) for each in (Job, Execution))
    kept = options.keep_successful, options.keep_failed
    if not jobs or not attempts or jobs.rows < LEAST_ROWS or None in kept:
        return None
    now = timezone.now()
    hours = Statistic.objects.using(database.alias).per_hour(now - RATE_OF)
    if not hours:
        return None
    total = Counts()
    for counts in hours.values():
        total.merge(counts)
    first = next(iter(hours))
    days = min(RATE_OF, max(now - first, timedelta(hours=1))).total_seconds() / DAY
    # A failure that a retry followed is not the end of its job.
    failed = min(max(0, total.failures - total.retries), total.enqueued) / days
    successful = 0.0 if options.delete_on_success else total.enqueued / days - failed
    expected = (successful * (kept[0] or 0.0) + failed * (kept[1] or 0.0)) / DAY
    size = expected * (jobs.size + attempts.size) / jobs.rows
    return Forecast(total.enqueued / days, expected, size)
