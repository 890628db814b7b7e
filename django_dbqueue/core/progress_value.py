"""Progress that a task has reported."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

from .error_reports import clean, in_ascii

LONGEST_NOTE = 200
# Largest number up to which a database's double holds every whole number exactly.
MOST = 2**53


class ProgressValue(NamedTuple):
    """``done`` of ``total`` steps (None if unknown), and a short note on the current step."""

    done: float
    total: float | None = None
    note: str = ""

    @classmethod
    def of(cls, done: float, total: float | None = None, note: str = "") -> ProgressValue:
        """Return a validated value. A long note is cut.

        Raises TypeError or ValueError, with the value, for an invalid number of steps.
        """
        if not isinstance(note, str):
            raise TypeError(f"progress(): note={note!r} is not text. Pass str(…) of it.")
        note = clean(note)
        if len(note) > LONGEST_NOTE:
            note = note[: LONGEST_NOTE - 1] + "…"
        return cls(_number("done", done), None if total is None else _number("total", total), note)

    @property
    def fraction(self) -> float | None:
        """From 0 to 1, even if ``done`` exceeds ``total``; None if ``total`` is unknown."""
        if self.total is None:
            return None
        return min(1.0, self.done / self.total) if self.total else 1.0

    def in_ascii(self) -> ProgressValue:
        """Return the same value for a database that cannot store all characters."""
        return self._replace(note=in_ascii(self.note)[:LONGEST_NOTE])


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not issubclass(type(value), Real):
        raise TypeError(
            f"progress(): {name}={value!r} is not a number. Count steps, bytes or rows."
        )
    if not 0 <= value <= MOST:  # Refuses NaN too.
        raise ValueError(
            f"progress(): {name}={value!r} is not a number from 0 to {MOST:,}. Count steps, bytes "
            "or rows."
        )
    number = float(value)
    return int(number) if number.is_integer() else number
