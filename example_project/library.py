"""The files of the standard library that runs this project."""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(sysconfig.get_path("stdlib"))
NOT_LIBRARY = {"site-packages", "dist-packages"}


def files() -> Iterator[tuple[str, int]]:
    """The library's files, in order: the path from its root, with slashes, and when it changed, in nanoseconds."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in NOT_LIBRARY and path.is_file():
            yield relative.as_posix(), _changed(path)


def read(path: str) -> bytes:
    """A file's source, in the encoding that it declares."""
    return (ROOT / path).read_bytes()


def digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def module_name(path: str) -> str:
    """``json`` for ``json/__init__.py``, ``json.decoder`` for ``json/decoder.py``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def excerpt(path: str, line: int, *, before: int = 2, after: int = 7) -> list[tuple[int, str]]:
    """The numbered lines around one, without blank ones at the ends; none if the file cannot be read any more."""
    first = max(1, line - before)
    try:
        with tokenize.open(ROOT / path) as file:
            lines = [
                (first + n, text.rstrip())
                for n, text in enumerate(islice(file, first - 1, line + after))
            ]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    written = [number for number, text in lines if text]
    return [each for each in lines if written and written[0] <= each[0] <= written[-1]]


def _changed(path: Path) -> int:
    # An older release that is installed again has an old time of modification, and a new one of its inode.
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)
