"""MariaDB and MySQL: transactions that hold back InnoDB's purge, and the queue's table sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .database import QueueDatabase
from .finding import Finding, lasting, megabytes
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
SELECT table_name AS name, data_length + index_length AS size, data_free AS free FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name IN ({})
"""


def transactions(database: QueueDatabase) -> Iterator[Finding]:
    old = database.ask(TRANSACTIONS, OLD, MOST)
    sessions = {each.id: each for each in database.ask("SHOW PROCESSLIST")} if old else {}
    for each in old:
        who = sessions.get(each.thread)
        of = f" of {who.user}@{who.host}, {who.command}" if who else ""
        yield Finding(
            f"A transaction has been open for {lasting(each.seconds)}: thread {each.thread}{of}, {each.modified:,} rows changed.",
            "While it lasts, no old version of a row can be cleared away. Each job leaves several, and claims step over them.",
            f"KILL {each.thread};",
        )


def history(database: QueueDatabase) -> Iterator[Finding]:
    for length in database.ask(
        "SELECT `count` AS entries FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"
    ):
        if length.entries > HISTORY:
            yield Finding(
                f"{length.entries:,} transactions wait for their old versions of rows to be cleared away.",
                "Each look into an index steps over them, and the undo log grows.",
                "End old transactions. If there are none: SET GLOBAL innodb_purge_threads = 8, in my.cnf where that is refused.",
            )


def buffer_pool(database: QueueDatabase) -> Iterator[Finding]:
    used, pool = (
        sum(table.size for table in _tables(database)),
        int(variables(database)["innodb_buffer_pool_size"]),
    )
    if used > pool:
        yield Finding(
            f"The queue's tables have {megabytes(used)}, and innodb_buffer_pool_size is {megabytes(pool)}.",
            "Its indexes are of all rows, the finished ones too: what is not in memory is read from disk by each claim.",
            f"SET GLOBAL innodb_buffer_pool_size = {int(used * 1.5) // 2**27 * 2**27 + 2**27};  -- And in my.cnf. "
            "Or a shorter retention.",
        )


def fragmentation(database: QueueDatabase) -> Iterator[Finding]:
    if variables(database).get("innodb_file_per_table") != "ON":
        return
    for table in _tables(database):
        if table.free > FREE and table.free > TIMES * table.size:
            yield Finding(
                f"{table.name} has {megabytes(table.size)} of rows and {megabytes(table.free)} of free space.",
                "Free space is used again by new rows, but not given back by itself.",
                f"OPTIMIZE TABLE {table.name};  -- Copies it while it is used, and holds it up for a moment at the end.",
            )


def privilege(database: QueueDatabase) -> str:
    """Return the statement that lets this role see the transactions of others."""
    user, _, host = str(database.value("SELECT CURRENT_USER()")).rpartition("@")
    return f"GRANT PROCESS ON *.* TO `{user}`@`{host}`;"


def _tables(database: QueueDatabase) -> list[Any]:
    names = database.tables
    return database.ask(TABLES.format(", ".join(["%s"] * len(names))), *names)
