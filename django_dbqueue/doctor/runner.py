"""All checks, by database vendor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from django.db import DEFAULT_DB_ALIAS

from . import bloat, innodb, mysql, postgresql, queue, snapshots, sqlite, vacuum
from .database import QueueDatabase
from .finding import Finding, NotChecked, Severity

Check = Callable[[QueueDatabase], Iterable[Finding | NotChecked]]
OF_THE_QUEUE: tuple[Check, ...] = (
    *(queue.processes, queue.silent_processes, queue.quiet_processes),
    *(queue.lag, queue.overdue_recurring_tasks),
    *(queue.failures, queue.unknown_tasks, queue.hanged_jobs),
    *(
        queue.stalled_operations,
        queue.interrupted_moves,
        queue.orphaned_jobs,
        queue.retention,
        queue.undelivered_alerts,
    ),
)
OF_A_VENDOR: dict[str, tuple[Check, ...]] = {
    "postgresql": (
        *(
            snapshots.transactions,
            snapshots.prepared_transactions,
            snapshots.replication,
            snapshots.hidden_sessions,
        ),
        *(
            vacuum.autovacuum,
            vacuum.late_autovacuum,
            vacuum.dead_rows,
            vacuum.statistics,
            bloat.bloat,
        ),
        *(postgresql.durability, postgresql.idle_transactions, postgresql.connections),
        *(postgresql.checkpoints, postgresql.pooler, postgresql.search_indexes),
    ),
    "mysql": (
        *(innodb.transactions, innodb.history, innodb.buffer_pool, innodb.fragmentation),
        *(mysql.isolation, mysql.durability, mysql.packets, mysql.character_sets),
    ),
    "sqlite": (
        *(sqlite.transactions, sqlite.journal, sqlite.busy_timeout, sqlite.durability),
        *(sqlite.write_ahead_log, sqlite.free_pages),
    ),
}


def names() -> list[str]:
    """Return the names of the checks, each of which can be ignored."""
    return sorted(
        {name_of(check) for checks in (OF_THE_QUEUE, *OF_A_VENDOR.values()) for check in checks}
    )


def of_the_queue(
    database: QueueDatabase, wanted: Collection[str] = ()
) -> Iterator[tuple[str, Finding | NotChecked]]:
    """Run the checks of the queue itself, and yield each result with the name of its check.

    All of them, or those with the names that are ``wanted``.
    """
    for check in OF_THE_QUEUE:
        if wanted and name_of(check) not in wanted:
            continue
        for found in _results(check, database):
            yield name_of(check), found


def examine(
    database: QueueDatabase, ignored: Collection[str] = ()
) -> Iterator[tuple[str, Finding | NotChecked]]:
    """Run the checks and yield each result with the name of its check.

    A check that fails yields a NotChecked, and the others go on.
    """
    if unusable := _unusable(database):
        yield unusable
        return
    for check in (*OF_THE_QUEUE, *OF_A_VENDOR[database.connection.vendor]):
        if name_of(check) not in ignored:
            for found in _results(check, database):
                yield name_of(check), found


def name_of(check: Check) -> str:
    return check.__name__.replace("_", "-")


def _results(check: Check, database: QueueDatabase) -> list[Finding | NotChecked]:
    try:
        with database.bounded():
            return list(check(database))
    except Exception as error:
        return [
            NotChecked(
                f"This check failed: {_first_line(error)}",
                _missing_grant(database, error),
                # The others may only lack a right.
                Severity.UNKNOWN if check in OF_THE_QUEUE else None,
            )
        ]


def _missing_grant(database: QueueDatabase, error: Exception) -> str:
    is_refused = (
        database.connection.vendor == "mysql"
        and error.args
        and error.args[0] == innodb.NEEDS_PRIVILEGE
    )
    return innodb.privilege(database) if is_refused else ""


def _unusable(database: QueueDatabase) -> tuple[str, Finding | NotChecked] | None:
    try:
        database.connection.ensure_connection()
    except Exception as error:
        return "connection", NotChecked(
            f"The database cannot be reached: {_first_line(error)}",
            f"Start the database server, or correct {database.setting}.",
            Severity.UNKNOWN,
        )
    try:
        database.jobs.exists()
    except Exception as error:
        migrate = (
            "migrate"
            if database.alias == DEFAULT_DB_ALIAS
            else f"migrate dbqueue --database {database.alias}"
        )
        return "tables", Finding(
            f"The queue's tables cannot be read: {_first_line(error)}",
            "The queue needs its tables.",
            f"python manage.py {migrate}  # Or let the database's user read them.",
            Severity.CRITICAL,
        )
    return None


def _first_line(error: Exception) -> str:
    # MySQL's driver gives the error code first.
    return str(error.args[-1] if error.args else error).strip().partition("\n")[0]
