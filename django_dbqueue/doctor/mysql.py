"""MariaDB and MySQL: server settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from django.apps import apps

from ..models.identifier import IdentifierField, binary_collation
from .database import QueueDatabase
from .finding import Finding, megabytes

NAMES = (
    *(
        "tx_isolation",
        "transaction_isolation",
        "innodb_flush_log_at_trx_commit",
        "sync_binlog",
        "log_bin",
    ),
    *(
        "max_allowed_packet",
        "innodb_buffer_pool_size",
        "innodb_file_per_table",
        "character_set_connection",
    ),
)
# Minimum of max_allowed_packet, in bytes: a statement holds a job's arguments or its result.
PACKET = 16 * 2**20
OTHER_CHARSETS = """
SELECT table_name AS name, table_collation AS collation FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name IN ({}) AND table_collation NOT LIKE 'utf8mb4%%'
"""
OTHER_COLLATIONS = """
SELECT table_name AS name, column_name AS `column`, collation_name AS collation
FROM information_schema.columns
WHERE table_schema = DATABASE() AND table_name IN ({}) AND collation_name <> %s
ORDER BY table_name, ordinal_position
"""


def variables(database: QueueDatabase) -> dict[str, str]:
    """Return the server variables that this server has, as the project's connections see them."""
    names = ", ".join(["%s"] * len(NAMES))
    return {
        row[0].lower(): row[1]
        for row in database.ask(f"SHOW VARIABLES WHERE Variable_name IN ({names})", *NAMES)
    }


def isolation(database: QueueDatabase) -> Iterator[Finding]:
    has = variables(database)
    level = has.get("transaction_isolation") or has.get("tx_isolation", "")
    if level != "READ-COMMITTED":
        yield Finding(
            f"The project's connections run at {level}.",
            "At this level, enqueuing also locks gaps between rows, and deadlocks with workers.",
            f"{database.setting}['OPTIONS']['isolation_level'] = 'read committed'  "
            "# Django's default.",
        )


def durability(database: QueueDatabase) -> Iterator[Finding]:
    has = variables(database)
    if (value := has.get("innodb_flush_log_at_trx_commit", "1")) != "1":
        yield Finding(
            f"innodb_flush_log_at_trx_commit is {value}.",
            "A crash loses the commits of the last second: enqueued jobs are gone, and finished "
            "jobs run again.",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1;  -- And in my.cnf.",
        )
    if has.get("log_bin") == "ON" and (value := has.get("sync_binlog", "1")) != "1":
        yield Finding(
            f"The binary log is on, and sync_binlog is {value}.",
            "A crash of the host loses commits that are not yet in the binary log, on this server "
            "or on its replicas.",
            "SET GLOBAL sync_binlog = 1;  -- And in my.cnf.",
        )


def packets(database: QueueDatabase) -> Iterator[Finding]:
    size = int(variables(database)["max_allowed_packet"])
    if size < PACKET:
        yield Finding(
            f"max_allowed_packet is {megabytes(size)}.",
            "The server refuses larger arguments, larger results and large bulk enqueues.",
            f"SET GLOBAL max_allowed_packet = {4 * PACKET};  -- And in my.cnf.",
        )


def character_sets(database: QueueDatabase) -> Iterator[Finding]:
    why = (
        "A job cannot be written if its arguments or its error message contain a character "
        "outside this set."
    )
    if (name := variables(database)["character_set_connection"]) != "utf8mb4":
        yield Finding(
            f"The project's connections use the character set {name}.",
            why,
            f"{database.setting}['OPTIONS']['charset'] = 'utf8mb4'",
        )
    # Without the collation, the conversion would replace that of each identifier, too.
    collation = binary_collation(database.connection)
    convert = f"ALTER TABLE {{}} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation};"
    tables = database.tables
    places = ", ".join(["%s"] * len(tables))
    others = database.ask(OTHER_CHARSETS.format(places), *tables)
    for each in others:
        yield Finding(
            f"{each.name} has the collation {each.collation}.", why, convert.format(each.name)
        )
    compared = {
        (model._meta.db_table, field.column)
        for model in apps.get_app_config("dbqueue").get_models()
        for field in model._meta.local_fields
        if isinstance(field, IdentifierField)
    }
    wrong = defaultdict(list)
    for each in database.ask(OTHER_COLLATIONS.format(places), *tables, collation):
        if (each.name, each.column) in compared and each.name not in {one.name for one in others}:
            wrong[each.name].append(f"{each.column} ({each.collation})")
    for table, columns in wrong.items():
        yield Finding(
            f"{table} has columns with another collation than {collation}: {', '.join(columns)}.",
            "Names and keys that differ by case or accents are one to the database: jobs run in "
            "the wrong queue, and calls with such keys fail.",
            convert.format(table),
        )
