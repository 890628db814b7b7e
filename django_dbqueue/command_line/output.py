"""Rows as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.utils import timezone

Row = dict[str, Any]
# Between two columns of a table.
GAP = "  "


def as_json(found: object, indent: int | None = 1) -> str:
    """Return JSON: times in ISO 8601 with their offset, durations in seconds."""
    return json.dumps(found, default=_plain, indent=indent, ensure_ascii=False)


def as_table(rows: Sequence[Row], *, width: int | None = None) -> str:
    """Return a table with a line of titles. A terminal cuts its lines."""
    if not rows:
        return "None."
    titles = list(rows[0])
    lines = [[title.replace("_", " ") for title in titles]]
    lines += [[_cell(row[title]) for title in titles] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    is_number = [all(_is_number(row[title]) for row in rows) for title in titles]
    return "\n".join(_line(line, widths, is_number)[: width or terminal_width()] for line in lines)


def as_list(row: Row) -> str:
    """Return one row as a list of names and values."""
    longest = max(map(len, row))
    parts = []
    for name, value in row.items():
        text = _cell(value, lines=True)
        indented = text.replace("\n", "\n" + " " * (longest + len(GAP)))
        parts.append(f"{name.replace('_', ' '):{longest}}{GAP}{indented}".rstrip())
    return "\n".join(parts)


def duration(value: timedelta) -> str:
    """Return a duration in its two largest units."""
    seconds = int(value.total_seconds())
    sizes = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    for place, (unit, size) in enumerate(sizes):
        if seconds >= size or size == 1:
            more = sizes[place + 1] if place + 1 < len(sizes) else None
            rest = (seconds % size) // more[1] if more else 0
            return f"{seconds // size} {unit}" + (f" {rest} {more[0]}" if more and rest else "")
    return "0 s"


def as_local(time: datetime) -> datetime:
    """Return an aware time in the current time zone; a naive one, without USE_TZ, as it is."""
    return timezone.localtime(time) if timezone.is_aware(time) else time


def terminal_width() -> int | None:
    """Return the number of columns; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    found = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_number, strict=True)
    )
    return GAP.join(found).rstrip()


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(value: object, *, lines: bool = False) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return f"{as_local(value):%Y-%m-%d %H:%M:%S}"
        case timedelta():
            return duration(value)
        case str():
            text = value.rstrip()
            return text if lines else _printable(text)
        case dict() | list():
            return as_json(value, indent=None)
    return str(value)


def _printable(text: str) -> str:
    """Return text in one line, without characters that a terminal obeys."""
    return "".join(each if each.isprintable() else " " for each in text)


def _plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case UUID():
            return str(value)
    return str(value)
