"""Count jobs and attempts, in the transactions that enqueue and settle them.

Each such transaction inserts rows of counts, and waits for no other. A dispatcher folds them into
one row for each hour, queue and task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import chain

from django.db import connections

from ..core.counts import Counts, Times
from ..core.transactions import writing
from ..models import Statistic, StatisticDelta
from ..models.expressions import Sql
from ..models.locking import delete, lock_first, lock_waiting
from ..models.statistic import COLUMNS, hour_of
from .attempt_result import AttemptResult
from .fast_sql import insert

# The columns of a delta that say what is counted; and an hour, queue and task.
KIND = ("at", "queue", "task")
Kind = tuple[datetime, str, str]


def count_enqueued(database: str, numbers: Mapping[tuple[str, str], int]) -> None:
    """Count jobs that are enqueued, by queue and task."""
    if numbers:
        with connections[database].cursor() as cursor:
            cursor.execute(*insert_of_enqueued(database, numbers))


def insert_of_enqueued(database: str, numbers: Mapping[tuple[str, str], int]) -> Sql:
    """Return the statement of ``count_enqueued()``, to be executed with another."""
    counted = sorted(numbers.items())
    rows = ", ".join(f"""(%s, %s, '{{"enqueued": {number:d}}}')""" for _kind, number in counted)
    return f"{_insert(database)} {rows}", tuple(chain.from_iterable(kind for kind, _ in counted))


@cache
def _insert(database: str) -> str:
    quote = connections[database].ops.quote_name
    columns = ", ".join(map(quote, ("queue", "task", "counts")))
    return f"INSERT INTO {quote(StatisticDelta._meta.db_table)} ({columns}) VALUES"


def count_attempts(database: str, results: Iterable[AttemptResult]) -> None:
    """Count attempts that have ended, by their task and the queue in which they were claimed."""
    # By numbers of hours: with datetimes as keys, this takes three times as long.
    kinds: dict[tuple[float, str, str], list[AttemptResult]] = defaultdict(list)
    for result in results:
        hour = result.finished_at.timestamp() // 3600
        kinds[hour, result.job.queue, result.job.task].append(result)
    insert(
        StatisticDelta.objects.using(database),
        [*KIND, "counts"],
        [
            (group[0].finished_at, *kind[1:], _counts_of(group).as_json())
            for kind, group in kinds.items()
        ],
    )


def _counts_of(results: Sequence[AttemptResult]) -> Counts:
    return Counts(
        runs=len(results),
        failures=sum(result.is_failure for result in results),
        retries=sum(result.job.failures > 0 for result in results),
        run_time=Times.of((r.finished_at - r.started_at).total_seconds() for r in results),
        wait_time=Times.of((r.started_at - r.job.run_after).total_seconds() for r in results),
    )


def fold(database: str, limit: int) -> bool:
    """Add the oldest deltas, up to ``limit``, to the statistics. Return whether more may remain.

    They are deleted in the same transaction: each counts once.
    """
    deltas, statistics = StatisticDelta.objects, Statistic.objects.using(database)
    kinds: dict[Kind, Counts] = defaultdict(Counts)
    with writing(database):
        # As lists of values: very many of them are read.
        rows = deltas.using(database).order_by("pk").values_list("pk", *KIND, "counts")
        found = lock_first(rows, limit)
        for _pk, at, queue, task, counts in found:
            kinds[hour_of(at), queue, task].merge(Counts.from_json(counts))
        held = _insert_or_lock(database, sorted(kinds))
        for row in held:
            kinds[row.hour, row.queue, row.task].merge(row.counts)
            row.counts = kinds[row.hour, row.queue, row.task]
        statistics.upsert(held, key=["id"], fields=COLUMNS)
        delete(deltas.using(database).filter(pk__in=[pk for pk, *_rest in found]))
    return len(found) == limit


def _insert_or_lock(database: str, kinds: Sequence[Kind]) -> list[Statistic]:
    """Lock and return the statistics of these kinds. Missing ones are inserted."""
    statistics = Statistic.objects.using(database)
    hours, queues, tasks = ({kind[place] for kind in kinds} for place in range(3))
    rows = statistics.filter(hour__in=hours, queue__in=queues, task__in=tasks).order_by("pk")
    known = set(rows.values_list("hour", "queue", "task"))
    missing = [kind for kind in kinds if kind not in known]
    statistics.bulk_create(
        [Statistic(hour=hour, queue=queue, task=task) for hour, queue, task in missing],
        ignore_conflicts=True,
    )
    wanted = set(kinds)
    return [row for row in lock_waiting(rows) if (row.hour, row.queue, row.task) in wanted]
