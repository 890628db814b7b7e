"""PostgreSQL: transactions that keep vacuum from removing the queue's dead rows."""

from __future__ import annotations

from collections.abc import Iterator

from .database import QueueDatabase
from .finding import Finding, NotChecked, format_duration

# A transaction is old after OLD seconds. That of a standby or of a replication slot has no known
# start time: it is old after BEHIND other transactions.
OLD, BEHIND = 300, 100_000
# Maximum number of old transactions to list.
MOST = 5
WHY = (
    "Meanwhile, vacuum cannot remove newer dead rows in any table of this database. Each job "
    "leaves two: tables and indexes grow, and scans become slower."
)
# A writing transaction of another database holds back vacuum too: it is the oldest transaction of
# each snapshot in this database.
SESSIONS = """
SELECT pid, usename, datname, application_name, state,
    EXTRACT(EPOCH FROM clock_timestamp() - xact_start)::float AS seconds
FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND xact_start < clock_timestamp() - make_interval(secs => %s)
    AND (datname = current_database() AND backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
    AND backend_type <> 'autovacuum worker'
    AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
ORDER BY xact_start LIMIT %s
"""
PREPARED = """
SELECT gid, owner, database, EXTRACT(EPOCH FROM clock_timestamp() - prepared)::float AS seconds
FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - make_interval(secs => %s)
ORDER BY prepared LIMIT %s
"""
SLOTS = """
SELECT slot_name, active, age(xmin) AS behind FROM pg_replication_slots
WHERE age(xmin) > %s ORDER BY 3 DESC LIMIT %s
"""
STANDBYS = """
SELECT pid, application_name, age(backend_xmin) AS behind FROM pg_stat_activity
WHERE backend_type = 'walsender' AND age(backend_xmin) > %s ORDER BY 3 DESC LIMIT %s
"""
HIDDEN = """
SELECT count(*) AS number, string_agg(DISTINCT usename, ', ') AS roles, current_user AS me
FROM pg_stat_activity
WHERE datname = current_database() AND query = '<insufficient privilege>'
"""


def transactions(database: QueueDatabase) -> Iterator[Finding]:
    for each in database.ask(SESSIONS, OLD, MOST):
        role = f"{each.usename}@{each.datname}" + (
            f" ({each.application_name})" if each.application_name else ""
        )
        remedy = f"SELECT pg_terminate_backend({each.pid});"
        if str(each.state).startswith("idle in transaction"):
            remedy += (
                f'\nALTER ROLE "{each.usename}" SET idle_in_transaction_session_timeout = '
                "'10min';  -- Prevents the next one."
            )
        yield Finding(
            f"A transaction has been open for {format_duration(each.seconds)}: "
            f"pid {each.pid} of {role}, {each.state}.",
            WHY,
            remedy,
        )


def prepared_transactions(database: QueueDatabase) -> Iterator[Finding]:
    for each in database.ask(PREPARED, OLD, MOST):
        yield Finding(
            f"A prepared transaction has been open for {format_duration(each.seconds)}: "
            f"{each.gid!r} of {each.owner}@{each.database}.",
            WHY,
            f"ROLLBACK PREPARED {_literal(each.gid)};  "
            "-- Or COMMIT PREPARED, in its database: ask its owner.",
        )


def replication(database: QueueDatabase) -> Iterator[Finding]:
    for each in database.ask(SLOTS, BEHIND, MOST):
        kind = "active" if each.active else "inactive"
        yield Finding(
            f"The {kind} replication slot {each.slot_name!r} holds back vacuum: "
            f"its xmin is {each.behind:,} transactions old.",
            WHY,
            ON_THE_STANDBY
            if each.active
            else f"SELECT pg_drop_replication_slot({_literal(each.slot_name)});",
        )
    for each in database.ask(STANDBYS, BEHIND, MOST):
        standby = each.application_name or f"of pid {each.pid}"
        yield Finding(
            f"The standby {standby} holds back vacuum: "
            f"its xmin is {each.behind:,} transactions old.",
            WHY,
            ON_THE_STANDBY,
        )


ON_THE_STANDBY = (
    "On the standby: end the long query "
    "(SELECT pid, query FROM pg_stat_activity ORDER BY xact_start), or\n"
    "ALTER SYSTEM SET hot_standby_feedback = off; SELECT pg_reload_conf();"
)


def hidden_sessions(database: QueueDatabase) -> Iterator[NotChecked]:
    (found,) = database.ask(HIDDEN)
    if found.number:
        yield NotChecked(
            f"{found.number} sessions of other roles ({found.roles}) may hold old transactions: "
            f"{found.me} may not see them.",
            f'GRANT pg_read_all_stats TO "{found.me}";',
        )


def _literal(text: object) -> str:
    return "'" + str(text).replace("'", "''") + "'"
