"""Concurrency limits and rate limits for jobs that share a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal

from .core import unique_keys
from .core.call_options import LIMITS
from .core.serialization import Json
from .core.time_values import LONGEST_WAIT

LONGEST_GROUP = 100
# Characters that a column holds.
LONGEST_KEY = 460
# Prefix that separates rate-limit keys from concurrency keys. No concurrency key begins with it:
# those begin with a quoted group, or with a task's path, which has no space.
RATE = "rate "
MOST = 10**6
# Upper bound of a rate's ``per``, in seconds.
LONGEST_PER = 10.0**8
# The shortest time between two starts of a rate, and the longest of a burst, in seconds.
SHORTEST_INTERVAL = 1e-6
LONGEST_BURST = LONGEST_WAIT.total_seconds()

Key = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Concurrency limit: ``most`` jobs with one key run at a time.

    most: a whole number, at least 1 and below a million.
    key: a function of some of the call's arguments, by name. Without it, all jobs of the task have
        one key. A call for which it returns None is not limited.
    group: text of 1 to 100 characters. Tasks that name the same group share their limit; without
        it, each task has its own.
    on_conflict: the action for a job that finds no slot: "wait", or "discard".

    Raises ValueError for another value. A key function that does not fit the task is refused where
    the task is declared, with InvalidTask.
    """

    most: int
    key: Key | None = None
    group: str | None = None
    on_conflict: Literal["wait", "discard"] = "wait"

    def __post_init__(self) -> None:
        _must_be_whole(self.most, "limit()")
        if self.on_conflict not in ("wait", "discard"):
            raise ValueError(f"limit(on_conflict={self.on_conflict!r}): give 'wait' or 'discard'.")
        _must_be_group(self.group, "limit()")
        _must_be_key(self.key, "limit()")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that limits of one group must have in common."""
        return (self.most,)

    def described(self) -> str:
        """Return the limit in words, for messages."""
        return f"{self.most} at a time"

    def of_call(self, key: str) -> dict[str, Json]:
        """Return the limit as stored with a job."""
        return {
            "key": _fitting(key),
            "max_running": self.most,
            "discard": self.on_conflict == "discard",
        }


def limit(
    most: int,
    *,
    key: Key | None = None,
    group: str | None = None,
    on_conflict: Literal["wait", "discard"] = "wait",
) -> Limit:
    """Limit the number of jobs that run at a time, over all hosts. The arguments are Limit's.

    ``limit(2, key=lambda account_id: account_id)`` allows two jobs of an account at a time. Raises
    ValueError for an invalid value.
    """
    return Limit(most=most, key=key, group=group, on_conflict=on_conflict)


@dataclass(frozen=True)
class Rate:
    """Rate limit: ``number`` jobs start in ``per`` seconds, over all hosts.

    The starts follow one another at even intervals, of ``per / number`` seconds.

    number: a whole number, at least 1 and below a million.
    per: seconds, or a timedelta; above 0 and below 100 million seconds. At most a million jobs
        start in a second.
    key, group: as for Limit.
    burst: the number of jobs that may start together after a pause; a whole number, at least 1 and
        below a million. At most 36,500 days of starts at the rate.

    Raises ValueError for another value.
    """

    number: int
    per: float | timedelta = 1.0
    key: Key | None = None
    group: str | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        _must_be_whole(self.number, "Rate()")
        _must_be_whole(self.burst, "Rate(burst=)")
        if (
            isinstance(self.per, bool)
            or not isinstance(self.per, int | float | timedelta)
            or not 0 < self.seconds < LONGEST_PER
        ):
            raise ValueError(
                f"Rate(per={self.per!r}): give a number of seconds above 0 and below "
                f"{LONGEST_PER:,.0f}, or a timedelta."
            )
        interval = self.seconds / self.number
        if interval < SHORTEST_INTERVAL:
            raise ValueError(
                f"Rate({self.number}, per={self.per!r}) is a start every {interval:g} s. Give a "
                "million starts a second at most."
            )
        if interval * self.burst > LONGEST_BURST:
            raise ValueError(
                f"Rate({self.number}, per={self.per!r}, burst={self.burst}): {self.burst:,} starts "
                f"at this rate take more than {LONGEST_WAIT.days:,} days. Give a smaller burst."
            )
        _must_be_group(self.group, "Rate()")
        _must_be_key(self.key, "Rate()")

    @property
    def seconds(self) -> float:
        """``per`` in seconds."""
        return self.per.total_seconds() if isinstance(self.per, timedelta) else self.per

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that limits of one group must have in common."""
        return (self.seconds / self.number, self.burst)

    def described(self) -> str:
        """Return the rate in words, for messages."""
        return f"{self.number} in {self.seconds:g} s with burst={self.burst}"

    def of_call(self, key: str) -> dict[str, Json]:
        """Return the rate as stored with a job. ``interval`` is in seconds."""
        return {
            "key": _fitting(f"{RATE}{key}"),
            "interval": self.seconds / self.number,
            "burst": self.burst,
        }


