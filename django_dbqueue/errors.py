"""What is kept of an exception: its type, its message, its traceback, and a fingerprint that its like share."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import traceback
from dataclasses import dataclass, fields, replace
from types import TracebackType

LONGEST_MESSAGE = 1_000
LONGEST_TRACEBACK = 20_000

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_OURS = tuple(
    {path + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(key))}
    | {_PACKAGE, "<"}
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_UUID_OR_HEX = re.compile(r"\b(?:0x[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[0-9a-f]*\d)[0-9a-f]{12,})\b", re.I)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """An exception as it is stored. ``location`` is the top frame of the project's own code, as file:function."""

    type: str
    message: str
    traceback: str
    location: str

    @property
    def headline(self) -> str:
        """Type and message in one line."""
        return f"{self.type.rpartition('.')[2]}: {' '.join(self.message.split())[:200]}".removesuffix(": ")

    @property
    def pattern(self) -> str:
        """The message with quoted text, ids and numbers taken out."""
        return _NUMBER.sub("#", _UUID_OR_HEX.sub("#", _QUOTED.sub("…", self.message)))

    def in_ascii(self) -> ErrorReport:
        """The same, for a database that cannot store all characters."""
        texts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ErrorReport(**{name: text.encode("ascii", "backslashreplace").decode() for name, text in texts})

    def caused_by(self, cause: BaseException | None, reason: str) -> ErrorReport:
        """The same traceback, under the name and at the place of what caused it; in other words, if there are any."""
        of = report(cause, cause.__traceback__) if cause else self
        return replace(of, message=clip(clean(reason), LONGEST_MESSAGE) or of.message, traceback=self.traceback)

    @property
    def fingerprint(self) -> str:
        parts = "\n".join((self.type, self.location, self.pattern))
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


def report(exception: BaseException, frames: TracebackType | None = None) -> ErrorReport:
    """Describe an exception, from ``frames`` on. Never raises, whatever the exception's own methods do."""
    kind = type(exception)
    try:
        message = str(exception)
    except BaseException as error:
        message = f"<str() of it raised {type(error).__qualname__}>"
    try:
        text = "".join(traceback.format_exception(kind, exception, frames))
    except BaseException as error:
        text = f"{kind.__qualname__}: <its traceback could not be formatted: {type(error).__qualname__}>\n"
    return ErrorReport(
        type=f"{kind.__module__}.{kind.__qualname__}",
        message=clip(clean(message), LONGEST_MESSAGE),
        traceback=clip(clean(text), LONGEST_TRACEBACK),
        location=_location(frames),
    )


def _location(frames: TracebackType | None) -> str:
    where = "", ""
    own = "", ""
    while frames is not None:
        code = frames.tb_frame.f_code
        where = code.co_filename, code.co_name
        if not code.co_filename.startswith(_NOT_OURS):
            own = where
        frames = frames.tb_next
    filename, function = own if own[0] else where
    return f"{os.path.basename(os.path.dirname(filename))}/{os.path.basename(filename)}:{function}"[-255:]


def clean(text: str) -> str:
    """Without what some database would refuse: NUL characters and lone surrogates."""
    return text.replace("\x00", "\ufffd").encode(errors="backslashreplace").decode()


def clip(text: str, longest: int) -> str:
    """The beginning and the end of a text that is too long; the end says more."""
    if len(text) <= longest:
        return text
    head, mark = longest // 4, "\n[…]\n"
    return text[:head] + mark + text[head + len(mark) - longest :]
