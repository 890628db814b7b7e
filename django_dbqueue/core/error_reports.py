"""Error reports: the type, message and traceback of an exception, and a fingerprint.

Similar exceptions share a fingerprint.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import CodeType, TracebackType
from typing import TypeGuard, TypeVar

E = TypeVar("E", bound=BaseException)

LONGEST_MESSAGE = 1_000
LONGEST_TRACEBACK = 20_000
LONGEST_LOCATION = 255

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_OURS = tuple(
    {
        path + os.sep
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(key))
    }
    | {_PACKAGE, "<"}
)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]*://\S+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+|(?<![\w.])(?:~|\.{1,2}|[a-z]:)?[/\\][^\s,;)]+",
    re.I,
)
_UUID_OR_HEX = re.compile(
    r"\b(?:0x[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[0-9a-f]*\d)[0-9a-f]{12,})\b",
    re.I,
)
_WORD_WITH_NUMBER = re.compile(r"\w*\d\w*(?:[.,:]\d+)*")
# Placeholders for values in text that code formats: "%(name)s", "{name}".
_PLACEHOLDER = re.compile(r"%(?:\(\w*\))?[-+ #0-9.*]*[a-zA-Z]|\{[^{}]*\}")


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Stored form of an exception.

    location: the top frame of the project's own code, as file:function.
    pattern: the message without its values.
    """

    type: str
    message: str
    traceback: str
    location: str
    pattern: str

    @property
    def headline(self) -> str:
        """Type and message in one line."""
        return (
            f"{self.type.rpartition('.')[2]}: {' '.join(self.message.split())[:200]}".removesuffix(
                ": "
            )
        )

    def in_ascii(self) -> ErrorReport:
        """Return the same report for a database that cannot store all characters."""
        texts = {field.name: in_ascii(getattr(self, field.name)) for field in fields(self)}
        texts["location"] = texts["location"][-LONGEST_LOCATION:]
        return ErrorReport(**texts)

    def caused_by(self, cause: BaseException | None, reason: str) -> ErrorReport:
        """Return a report with this traceback, under the type and at the location of the cause.

        With a ``reason``, the message and the pattern are this report's own.
        """
        of = replace(
            report(cause, cause.__traceback__) if cause else self, traceback=self.traceback
        )
        return replace(of, message=self.message, pattern=self.pattern) if reason else of

    @property
    def fingerprint(self) -> str:
        parts = "\n".join((self.type, self.location, self.pattern))
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


def report(exception: BaseException, frames: TracebackType | None = None) -> ErrorReport:
    """Describe an exception, from ``frames`` on.

    Never raises, whatever the exception's own methods do.
    """
    kind = type(exception)
    path = _path(kind)
    message = clip(text_of(exception), LONGEST_MESSAGE)
    try:
        text = "".join(traceback.format_exception(kind, exception, frames))
    except BaseException as error:
        reason = type(error).__qualname__
        text = f"{path}: <its traceback could not be formatted: {reason}>\n"
    return ErrorReport(
        type=path,
        message=message,
        traceback=clip(clean(text), LONGEST_TRACEBACK),
        location=_location(frames),
        pattern=_pattern(message, frames),
    )


def is_a(error: BaseException, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """``isinstance()`` that does not use the error's own ``__class__``, which may raise."""
    return issubclass(type(error), kinds)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without its own ``__getattribute__()``, which may raise."""
    traceback: TracebackType | None = object.__getattribute__(error, "__traceback__")
    return traceback


def _path(kind: type) -> str:
    try:
        return clean(f"{kind.__module__}.{kind.__qualname__}")
    except BaseException:  # Its metaclass may raise; "<class 'module.name'>" does not use it.
        return clean(type.__repr__(kind))[len("<class '") : -len("'>")]


def _pattern(message: str, frames: TracebackType | None) -> str:
    """Return the message without its values: only phrases that are literals in the code that ran.

    A message without such a phrase, for example a server's message, is returned without quoted
    text, addresses, paths, ids and numbers.
    """
    codes = []
    while frames is not None:
        codes.append(frames.tb_frame.f_code)
        frames = frames.tb_next
    for code in reversed(codes):
        # Longest first: a shorter phrase may be part of a longer one.
        known = sorted(
            {phrase for phrase in _phrases(code) if phrase in message}, key=len, reverse=True
        )
        if known:
            return "#".join(re.findall("|".join(map(re.escape, known)), message))
    for values in (_QUOTED, _ADDRESS, _UUID_OR_HEX, _WORD_WITH_NUMBER):
        message = values.sub("#", message)
    return message


def _phrases(code: CodeType) -> Iterator[str]:
    """Yield the text in the code, without placeholders.

    A single word is no phrase: it may be a key's name that the message contains by chance.
    """
    for constant in code.co_consts:
        if isinstance(constant, str):
            parts = _PLACEHOLDER.split(constant)
            yield from (part for part in parts if " " in part and re.search(r"\w\w", part))


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
    folder, file = os.path.split(filename)
    return clean(f"{os.path.basename(folder)}/{file}:{function}")[-LONGEST_LOCATION:]


def text_of(value: object) -> str:
    """Return ``str(value)``, cleaned. Never raises, whatever the value's own methods do."""
    try:
        return clean(str(value))
    except BaseException as error:
        return f"<str() of it raised {type(error).__qualname__}>"


def clean(text: str) -> str:
    """Replace characters that some databases refuse: NUL and lone surrogates."""
    return text.replace("\x00", "\ufffd").encode(errors="backslashreplace").decode()


def in_ascii(text: str) -> str:
    """Return text that each database stores: neither NUL nor any character outside ASCII."""
    return clean(text).encode("ascii", "backslashreplace").decode()


def clip(text: str, longest: int) -> str:
    """Shorten a long text: keep a quarter from its beginning, and the rest from its end."""
    if len(text) <= longest:
        return text
    head, mark = longest // 4, "\n[…]\n"
    return text[:head] + mark + text[head + len(mark) - longest :]