def check(task: Any) -> None:
    """Raise ValueError for limits that this task cannot have."""
    for name, kind, example in (
        ("concurrency", Limit, "limit(2)"),
        ("rate", Rate, "Rate(100, per=60)"),
    ):
        for each in _as_tuple(getattr(task, name)):
            if not isinstance(each, kind):
                raise ValueError(
                    f"{name} must be a limit such as {example}, or a tuple of these, not {each!r}."
                )
            if each.key is not None:
                unique_keys.check(each.key, task.func, task.takes_context, f"{name}: key")


def of_call(
    task: Any, args: Sequence[object], kwargs: Mapping[str, object], given: Json = None
) -> list[dict[str, Json]] | None:
    """Return the limits of a call of the task, as stored with its job.

    ``given`` are options that a call by SQL has set: limits there replace the task's of that kind.
    """
    found: list[dict[str, Json]] = []
    for kind in LIMITS:
        if isinstance(given, dict) and kind in given:
            found += given[kind]
        else:
            own = _as_tuple(getattr(task, kind))
            found += [each.of_call(key) for each in own if (key := _key(each, task, args, kwargs))]
    return strictest(found) or None


def strictest(stored: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return the limits with each key once: of two with one key, the stricter numbers.

    The keys of two limits of a task may be the same for some of its calls only. Limits that are not
    readable are returned as they are.
    """
    if len(stored) < 2 or not are_readable(stored):
        return stored
    found: dict[Json, dict[str, Json]] = {}
    for each in stored:
        key = each["key"]
        found[key] = _stricter(found[key], each) if key in found else each
    return list(found.values())


def _stricter(one: dict[str, Json], other: dict[str, Json]) -> dict[str, Json]:
    both: dict[str, Any] = {**other, **one}
    for name, choose in (("max_running", min), ("interval", max), ("burst", min), ("discard", max)):
        if name in one and name in other:
            both[name] = choose(one[name], other[name])
    return both


def of_task(task: Any) -> tuple[Limit | Rate, ...]:
    """Return the limits and rates of a task."""
    return tuple(each for kind in LIMITS for each in _as_tuple(getattr(task, kind)))


def are_readable(stored: Json) -> bool:
    """Return True if limits stored with a job have the form that ``of_call`` makes.

    A row written by hand may hold anything.
    """
    return isinstance(stored, list) and all(
        isinstance(each, dict) and _is_readable(each) for each in stored
    )


def _is_readable(stored: dict[str, Json]) -> bool:
    key, interval = stored.get("key"), stored.get("interval", 0)
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
        return False
    if "max_running" in stored:
        return type(stored["max_running"]) is int and 1 <= stored["max_running"] < MOST
    is_rate = type(interval) in (int, float) and SHORTEST_INTERVAL <= interval < LONGEST_PER
    burst = stored.get("burst", 1)
    is_burst = type(burst) is int and 1 <= burst < MOST
    return is_rate and is_burst and interval * burst <= LONGEST_BURST


def _key(
    each: Limit | Rate, task: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Return the key of a limit for a call.

    The forms are ``path``, ``path argument+argument=value``, ``"group"`` and ``"group" value``: no
    two limits share a key by chance.
    """
    name = (
        str(task.module_path)
        if each.group is None
        else '"{}"'.format(each.group.replace('"', '""'))
    )
    if each.key is None:
        return name
    value = unique_keys.compute(
        each.key, task, args, kwargs, f"{task.module_path}: the return value of a limit's key"
    )
    # Limits of one task by different arguments are separate limits.
    by = "" if each.group else "+".join(unique_keys.wanted(each.key)) + "="
    return None if value is None else f"{name} {by}{value}"


def _fitting(key: str) -> str:
    """Return the key; if it is too long, its beginning and a digest of the whole key."""
    digest = "" if len(key) <= LONGEST_KEY else f"…{sha256(key.encode()).hexdigest()[:32]}"
    return f"{key[: LONGEST_KEY - len(digest)]}{digest}" if digest else key


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _must_be_whole(number: object, where: str) -> None:
    if type(number) is not int or not 1 <= number < MOST:
        raise ValueError(f"{where}: {number!r} is not a whole number from 1 to {MOST - 1:,}.")


def _must_be_key(key: object, where: str) -> None:
    if key is not None and not callable(key):
        raise ValueError(
            f"{where}: key={key!r} is not a function of the task's arguments. Give such as "
            "key=lambda account_id: account_id, or group='...' for a name."
        )


def _must_be_group(group: object, where: str) -> None:
    if group is not None and (
        not isinstance(group, str) or not 0 < len(group) <= LONGEST_GROUP or "\x00" in group
    ):
        raise ValueError(
            f"{where}: group={group!r} is not text of 1 to {LONGEST_GROUP} characters."
        )
