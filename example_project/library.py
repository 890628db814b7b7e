"""The files of the standard library that runs this project."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(sysconfig.get_path("stdlib"))
NOT_LIBRARY = {"site-packages", "dist-packages"}


def paths() -> Iterator[str]:
    """The library's files, in order, as paths from its root with slashes."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in NOT_LIBRARY:
            yield relative.as_posix()


def read(path: str) -> str:
    """A file's text, decoded as it declares. Raises SyntaxError or UnicodeDecodeError for one that is not as it declares."""
    with tokenize.open(ROOT / path) as file:
        return file.read()


def module_name(path: str) -> str:
    """``json`` for ``json/__init__.py``, ``json.decoder`` for ``json/decoder.py``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def excerpt(path: str, line: int, *, before: int = 2, after: int = 7) -> list[tuple[int, str]]:
    """The numbered lines around one, without blank ones at the ends; none if the file cannot be read any more."""
    first = max(1, line - before)
    try:
        with tokenize.open(ROOT / path) as file:
            lines = [(first + n, text.rstrip()) for n, text in enumerate(islice(file, first - 1, line + after))]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    written = [number for number, text in lines if text]
    return [each for each in lines if written and written[0] <= each[0] <= written[-1]]
