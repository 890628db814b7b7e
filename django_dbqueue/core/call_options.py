"""Options that one call sets for its job, as JSON beside it.

The job's row has columns for the other options.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from ..backoff import Constant, Exponential, Linear
from .serialization import Json

T = TypeVar("T")

# The options without a column; and those that a later stage of a pipeline gets when it begins.
WITHOUT_COLUMN = ("backoff", "delete_on_success")
OF_A_STAGE = (*WITHOUT_COLUMN, "timeout", "max_attempts", "on_lost")
# The options that are limits. Those of a call by SQL become the job's limits at its first claim.
LIMITS = ("concurrency", "rate")
_STRATEGIES = {each.__name__.lower(): each for each in (Constant, Linear, Exponential)}


def as_json(task: Any, names: Iterable[str]) -> dict[str, Json] | None:
    """Return those of the options that ``using()`` has set; None if there are none.

    Raises ValueError for a backoff that is not one of the strategies.
    """
    own = getattr(task, "own_options", ())
    found = {name: getattr(task, name) for name in names if name in own}
    if "backoff" in found:
        found["backoff"] = strategy_as_json(found["backoff"])
    return found or None


def apply(task: T, options: Json) -> T:
    """Return the task with the options of one call. Raises ValueError for other values."""
    known = (*OF_A_STAGE, *LIMITS)
    if not isinstance(options, dict) or not options.keys() <= set(known):
        raise ValueError(
            f"The job's options must be an object with {', '.join(known)}, not {options!r}."
        )
    values: dict[str, Any] = {name: options[name] for name in options if name not in LIMITS}
    if "backoff" in values:
        values["backoff"] = _strategy(values["backoff"])
    return replace(task, own_options=frozenset(values), **values)  # type: ignore[type-var]


def strategy_as_json(backoff: object) -> dict[str, Json]:
    """Return a backoff strategy as JSON, such as ``{"linear": {"step": 5.0, …}}``.

    Raises ValueError for anything else: only a strategy can be stored with a job.
    """
    for name, strategy in _STRATEGIES.items():
        if type(backoff) is strategy:
            return {name: dict(vars(backoff))}
    raise ValueError(
        f"backoff of one call must be Constant, Linear or Exponential, not {backoff!r}. "
        "Give a function to @task."
    )


def _strategy(stored: Json) -> Any:
    try:
        ((name, values),) = stored.items()
        return _STRATEGIES[name](**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The job's backoff must be a strategy, such as "
            f'{{"exponential": {{"first": 5}}}}, not {stored!r}.'
        ) from error
