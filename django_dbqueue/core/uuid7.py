"""Client-generated identifiers: a job's id is known before its row is written."""

import os
import time
import uuid
from datetime import datetime, timezone

# A second, in the units of an id's time: 1/4096 of a millisecond.
_SECOND = 1000 << 12
# The time of this process's last id.
_last = 0


def uuid7() -> uuid.UUID:
    """Return a version 7 UUID (RFC 9562 §5.7).

    It has 48 bits of milliseconds, 12 bits of their fraction, and 62 random bits. Ids sort by
    creation time, so inserts go to the end of the primary key's index. Those of one thread do so
    even if the clock is put back by less than a second.
    """
    global _last
    at = time.time_ns() * 4096 // 1_000_000
    if 0 <= _last - at < _SECOND:
        at = _last + 1
    _last = at
    random = int.from_bytes(os.urandom(8), "big") & (2**62 - 1)
    return uuid.UUID(int=at >> 12 << 80 | 0x7 << 76 | (at & 4095) << 64 | 0b10 << 62 | random)


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
