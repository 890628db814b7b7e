"""``TASKS[alias]["OPTIONS"]`` and the flags of ``runqueue``: one frozen object, checked before anything uses it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .backoff import Backoff, Exponential
from .exceptions import InvalidOption

# What the column of a job holds on every database.
MOST_ATTEMPTS = 32767


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a backend's jobs are stored and run. Times are in seconds.

    database: the alias of the database that holds the queue; None asks the project's database routers.
    max_attempts: how often a job is tried before it is FAILED, for tasks that do not say it themselves.
    backoff: how long to wait between two attempts, for tasks that do not say it themselves.
    queues: what workers serve, in order: names, ``prefix*``, ``*``, ``-name``.
    processes, threads: worker processes of one supervisor, and threads in each.
    coroutines: how many ``async def`` tasks a worker process runs at a time.
    prefetch: the most jobs that a worker holds claimed and not yet started.
    max_jobs: a worker process is replaced after that many jobs; None never.
    poll_interval: the longest an idle process waits before it looks again.
    shutdown_timeout: how long running jobs may go on after SIGTERM before they are given back.
    beat_interval, dead_after: how often a process says that it is alive, and after what silence it is declared dead.
    hanged_after: how long a job may run before the admin lists it as hanged.
    embedded: everything in one process, as threads.
    """

    database: str | None = None
    max_attempts: int = 1
    backoff: Backoff = Exponential()
    queues: tuple[str, ...] = ("*",)
    processes: int = 1
    threads: int = 8
    coroutines: int = 1000
    prefetch: int = 500
    max_jobs: int | None = None
    poll_interval: float = 1.0
    shutdown_timeout: float = 25.0
    beat_interval: float = 5.0
    dead_after: float = 30.0
    hanged_after: float = 3600.0
    embedded: bool = False

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise InvalidOption(problem)

    @classmethod
    def from_settings(cls, given: Mapping[str, Any]) -> Options:
        """Raises InvalidOption for a key that there is not, naming the nearest one, and for a value that cannot be."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise InvalidOption(f"{given!r} is not a dict. Leave it out, or give one.")
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key.lower(), names, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(names)}."
                raise InvalidOption(f"{key!r} is not an option. {hint}")
        return cls().changed(**given)

    def changed(self, **changes: Any) -> Options:
        """These options with some of them changed."""
        if "queues" in changes:
            changes["queues"] = _as_names(changes["queues"])
        return replace(self, **changes)


def _as_names(queues: Any) -> Any:
    """The queues as a tuple, from a list or from text with commas."""
    if isinstance(queues, str):
        queues = [name.strip() for name in queues.split(",") if name.strip()]
    return tuple(queues) if isinstance(queues, (list, tuple)) else queues


def _problems(options: Any) -> Iterator[str]:
    for name in ("max_attempts", "processes", "threads", "coroutines"):
        yield from _whole(options, name, least=1)
    yield from _whole(options, "prefetch", least=0)
    if isinstance(options.max_attempts, int) and options.max_attempts > MOST_ATTEMPTS:
        yield f"max_attempts={options.max_attempts!r} is over {MOST_ATTEMPTS}. Lower it."
    if options.max_jobs is not None:
        yield from _whole(options, "max_jobs", least=1)
    for name in ("poll_interval", "shutdown_timeout", "beat_interval", "dead_after", "hanged_after"):
        yield from _seconds(options, name)
    if options.dead_after < 3 * options.beat_interval:
        yield (
            f"dead_after={options.dead_after!r} is under three times beat_interval={options.beat_interval!r}: "
            "one late beat would cost a healthy process its jobs. Raise dead_after."
        )
    if not isinstance(options.queues, tuple) or not all(isinstance(name, str) for name in options.queues):
        yield f"queues={options.queues!r} is not a list of queue names. Give ['default'] or 'default, mail'."
    elif not options.queues:
        yield "queues names none. Give ['default'], or '*' for all of them."
    if not isinstance(options.embedded, bool):
        yield f"embedded={options.embedded!r} is not True or False. Change it."
    if not callable(options.backoff):
        yield f"backoff={options.backoff!r} cannot be called. Give a strategy such as Exponential(first=5)."


def _whole(options: Any, name: str, *, least: int) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        yield f"{name}={value!r} is not a whole number of at least {least}. Change it."


def _seconds(options: Any, name: str) -> Iterator[str]:
    value = getattr(options, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 10**7:
        yield f"{name}={value!r} is not a number of seconds above 0. Change it."
