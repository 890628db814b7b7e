"""Output of a command, kept as text that every database can store."""

from __future__ import annotations

import io

LONGEST = 20_000


class Output(io.TextIOBase):
    """Text stream that keeps the last ``LONGEST`` characters written to it."""

    def __init__(self) -> None:
        self._text, self._is_cut = "", False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._text += text
        if len(self._text) > 2 * LONGEST:
            self._text, self._is_cut = self._text[-LONGEST:], True
        return len(text)

    @property
    def text(self) -> str:
        is_cut = self._is_cut or len(self._text) > LONGEST
        text = self._text[-LONGEST:].replace("\x00", "").encode(errors="replace").decode()
        return f"[…]\n{text}" if is_cut else text
