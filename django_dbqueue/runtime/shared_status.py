"""Status of a role in a file that the role and its supervisor map into memory.

The file outlives the role, and the supervisor too.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import struct
import tempfile
import time
from contextlib import suppress
from uuid import UUID

_FLOAT, _NUMBER = struct.Struct("d"), struct.Struct("Q")
_GIL_ALIVE_AT, _LOOP_TICK_AT = 0, 8
_DRAINING, _READY, _DRAIN_REQUESTED, _KEPT, _EXIT_CODE = 16, 17, 18, 19, 20
_CLAIMED, _MEASURES, _PLACES = 24, 32, 96
_ID, _NONE = 16, bytes(16)
# What a worker counts and measures for metrics. Each has one writer.
COUNTS = ("claims", "empty_claims", "settles", "settled_jobs")
GAUGES = ("poll_delay", "active_threads", "running_jobs", "unsettled_jobs")
# What remains of a worker that has ended.
ENDURING = (*COUNTS, "claimed_jobs")
_PLACE = {name: _MEASURES + 8 * number for number, name in enumerate((*COUNTS, *GAUGES))}
_NAME = re.compile(r"dbqueue-[0-9a-f]{32}\.status")


class SharedStatus:
    """Shared status of one role.

    Times are of the system's monotonic clock, which all processes of a host share.

    gil_alive_at: the last time that the interpreter ran. If it stops, no code of its own runs.
    loop_tick_at: the last time that the main loop made progress.
    ready: the role has started, and is registered.
    drain_requested: the supervisor asks the role to end once its running jobs have ended.
    kept: the supervisor does not want the role to end after ``max_jobs`` yet.
    draining: the role claims no more jobs, and can be replaced.
    exit_code: the code with which the role ends by itself; None if anything else ends it.
    claimed: the number of jobs that the role has claimed. A job is counted before it starts.
    not_started: the jobs that the role has claimed and not started. A job is removed before it
    starts, so a job in the status of a dead process never ran.
    """

    # Name of the file in the temporary directory of this host; empty if there is no file.
    name = ""

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self._memory = memoryview(memory).cast("B")
        self._free = list(range(_PLACES, len(self._memory), _ID))
        self._places: dict[UUID, int] = {}

    @staticmethod
    def size(jobs: int) -> int:
        """Return the size in bytes for this number of concurrent jobs."""
        return _PLACES + _ID * jobs

    @classmethod
    def create(cls, jobs: int) -> SharedStatus:
        """Create a status in a new file, which only this user can read.

        Raises OSError if there is no space: a write to a mapped file without space is SIGBUS.
        """
        name = f"dbqueue-{secrets.token_hex(16)}.status"
        path = _path(name)
        try:
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(bytes(cls.size(jobs)))
            return cls.open(name)
        except OSError as error:
            cls.remove(name)
            raise OSError(error.errno, error.strerror, path) from error

    @classmethod
    def open(cls, name: str) -> SharedStatus:
        """Open the status in a file. Raises OSError if this user has no such file on this host."""
        if not _NAME.fullmatch(name):
            raise FileNotFoundError(f"{name!r} is not the name of a shared status.")
        with os.fdopen(
            os.open(_path(name), os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)), "r+b"
        ) as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{name!r} belongs to another user.")
            status = cls(mmap.mmap(file.fileno(), 0))
        status.name = name
        return status

    @staticmethod
    def remove(name: str) -> None:
        """Delete the file, if it exists. The memory stays while a process maps it."""
        if _NAME.fullmatch(name):
            with suppress(OSError):
                os.remove(_path(name))

    @classmethod
    def private(cls, jobs: int = 0) -> SharedStatus:
        """Create a status without a file, for a role in the process of its supervisor."""
        return cls(bytearray(cls.size(jobs)))

    def mark_gil_alive(self) -> None:
        _FLOAT.pack_into(self._memory, _GIL_ALIVE_AT, time.monotonic())

    def tick(self, ahead: float = 0.0) -> None:
        """Record progress of the main loop.

        The next call may come ``ahead`` seconds later than usual.
        """
        _FLOAT.pack_into(self._memory, _LOOP_TICK_AT, time.monotonic() + ahead)

    def mark_ready(self) -> None:
        self._memory[_READY] = 1

    def request_drain(self) -> None:
        self._memory[_DRAIN_REQUESTED] = 1

    def keep(self, kept: bool) -> None:
        self._memory[_KEPT] = kept

    def mark_draining(self) -> None:
        self._memory[_DRAINING] = 1

    def mark_exit(self, code: int) -> None:
        self._memory[_EXIT_CODE] = code + 1

    def count_claimed(self, jobs: int) -> None:
        _NUMBER.pack_into(self._memory, _CLAIMED, self.claimed + jobs)

    def count(self, name: str, number: int = 1) -> None:
        """Add to one of COUNTS."""
        place = _PLACE[name]
        _FLOAT.pack_into(self._memory, place, _FLOAT.unpack_from(self._memory, place)[0] + number)

    def measure(self, **values: float) -> None:
        """Set some of GAUGES."""
        for name, value in values.items():
            _FLOAT.pack_into(self._memory, _PLACE[name], value)

    def measures(self) -> dict[str, float]:
        """Return the values of COUNTS and GAUGES, and of ``claimed_jobs``."""
        found = {name: _FLOAT.unpack_from(self._memory, place)[0] for name, place in _PLACE.items()}
        return {**found, "claimed_jobs": float(self.claimed)}

    def mark_claimed(self, job: UUID) -> None:
        """Record a claimed job that has not started.

        If no place is left, the job counts as started, which is the safe side.
        """
        if self._free:
            self._places[job] = place = self._free.pop()
            self._memory[place : place + _ID] = job.bytes

    def mark_started(self, job: UUID) -> None:
        if place := self._places.pop(job, None):
            self._memory[place : place + _ID] = _NONE
            self._free.append(place)

    @property
    def is_ready(self) -> bool:
        return bool(self._memory[_READY])

    @property
    def is_drain_requested(self) -> bool:
        return bool(self._memory[_DRAIN_REQUESTED])

    @property
    def is_kept(self) -> bool:
        return bool(self._memory[_KEPT])

    @property
    def is_draining(self) -> bool:
        return bool(self._memory[_DRAINING])

    @property
    def exit_code(self) -> int | None:
        return self._memory[_EXIT_CODE] - 1 if self._memory[_EXIT_CODE] else None

    @property
    def claimed(self) -> int:
        (claimed,) = _NUMBER.unpack_from(self._memory, _CLAIMED)
        return int(claimed)

    def since_gil_alive(self) -> float:
        """Return the seconds since the interpreter last ran; 0 before the first."""
        return self._since(_GIL_ALIVE_AT)

    def since_loop_tick(self) -> float:
        return self._since(_LOOP_TICK_AT)

    def not_started(self) -> set[UUID]:
        places = range(_PLACES, len(self._memory), _ID)
        found = (bytes(self._memory[place : place + _ID]) for place in places)
        return {UUID(bytes=each) for each in found if each != _NONE}

    def _since(self, place: int) -> float:
        (then,) = _FLOAT.unpack_from(self._memory, place)
        return time.monotonic() - then if then else 0.0


def not_started_of(name: str) -> set[UUID]:
    """Return the jobs that a dead process had claimed and not started.

    Empty if its status is not on this host.
    """
    with suppress(OSError, ValueError, TypeError):
        return SharedStatus.open(name).not_started()
    return set()


def _path(name: str) -> str:
    return os.path.join(tempfile.gettempdir(), name)
