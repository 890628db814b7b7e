"""Exclusive resources of the demo: its folder and its port."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from . import FOLDER, DemoError


@contextmanager
def only_one() -> Iterator[None]:
    """Raise DemoError if another demo runs in this folder: both would enqueue the same files."""
    with (FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError("Another demo runs in this folder. End it first.") from None
        yield


def check_port(port: int) -> None:
    """Raise DemoError for a port that cannot be bound."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoError(
                f"Port {port} cannot be used ({error.strerror}). Choose another with --port."
            ) from None
