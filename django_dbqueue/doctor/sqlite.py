"""SQLite: connection settings, and maintenance of the database file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..checks import NOT_IMMEDIATE, is_immediate, options_for_sqlite
from .database import QueueDatabase
from .finding import Finding, megabytes

# Minimum busy timeout in milliseconds: the wait of one writer for another.
PATIENCE = 5000
# Bytes above which a write-ahead log should have been checkpointed, and bytes of free pages that
# matter if they are more than half of the file.
LOG, FREE = 64 * 2**20, 100 * 2**20
# Value of PRAGMA synchronous, which SQLite gives as a number.
SYNCHRONOUS_OFF = 0


def transactions(database: QueueDatabase) -> Iterator[Finding]:
    if not is_immediate(database.connection):
        yield Finding(
            NOT_IMMEDIATE,
            "A transaction that reads and then writes fails as soon as another was quicker, instead of waiting its turn.",
            options_for_sqlite(database.alias),
        )


def journal(database: QueueDatabase) -> Iterator[Finding]:
    mode = database.value("PRAGMA journal_mode")
    if mode not in ("wal", "memory"):
        yield Finding(
            f"journal_mode is {mode}.",
            "Whoever reads waits for whoever writes, and the other way round: workers fail with 'database is locked' under load.",
            options_for_sqlite(database.alias),
        )


def patience(database: QueueDatabase) -> Iterator[Finding]:
    waits = database.value("PRAGMA busy_timeout")
    if waits < PATIENCE:
        yield Finding(
            f"A connection waits for {waits / 1000:g} s for another that writes.",
            "One process writes at a time. Who cannot wait fails with 'database is locked'.",
            f"{database.setting}['OPTIONS']['timeout'] = 20",
        )


def durability(database: QueueDatabase) -> Iterator[Finding]:
    if database.value("PRAGMA synchronous") == SYNCHRONOUS_OFF:
        yield Finding(
            "synchronous is OFF.",
            "A crash of the host may leave the whole database unreadable.",
            f"{database.setting}['OPTIONS']['init_command'] = 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL'",
        )


def log(database: QueueDatabase) -> Iterator[Finding]:
    """Check the size of the write-ahead log.

    With a reader that never ends, SQLite can never restart the log from its beginning.
    """
    path = database.value("SELECT file FROM pragma_database_list WHERE name = 'main'")
    written = Path(f"{path}-wal")
    size = written.stat().st_size if path and written.exists() else 0
    if size > LOG:
        yield Finding(
            f"The write-ahead log has {megabytes(size)}; it is to be written back after each "
            f"{database.value('PRAGMA wal_autocheckpoint'):,} pages.",
            "Each read looks through it. A connection that reads without end, or one large transaction, has made it so.",
            "PRAGMA wal_checkpoint(TRUNCATE);  -- If it says 1 first, somebody still reads: end them.",
        )


def free_pages(database: QueueDatabase) -> Iterator[Finding]:
    free, pages = database.value("PRAGMA freelist_count"), database.value("PRAGMA page_count")
    size = database.value("PRAGMA page_size")
    if free * size > FREE and free > pages / 2:
        yield Finding(
            f"{megabytes(free * size)} of the file's {megabytes(pages * size)} are free.",
            "They are used again by new jobs, but not given back by themselves.",
            "VACUUM;  -- Nobody can write meanwhile, and it needs as much space once more.",
        )
