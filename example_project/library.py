"""Files of the standard library of this interpreter."""

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
    """Yield the library's files in order: path from its root, and time of change in nanoseconds."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in NOT_LIBRARY and path.is_file():
            yield relative.as_posix(), _changed(path)


def read(path: str) -> bytes:
    """Return a file's source, in the encoding that it declares."""
    return (ROOT / path).read_bytes()


def digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def module_name(path: str) -> str:
    """Return ``json`` for ``json/__init__.py``, ``json.decoder`` for ``json/decoder.py``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def excerpt(path: str, line: int, *, before: int = 2, after: int = 7) -> list[tuple[int, str]]:
    """Return the numbered lines around a line, without blank lines at the ends.

    The list is empty if the file cannot be read any more.
    """
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
    # A reinstalled older release has an old modification time, but a new inode change time.
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)
