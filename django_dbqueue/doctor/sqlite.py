"""SQLite: connection settings, and maintenance of the database file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..checks import NOT_IMMEDIATE, is_immediate, options_for_sqlite
from .database import QueueDatabase
from .finding import Finding, megabytes

MIN_BUSY_TIMEOUT_MS = 5000
# A larger write-ahead log should have been checkpointed. More free pages are reported if they are
# over half of the file. In bytes.
MAX_WAL, FREE = 64 * 2**20, 100 * 2**20
# Value of PRAGMA synchronous, which SQLite gives as a number.
SYNCHRONOUS_OFF = 0


def transactions(database: QueueDatabase) -> Iterator[Finding]:
    if not is_immediate(database.connection):
        yield Finding(
            NOT_IMMEDIATE,
            "A transaction that reads and then writes fails if another has written meanwhile, "
            "instead of waiting for it.",
            options_for_sqlite(database.alias),
        )


def journal(database: QueueDatabase) -> Iterator[Finding]:
    mode = database.value("PRAGMA journal_mode")
    if mode not in ("wal", "memory"):
        yield Finding(
            f"journal_mode is {mode}.",
            "Readers and writers block each other: workers fail with 'database is locked' under "
            "load.",
            options_for_sqlite(database.alias),
        )


def busy_timeout(database: QueueDatabase) -> Iterator[Finding]:
    waits = database.value("PRAGMA busy_timeout")
    if waits < MIN_BUSY_TIMEOUT_MS:
        yield Finding(
            f"The busy timeout is {waits / 1000:g} s.",
            "One connection writes at a time. The others fail with 'database is locked' after this "
            "timeout.",
            f"{database.setting}['OPTIONS']['timeout'] = 20",
        )


def durability(database: QueueDatabase) -> Iterator[Finding]:
    if database.value("PRAGMA synchronous") == SYNCHRONOUS_OFF:
        yield Finding(
            "synchronous is OFF.",
            "A crash of the host may corrupt the whole database.",
            f"{database.setting}['OPTIONS']['init_command'] = "
            "'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL'",
        )


def write_ahead_log(database: QueueDatabase) -> Iterator[Finding]:
    """Check the size of the write-ahead log.

    With a reader that never ends, SQLite can never restart the log from its beginning.
    """
    path = database.value("SELECT file FROM pragma_database_list WHERE name = 'main'")
    written = Path(f"{path}-wal")
    size = written.stat().st_size if path and written.exists() else 0
    if size > MAX_WAL:
        yield Finding(
            f"The write-ahead log has {megabytes(size)}; a checkpoint is due every "
            f"{database.value('PRAGMA wal_autocheckpoint'):,} pages.",
            "Each read searches it. It grows under a reader that never ends, or by one large "
            "transaction.",
            "PRAGMA wal_checkpoint(TRUNCATE);  "
            "-- If its first column is 1, a reader blocks it: end that reader.",
        )


def free_pages(database: QueueDatabase) -> Iterator[Finding]:
    free, pages = database.value("PRAGMA freelist_count"), database.value("PRAGMA page_count")
    size = database.value("PRAGMA page_size")
    if free * size > FREE and free > pages / 2:
        yield Finding(
            f"{megabytes(free * size)} of the file's {megabytes(pages * size)} are free.",
            "New jobs reuse them, but the file does not shrink automatically.",
            "VACUUM;  -- Blocks writers, and needs free disk space of the file's size.",
        )
