"""MariaDB and MySQL: transactions that hold back InnoDB's purge, and the queue's table sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .database import QueueDatabase
from .finding import Finding, format_duration, megabytes
from .mysql import variables

# Error code for a query that lacks a server privilege, such as PROCESS.
NEEDS_PRIVILEGE = 1227
# Seconds after which a transaction is old; maximum number of old transactions to list.
OLD, MOST = 300, 5
# Unpurged old row versions above which the history matters.
HISTORY = 1_000_000
# Free space is reported above FREE bytes and above TIMES the used space.
FREE, TIMES = 100 * 2**20, 4
# Transaction times are in the server's own time zone, whatever the session's is.
TRANSACTIONS = """
SELECT trx_mysql_thread_id AS thread, trx_rows_modified AS modified,
    TIMESTAMPDIFF(SECOND, trx_started, CONVERT_TZ(NOW(), @@session.time_zone, 'SYSTEM')) AS seconds
FROM information_schema.innodb_trx
WHERE trx_mysql_thread_id <> CONNECTION_ID()
HAVING seconds > %s ORDER BY seconds DESC LIMIT %s
"""
TABLES = """
SELECT table_name AS name, data_length + index_length AS size, data_free AS free
FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name IN ({})
"""


class Table(Protocol):
    """A row of ``TABLES``. Sizes are in bytes."""

    name: str
    size: int
    free: int


def transactions(database: QueueDatabase) -> Iterator[Finding]:
    old = database.ask(TRANSACTIONS, OLD, MOST)
    sessions = {each.id: each for each in database.ask("SHOW PROCESSLIST")} if old else {}
    for each in old:
        session = sessions.get(each.thread)
        of = f" of {session.user}@{session.host}, {session.command}" if session else ""
        yield Finding(
            f"A transaction has been open for {format_duration(each.seconds)}: "
            f"thread {each.thread}{of}, {each.modified:,} rows changed.",
            "Until it ends, InnoDB purges no old row versions. Each job leaves several, and claims "
            "scan over them.",
            f"KILL {each.thread};",
        )


def history(database: QueueDatabase) -> Iterator[Finding]:
    for length in database.ask(
        "SELECT `count` AS entries FROM information_schema.innodb_metrics "
        "WHERE name = 'trx_rseg_history_len'"
    ):
        if length.entries > HISTORY:
            yield Finding(
                f"The old row versions of {length.entries:,} transactions are not purged.",
                "Each index lookup scans over them, and the undo log grows.",
                "End old transactions. If there are none: SET GLOBAL innodb_purge_threads = 8; "
                "if the server refuses that, set it in my.cnf.",
            )


def buffer_pool(database: QueueDatabase) -> Iterator[Finding]:
    used, pool = (
        sum(table.size for table in _tables(database)),
        int(variables(database)["innodb_buffer_pool_size"]),
    )
    if used > pool:
        yield Finding(
            f"The queue's tables have {megabytes(used)}, and innodb_buffer_pool_size is "
            f"{megabytes(pool)}.",
            "The indexes cover finished jobs too. Claims read pages that are not in memory from "
            "disk.",
            f"SET GLOBAL innodb_buffer_pool_size = {int(used * 1.5) // 2**27 * 2**27 + 2**27};  "
            "-- And in my.cnf. Or shorten the retention.",
        )


def fragmentation(database: QueueDatabase) -> Iterator[Finding]:
    if variables(database).get("innodb_file_per_table") != "ON":
        return
    for table in _tables(database):
        if table.free > FREE and table.free > TIMES * table.size:
            yield Finding(
                f"{table.name} has {megabytes(table.size)} of rows and {megabytes(table.free)} of "
                "free space.",
                "New rows reuse free space, but it is not freed automatically.",
                f"OPTIMIZE TABLE {table.name};  "
                "-- Copies the table during use, and locks it briefly at the end.",
            )


def privilege(database: QueueDatabase) -> str:
    """Return the GRANT that lets this user see transactions of other users."""
    user, _, host = str(database.value("SELECT CURRENT_USER()")).rpartition("@")
    return f"GRANT PROCESS ON *.* TO `{user}`@`{host}`;"


def _tables(database: QueueDatabase) -> list[Table]:
    names = database.tables
    return database.ask(TABLES.format(", ".join(["%s"] * len(names))), *names)
