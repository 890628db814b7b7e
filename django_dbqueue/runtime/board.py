"""What a role tells its supervisor, in memory that both share and that outlives the role: no message can be lost with it."""

from __future__ import annotations

import struct
import time
from typing import Any
from uuid import UUID

_TIME = struct.Struct("d")
_PULSE, _TURN, _LEAVING, _PLACES = 0, 8, 16, 24
_ID, _NONE = 16, bytes(16)


class Board:
    """Times are of the system's monotonic clock, which all processes of a host share.

    pulse: when its interpreter last ran; if that stops, no code of its own can help it.
    turn: when its main loop last came round.
    leaving: it claims no more, and can be replaced.
    unbegun: the jobs that it has claimed and not begun. A job leaves the board before it begins, so what a dead process
    has on its board was never run.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory).cast("B")
        self._free = list(range(_PLACES, len(self._memory), _ID))
        self._places: dict[UUID, int] = {}

    @staticmethod
    def size(jobs: int) -> int:
        """In bytes, for so many jobs at a time."""
        return _PLACES + _ID * jobs

    @classmethod
    def private(cls, jobs: int = 0) -> Board:
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
    def is_leaving(self) -> bool:
        return bool(self._memory[_LEAVING])

    def since_pulse(self) -> float:
        """Seconds; 0 before the first."""
        return self._since(_PULSE)

    def since_turn(self) -> float:
        return self._since(_TURN)

    def unbegun(self) -> set[UUID]:
        places = range(_PLACES, len(self._memory), _ID)
        found = (bytes(self._memory[place : place + _ID]) for place in places)
        return {UUID(bytes=each) for each in found if each != _NONE}

    def _since(self, place: int) -> float:
        (then,) = _TIME.unpack_from(self._memory, place)
        return time.monotonic() - then if then else 0.0
