"""What a role tells its supervisor, in a file that both map into memory: it outlives the role, and the supervisor too."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import struct
import tempfile
import time
from contextlib import suppress
from typing import Any
from uuid import UUID

_TIME = struct.Struct("d")
_PULSE, _TURN, _LEAVING, _PLACES = 0, 8, 16, 24
_ID, _NONE = 16, bytes(16)
_NAME = re.compile(r"dbqueue-[0-9a-f]{32}\.board")


class SharedStatus:
    """Times are of the system's monotonic clock, which all processes of a host share.

    pulse: when its interpreter last ran; if that stops, no code of its own can help it.
    turn: when its main loop last came round.
    leaving: it claims no more, and can be replaced.
    unbegun: the jobs that it has claimed and not begun. A job leaves the board before it begins, so what a dead process
    has on its board was never run.
    """

    # Of its file, among the temporary ones of this host; empty if it has none.
    name = ""

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory).cast("B")
        self._free = list(range(_PLACES, len(self._memory), _ID))
        self._places: dict[UUID, int] = {}

    @staticmethod
    def size(jobs: int) -> int:
        """In bytes, for so many jobs at a time."""
        return _PLACES + _ID * jobs

    @classmethod
    def create(cls, jobs: int) -> SharedStatus:
        """One in a new file, which only this user reads."""
        name = f"dbqueue-{secrets.token_hex(16)}.board"
        with os.fdopen(os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            file.truncate(cls.size(jobs))
        return cls.open(name)

    @classmethod
    def open(cls, name: str) -> SharedStatus:
        """The one in that file. Raises OSError if there is none of this user on this host."""
        if not _NAME.fullmatch(name):
            raise FileNotFoundError(f"{name!r} is not the name of a board.")
        with os.fdopen(os.open(_path(name), os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)), "r+b") as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{name!r} belongs to another user.")
            board = cls(mmap.mmap(file.fileno(), 0))
        board.name = name
        return board

    @staticmethod
    def remove(name: str) -> None:
        """Delete the file, if there is one; the memory stays as long as a process has it."""
        if _NAME.fullmatch(name):
            with suppress(OSError):
                os.remove(_path(name))

    @classmethod
    def private(cls, jobs: int = 0) -> SharedStatus:
        """One for a role that shares its process with its supervisor."""
        return cls(bytearray(cls.size(jobs)))

    def pulse(self) -> None:
        _TIME.pack_into(self._memory, _PULSE, time.monotonic())

    def turn(self, ahead: float = 0.0) -> None:
        """The next one may come so many seconds later than usual."""
        _TIME.pack_into(self._memory, _TURN, time.monotonic() + ahead)

    def leave(self) -> None:
        self._memory[_LEAVING] = 1

    def hold(self, job: UUID) -> None:
        """If there is no place left, the job counts as begun, which is the safe side."""
        if self._free:
            self._places[job] = place = self._free.pop()
            self._memory[place : place + _ID] = job.bytes

    def drop(self, job: UUID) -> None:
        if place := self._places.pop(job, None):
            self._memory[place : place + _ID] = _NONE
            self._free.append(place)

    @property
    def is_draining(self) -> bool:
        return bool(self._memory[_LEAVING])

    def since_gil_alive(self) -> float:
        """Seconds; 0 before the first."""
        return self._since(_PULSE)

    def since_loop_tick(self) -> float:
        return self._since(_TURN)

    def not_started(self) -> set[UUID]:
        places = range(_PLACES, len(self._memory), _ID)
        found = (bytes(self._memory[place : place + _ID]) for place in places)
        return {UUID(bytes=each) for each in found if each != _NONE}

    def _since(self, place: int) -> float:
        (then,) = _TIME.unpack_from(self._memory, place)
        return time.monotonic() - then if then else 0.0


def not_started_of(name: Any) -> set[UUID]:
    """The jobs that a dead process had claimed and not begun, as far as its board is on this host."""
    with suppress(OSError, ValueError, TypeError):
        return SharedStatus.open(name).not_started()
    return set()


def _path(name: str) -> str:
    return os.path.join(tempfile.gettempdir(), name)
