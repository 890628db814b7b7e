"""Serialisation of a job's arguments and values.

Arguments must fit the task's signature; JSON must hold the values unchanged on every database.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

# MySQL refuses JSON with a number beyond the range of a float (308 digits).
LONGEST_INTEGER_BITS = 1_000
# MariaDB reads JSON of at most 31 levels, and the list of arguments is one of them.
DEEPEST = 30

# A JSON value: None, a bool, an int, a float, text, a list, or a dict with text as keys.
Json = Any


@lru_cache(maxsize=4096)
def signature_of(func: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(func)


@lru_cache(maxsize=4096)
def fitting(func: Callable[..., object]) -> range:
    """Return the numbers of positional arguments that the function takes.

    The range is empty if the function needs an argument by name.
    """
    parameters = signature_of(func).parameters.values()
    places = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    needed = [
        each
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    # Not by the parameters themselves, which are hashed with their defaults.
    names = {each.name for each in places}
    are_placed = all(each.name in names for each in needed)
    return range(len(needed), len(places) + 1) if are_placed else range(0)


def bind(
    func: Callable[..., object],
    takes_context: bool,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[list[Json], dict[str, Json]]:
    """Return the call's arguments as JSON values.

    Raises TypeError if they do not fit the signature, or contain a value that JSON cannot hold;
    ValueError for a value that some databases refuse or change. Both name the task, the
    argument and the remedy.
    """
    leading = (None,) if takes_context else ()
    # Fast path for simple calls, the most common: to bind them takes ten times as long.
    if kwargs or len(leading) + len(args) not in fitting(func):
        try:
            signature_of(func).bind(*leading, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{_name(func)}(): {error}. Pass the arguments of its signature."
            ) from None
    try:
        return [_plain(value, DEEPEST) for value in args], {
            name: _plain(value, DEEPEST) for name, value in kwargs.items()
        }
    except (TypeError, ValueError) as error:
        culprit = _culprit(signature_of(func).bind(*leading, *args, **kwargs))
        raise type(error)(f"{_name(func)}(): argument {culprit!r}: {error}") from None


def to_json(value: object, of: str = "") -> Json:
    """Return the value in JSON's types.

    Raises TypeError or ValueError, about ``of``, for a value that JSON cannot hold unchanged.
    """
    try:
        return _plain(value, DEEPEST)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{of}: {error}" if of else str(error)) from None


def _plain(value: object, depth: int) -> Json:
    match value:
        case None | bool():
            return value
        case str():
            return _storable_text(value)
        case int():
            if value.bit_length() > LONGEST_INTEGER_BITS:
                raise ValueError(
                    "An integer of over 300 digits is refused by some databases. Pass it as text."
                )
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} is not JSON. Pass None, or text.")
            return value
        case bytes():
            try:
                return _storable_text(value.decode())
            except UnicodeDecodeError:
                raise ValueError("Bytes that are not UTF-8. Pass them as base64 text.") from None
        case Mapping():
            inside = _deeper(depth)
            return {_key(key): _plain(item, inside) for key, item in value.items()}
        case Sequence():
            inside = _deeper(depth)
            return [_plain(item, inside) for item in value]
        case _:
            raise TypeError(
                f"Unsupported type: {type(value)}. Pass a JSON value, such as a primary key or "
                "text."
            )


def _deeper(depth: int) -> int:
    if not depth:
        raise ValueError(
            f"Nested more than {DEEPEST} levels deep, which MariaDB cannot store, or containing "
            "itself. Pass a flat value."
        )
    return depth - 1


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(
            f"Unsupported type: {type(key)} as the key {key!r}; JSON's keys are text. "
            "Pass str(key)."
        )
    return _storable_text(key)


def _storable_text(text: str) -> str:
    if "\x00" in text:
        raise ValueError("Text with a NUL character, which PostgreSQL cannot store. Remove it.")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "Text with a lone surrogate, which is not valid Unicode. "
            "Decode it with errors='replace'."
        ) from None
    return text


def _culprit(bound: inspect.BoundArguments) -> str:
    """Return the name of the first argument that is not JSON."""
    for name, value in bound.arguments.items():
        variable = bound.signature.parameters[name].kind
        named = value.items() if variable is inspect.Parameter.VAR_KEYWORD else [(name, value)]
        for each, item in named:
            try:
                to_json(item)
            except (TypeError, ValueError):
                return each
    raise AssertionError("every argument is JSON")


def _name(func: Callable[..., object]) -> str:
    return f"{func.__module__}.{func.__qualname__}"
