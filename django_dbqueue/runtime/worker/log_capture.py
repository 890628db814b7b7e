"""Captures the last lines logged during an attempt, by its task and by code that the task calls."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextvars import ContextVar, Token

from ...core.error_reports import clean, text_of
from ...models import ClaimedJob

LONGEST_LINE = 2_000
LONGEST_LOG = 20_000

_current: ContextVar[LogCapture | None] = ContextVar("dbqueue_lines", default=None)


class LogCapture:
    """A context manager around the call of a task: keeps the last ``limit`` lines.

    A line belongs to the attempt in whose context it is logged: the thread of the attempt, its
    coroutines, and calls that asgiref makes from one to the other.
    """

    _token: Token[LogCapture | None]

    def __init__(self, job: ClaimedJob, limit: int) -> None:
        self._job = job
        self._kept: deque[str] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        _listen()
        self._token = _current.set(self)

    def __exit__(self, *exc_info: object) -> None:
        _current.reset(self._token)

    def add(self, record: logging.LogRecord) -> None:
        try:
            said = _format(record)
        except Exception as error:
            head = f"{record.levelname} {record.name}: {text_of(record.msg)}"
            why = f"{type(error).__name__}: {text_of(error)}"
            said = f"{head} <it could not be formatted: {why}>"
        time = self._job.now().isoformat(" ", "milliseconds").replace("+00:00", "Z")
        line = clean(f"{time} {said}")
        with self._lock:
            self._kept.append(
                line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 3] + "[…]"
            )

    @property
    def text(self) -> str:
        """The newest lines, up to ``LONGEST_LOG`` characters."""
        with self._lock:
            lines = list(self._kept)
        room, first = LONGEST_LOG, len(lines)
        while first and (room := room - len(lines[first - 1]) - 1) >= 0:
            first -= 1
        return "\n".join(lines[first:])


_format = logging.Formatter("%(levelname)s %(name)s: %(message)s").format


class _Listener(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        """Capture the record, without the lock of other handlers.

        Attempts share no state here.
        """
        if lines := _current.get():
            lines.add(record)
        last = logging.lastResort
        # Python writes records without a handler to stderr. This handler on the root logger would
        # suppress that.
        if (
            last
            and record.levelno >= last.level
            and not _is_handled(logging.getLogger(record.name))
        ):
            last.handle(record)
        return True


_listener = _Listener()


def _listen() -> None:
    root = logging.getLogger()
    if _listener not in root.handlers:
        root.addHandler(_listener)


def _is_handled(logger: logging.Logger | None) -> bool:
    while logger:
        if any(handler is not _listener for handler in logger.handlers):
            return True
        logger = logger.parent
    return False
