"""Selection of the queues that a worker serves, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..exceptions import InvalidOption

# A valid queue name: a selector can express it, and the column holds it.
# PostgreSQL cannot store NUL, and no database a lone surrogate.
NAME = re.compile(r"(?!.*[*,\0\ud800-\udfff])[^-\s].{0,99}", re.DOTALL)


def check_name(name: object) -> None:
    """Raise ValueError for a value that cannot be a queue's name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a queue name. Give 1 to 100 characters without *, comma and NUL; the "
            "first must not be - or a space."
        )


@dataclass(frozen=True)
class QueueSelector:
    """Patterns of queue names, in order of preference.

    A pattern is a name, ``prefix*`` or ``*``; ``-name`` (or ``-prefix*``) excludes queues.
    ``allowed`` holds the only valid names (a backend's ``QUEUES``); if empty, any name is valid.
    """

    patterns: tuple[str, ...]
    allowed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if "*" in pattern[:-1] or not pattern.lstrip("-"):
                raise InvalidOption(
                    f"{pattern!r} is not a queue pattern. Give a name, prefix*, *, or -name to "
                    "exclude a queue."
                )
            if self.allowed and not any(
                _matches(name, pattern.removeprefix("-")) for name in self.allowed
            ):
                raise InvalidOption(
                    f"{pattern!r} matches no queue. The backend's QUEUES are "
                    f"{', '.join(sorted(self.allowed))}."
                )
        if self.names() == []:
            raise InvalidOption(
                f"{', '.join(self.patterns)!r} excludes all of its queues. Remove an exclusion."
            )

    def position(self, queue: str) -> int | None:
        """Return the queue's position in the worker's order, from 0.

        None means that the worker does not serve the queue.
        """
        if (self.allowed and queue not in self.allowed) or any(
            _matches(queue, p) for p in self._unwanted
        ):
            return None
        return next(
            (place for place, pattern in enumerate(self._wanted) if _matches(queue, pattern)), None
        )

    def names(self) -> list[str] | None:
        """Return the queues by name; None if a pattern needs names that only the database has."""
        if not self.allowed and any(pattern.endswith("*") for pattern in self._wanted):
            return None
        return [
            name for name in sorted(self.allowed or self._wanted) if self.position(name) is not None
        ]

    @property
    def _wanted(self) -> tuple[str, ...]:
        return tuple(p for p in self.patterns if not p.startswith("-")) or ("*",)

    @property
    def _unwanted(self) -> tuple[str, ...]:
        return tuple(p[1:] for p in self.patterns if p.startswith("-"))

    def __str__(self) -> str:
        names = self.names()
        return ", ".join(self.patterns if names is None else names)


def _matches(queue: str, pattern: str) -> bool:
    return queue.startswith(pattern[:-1]) if pattern.endswith("*") else queue == pattern
