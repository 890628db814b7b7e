"""How far a task has said that it is."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

from .error_reports import clean

LONGEST_NOTE = 200
# Up to here, a database's double holds every whole number as it is.
MOST = 2**53


class ProgressValue(NamedTuple):
    """``done`` of ``total`` steps, which is None where nobody knows it, and a word on what is done now."""

    done: float
    total: float | None = None
    note: str = ""

    @classmethod
    def of(cls, done: float, total: float | None = None, note: str = "") -> ProgressValue:
        """Raises TypeError or ValueError, with the value, for what is no number of steps. A long note is cut."""
        if not isinstance(note, str):
            raise TypeError(f"progress(): note={note!r} is not text. Pass str(…) of it.")
        note = clean(note)
        if len(note) > LONGEST_NOTE:
            note = note[: LONGEST_NOTE - 1] + "…"
        return cls(_number("done", done), None if total is None else _number("total", total), note)

    @property
    def fraction(self) -> float | None:
        """From 0 to 1, however much more was done than was thought; None where nobody knows the total."""
        if self.total is None:
            return None
        return min(1.0, self.done / self.total) if self.total else 1.0

    def in_ascii(self) -> ProgressValue:
        """The same, for a database that cannot store all characters."""
        return self._replace(note=self.note.encode("ascii", "backslashreplace").decode()[:LONGEST_NOTE])


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not issubclass(type(value), Real):
        raise TypeError(f"progress(): {name}={value!r} is not a number. Count steps, bytes or rows.")
    if not 0 <= value <= MOST:  # Nor is this NaN.
        raise ValueError(f"progress(): {name}={value!r} is not a number from 0 to {MOST:,}. Count steps, bytes or rows.")
    number = float(value)
    return int(number) if number.is_integer() else number
