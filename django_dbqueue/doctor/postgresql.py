"""PostgreSQL: server settings and connections."""

from __future__ import annotations

from collections.abc import Iterator

from ..models import Job, Process
from .database import QueueDatabase
from .finding import Finding, format_duration
from .vacuum import BUSY, tables

# Settings, each with the effect of a crash while it is off.
DURABLE = {
    "fsync": "A crash of the host may corrupt the whole database.",
    "full_page_writes": (
        "A crash of the host may leave torn pages, unless the file system writes pages atomically."
    ),
    "synchronous_commit": (
        "A crash of the server loses the most recent commits: enqueued jobs are gone, and finished "
        "jobs run again."
    ),
}
SETTING = """
SELECT setting, source, current_user AS me, current_database() AS name
FROM pg_settings WHERE name = %s
"""
CONNECTIONS = """
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS taken,
    current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
        - coalesce(current_setting('reserved_connections', true)::int, 0) AS room
"""
CHECKPOINTS = """
SELECT {timed} AS timed, {requested} AS requested,
    pg_size_bytes(current_setting('max_wal_size')) AS most,
    (SELECT wal_bytes FROM pg_stat_wal) AS written,
    EXTRACT(EPOCH FROM clock_timestamp() - stats_reset)::float AS seconds
FROM {view}
"""
# Share of taken connections from which nearly all are taken.
TAKEN = 0.9
# Minimum number of requested (not timed) checkpoints that makes a pattern.
CHECKPOINTS_ASKED = 20


def durability(database: QueueDatabase) -> Iterator[Finding]:
    for name, why in DURABLE.items():
        if database.value(f"SHOW {name}") == "off":
            yield Finding(f"{name} is off.", why, _set(database, name, "on"))


def idle_transactions(database: QueueDatabase) -> Iterator[Finding]:
    """Recommend the timeout on a busy queue only: by default no database sets it."""
    name = "idle_in_transaction_session_timeout"
    is_busy = any(table.updated >= BUSY for table in tables(database))
    if is_busy and database.value("SELECT setting FROM pg_settings WHERE name = %s", name) == "0":
        yield Finding(
            f"{name} is 0: a forgotten transaction stays open for ever.",
            "While one is open, vacuum removes no new dead rows of this busy queue. The queue's "
            "own connections need no timeout.",
            f"ALTER DATABASE {_quoted(database)} SET {name} = '10min';\n"
            "-- Choose more than the longest pause between two queries of a task with atomic=True.",
        )


def connections(database: QueueDatabase) -> Iterator[Finding]:
    needed, (found,) = _connections_needed(database), database.ask(CONNECTIONS)
    if not _is_pooled(database) and needed > found.room:
        yield Finding(
            f"The live processes may need {needed} connections; the server has {found.room} for "
            "all clients.",
            "Tasks fail if the server refuses their connections.",
            f"ALTER SYSTEM SET max_connections = {_rounded(needed + found.taken)};  "
            "-- And restart the server. Or lower --processes or --threads.",
        )
    elif found.taken >= TAKEN * found.room:
        yield Finding(
            f"{found.taken} of {found.room} connections are taken.",
            "When none is left, tasks fail, and workers cannot restart.",
            f"ALTER SYSTEM SET max_connections = {_rounded(2 * found.room)};  "
            "-- And restart the server.",
        )


def checkpoints(database: QueueDatabase) -> Iterator[Finding]:
    is_new = database.connection.pg_version >= 170000
    view, timed, requested = (
        ("pg_stat_checkpointer", "num_timed", "num_requested")
        if is_new
        else ("pg_stat_bgwriter", "checkpoints_timed", "checkpoints_req")
    )
    (found,) = database.ask(CHECKPOINTS.format(view=view, timed=timed, requested=requested))
    # A checkpoint requested by a statement does not show a lack of WAL space.
    if (
        found.requested >= max(CHECKPOINTS_ASKED, 2 * found.timed)
        and found.written / found.requested > found.most / 4
    ):
        total = found.requested + found.timed
        every = f"; one every {format_duration(found.seconds / total)}" if found.seconds else ""
        yield Finding(
            f"{found.requested:,} of {total:,} checkpoints were forced by max_wal_size "
            f"({found.most / 2**20:,.0f} MB){every}.",
            "After a checkpoint, the first change of a page writes the whole page to the WAL: jobs "
            "cost up to several times as much WAL.",
            f"ALTER SYSTEM SET max_wal_size = '{found.most * 4 // 2**20}MB'; "
            "SELECT pg_reload_conf();",
        )


def pooler(database: QueueDatabase) -> Iterator[Finding]:
    if _is_pooled(database) and not database.connection.settings_dict.get(
        "DISABLE_SERVER_SIDE_CURSORS"
    ):
        yield Finding(
            "Django connects to PostgreSQL through a pooler.",
            "With transaction pooling, server-side cursors break, and the queue's session settings "
            "leak to other clients.",
            f"{database.setting}['DISABLE_SERVER_SIDE_CURSORS'] = True  "
            "# With session pooling: --ignore pooler",
        )


def _is_pooled(database: QueueDatabase) -> bool:
    """Return True behind a pooler, which reports another process id than the server's."""
    reported = database.connection.connection.info.backend_pid
    return bool(reported != database.value("SELECT pg_backend_pid()"))


def _connections_needed(database: QueueDatabase) -> int:
    """Return the number of connections that live processes may need.

    A worker has four, to claim, to settle, to send heartbeats and to listen, and one for each
    thread. Supervisor and dispatcher have two each.
    """
    alive = Process.objects.using(database.alias).alive().values_list("kind", "details")
    return sum(
        4 + details.get("threads", 0) if kind == Process.Kind.WORKER else 2
        for kind, details in alive
    )


def _set(database: QueueDatabase, name: str, value: str) -> str:
    """Return the remedy that resets a setting at the level where it was set."""
    (found,) = database.ask(SETTING, name)
    match found.source:
        case "database":
            return f"ALTER DATABASE {_quoted(database)} RESET {name};"
        case "user":
            return f'ALTER ROLE "{found.me}" RESET {name};'
        case "database user":
            return f'ALTER ROLE "{found.me}" IN DATABASE {_quoted(database)} RESET {name};'
        case "client" | "session":
            return (
                f"Remove {name} from {database.setting}['OPTIONS'], or from the code that sets it "
                "for each session."
            )
    return f"ALTER SYSTEM SET {name} = {value}; SELECT pg_reload_conf();"


def search_indexes(database: QueueDatabase) -> Iterator[Finding]:
    names = {name for each in database.backends for name in each.config.indexed_arguments}
    table = Job._meta.db_table
    found = " ".join(
        str(row.indexdef)
        for row in (
            database.ask("SELECT indexdef FROM pg_indexes WHERE tablename = %s", table)
            if names
            else ()
        )
    )
    missing = [
        (column, name)
        for name in sorted(names)
        for column in ("kwargs", "metadata")
        if f"(({column} -> '{name}'::text))" not in found
    ]
    if missing:
        yield Finding(
            f"indexed_arguments has {', '.join(sorted({name for _, name in missing}))}, "
            "and there is no such index.",
            "The admin's search for them reads the whole table.",
            "\n".join(
                f"CREATE INDEX CONCURRENTLY {table}_{column}_{name} ON {table} "
                f"(({column} -> '{name}'));"
                for column, name in missing
            ),
        )


def _quoted(database: QueueDatabase) -> str:
    return str(database.connection.ops.quote_name(database.value("SELECT current_database()")))


def _rounded(number: int) -> int:
    return (number // 50 + 1) * 50
