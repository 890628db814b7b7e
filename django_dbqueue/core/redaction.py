"""Redaction of values whose name contains one of some words, such as OPTIONS["hidden"]."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from itertools import chain, repeat

HIDDEN = "••••••"
DEEPEST = 100


def is_hidden(name: str, hidden: Iterable[str]) -> bool:
    return any(word.lower() in name.lower() for word in hidden)


def without_secrets(value: object, hidden: Collection[str], depth: int = 0) -> object:
    """Replace hidden values in JSON. Values nested deeper than ``DEEPEST`` levels become "…"."""
    match value:
        case str():
            return value
        case Mapping() | Sequence() if depth == DEEPEST:
            return "…"
        case Mapping():
            return {
                name: HIDDEN
                if is_hidden(name, hidden)
                else without_secrets(each, hidden, depth + 1)
                for name, each in value.items()
            }
        case Sequence():
            return [without_secrets(each, hidden, depth + 1) for each in value]
    return value


def call_without_secrets(
    args: object, kwargs: object, parameters: Iterable[Parameter], hidden: Collection[str]
) -> tuple[object, object]:
    """Return the redacted positional and keyword arguments of a call.

    The parameter names of the function decide. The name of ``*args`` counts for each of its
    values. For a keyword without a parameter, the name of ``**kwargs`` counts too.
    """
    by_kind: dict[object, list[str]] = {}
    for each in parameters:
        by_kind.setdefault(each.kind, []).append(each.name)
    [rest] = by_kind.get(Parameter.VAR_POSITIONAL, [""])
    [extra] = by_kind.get(Parameter.VAR_KEYWORD, [""])
    only_positional = by_kind.get(Parameter.POSITIONAL_ONLY, [])
    either = by_kind.get(Parameter.POSITIONAL_OR_KEYWORD, [])
    places = only_positional + either
    by_name = {*either, *by_kind.get(Parameter.KEYWORD_ONLY, [])}
    # A row that was inserted by hand may hold anything.
    if isinstance(args, list):
        named = zip(args, chain(places, repeat(rest)), strict=False)
        args = [HIDDEN if is_hidden(name, hidden) else each for each, name in named]
    if isinstance(kwargs, dict) and is_hidden(extra, hidden):
        kwargs = {name: each if name in by_name else HIDDEN for name, each in kwargs.items()}
    return without_secrets(args, hidden), without_secrets(kwargs, hidden)


def with_secrets(value: object, shown: object, stored: object) -> object:
    """Give a value that was edited as ``shown`` the hidden values of what is ``stored``.

    A hidden value whose place has changed stays hidden: see ``has_hidden()``.
    """
    if value == shown:
        return stored
    if isinstance(value, dict) and isinstance(shown, dict) and isinstance(stored, dict):
        return {
            name: with_secrets(each, shown[name], stored[name]) if name in shown else each
            for name, each in value.items()
        }
    if isinstance(value, list) and isinstance(shown, list) and isinstance(stored, list):
        known = min(len(value), len(shown))
        kept = map(with_secrets, value[:known], shown, stored)
        return [*kept, *value[known:]]
    return value


def has_hidden(value: object) -> bool:
    """Return True if a part of a JSON value is hidden."""
    return json.dumps(HIDDEN) in json.dumps(value, default=repr)
