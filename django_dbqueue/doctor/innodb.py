"""MariaDB and MySQL: transactions that hold back what InnoDB would clear away, and the size of the queue's tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .database import QueueDatabase
from .finding import Finding, lasting, megabytes
from .mysql import variables

# The server's number for a query that needs a privilege of the server, which PROCESS is.
NEEDS_PRIVILEGE = 1227
# A transaction is old after so many seconds; so many of them are listed.
OLD, MOST = 300, 5
# So many old versions of rows, which nobody has cleared away, matter.
HISTORY = 1_000_000
# Free space, in bytes, that is so many times what is used.
FREE, TIMES = 100 * 2**20, 4
# The times of transactions are in the server's own zone, whatever the session's is.
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
    used, pool = sum(table.size for table in _tables(database)), int(variables(database)["innodb_buffer_pool_size"])
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
    """What lets this role see the transactions of others."""
    user, _, host = str(database.value("SELECT CURRENT_USER()")).rpartition("@")
    return f"GRANT PROCESS ON *.* TO `{user}`@`{host}`;"


def _tables(database: QueueDatabase) -> list[Any]:
    names = database.tables
    return database.ask(TABLES.format(", ".join(["%s"] * len(names))), *names)
