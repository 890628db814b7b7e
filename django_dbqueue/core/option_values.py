"""Values of options: what all checks of them have in common."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ..exceptions import InvalidOption

# Seconds that no option reaches, and the fewest that a database stores.
FOREVER, INSTANT = 10**9, 1e-6


def must_know(
    given: object, names: Iterable[str], where: str = "", what: str = "an option"
) -> None:
    """Raise InvalidOption for a key of ``given`` that is not among the names."""
    if not isinstance(given, Mapping):
        raise InvalidOption(f"{where}{given!r} is not a dict. Pass a dict, or remove it.")
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key).lower(), names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Choose from {', '.join(names)}."
            raise InvalidOption(f"{where}{key!r} is not {what}. {hint}")


def is_path(given: object) -> bool:
    """Return whether it is a dotted path."""
    return (
        isinstance(given, str)
        and len(parts := given.split(".")) > 1
        and all(map(str.isidentifier, parts))
    )


def as_names(given: object) -> object:
    """Return names as a tuple, from a list or from text with commas; anything else as it is."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    return tuple(given) if isinstance(given, (list, tuple)) else given
