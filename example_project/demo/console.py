"""Output of the demo: lines, and a progress bar on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..progress import Progress


def say(text: str) -> None:
    print(text, flush=True)


def shortened(text: str, width: int) -> str:
    """Return the text as one line, cut to a width."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: max(0, width - 1)]}…"


def width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


class Bar:
    """Progress bar of the jobs; without a terminal, a line every few seconds."""

    BETWEEN_LINES = 3.0

    def __init__(self, done_before: int) -> None:
        self._done_before = done_before
        self._started = self._last_line = time.monotonic()
        self._drawn = False

    def show(self, progress: Progress) -> None:
        seconds = time.monotonic() - self._started
        rate = (progress.finished - self._done_before) / seconds if seconds else 0.0
        text = (
            f"{progress.finished:,} of {progress.total:,} jobs, {progress.failed} failed, "
            f"{rate:,.0f} a second"
        )
        if sys.stdout.isatty():
            self._draw(text, progress.finished / progress.total if progress.total else 1.0)
        elif time.monotonic() - self._last_line >= self.BETWEEN_LINES:
            self._last_line = time.monotonic()
            say(text)

    def close(self) -> None:
        if self._drawn:
            say("")

    def _draw(self, text: str, part: float) -> None:
        cells = max(10, min(40, width() - len(text) - 3))
        full = int(cells * part)
        print(
            f"\r{'█' * full}{'░' * (cells - full)} {shortened(text, width() - cells - 2)}\033[K",
            end="",
            flush=True,
        )
        self._drawn = True
