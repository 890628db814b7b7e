"""Client-generated identifiers: a job's id is known before its row is written."""

import os
import time
import uuid
from datetime import datetime, timezone


def uuid7() -> uuid.UUID:
    """Return a version 7 UUID (RFC 9562 §5.7).

    It has 48 bits of milliseconds, 12 bits of their fraction, and 62 random bits. Ids sort by
    creation time, so inserts go to the end of the primary key's index.
    """
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = rest * 4096 // 1_000_000
    random = int.from_bytes(os.urandom(8), "big") & (2**62 - 1)
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | random)


def uuid7_at(at: datetime) -> uuid.UUID:
    """Return the lowest id of a time. A naive time is a local one."""
    return uuid.UUID(int=int(at.timestamp() * 1000) << 80)


def time_of(pk: uuid.UUID) -> datetime | None:
    """Return the time of an id, to the millisecond; None for an id without one."""
    if pk.version != 7:
        return None
    try:
        return datetime.fromtimestamp((pk.int >> 80) / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):  # After the year 9999.
        return None
