"""Ports for servers that the tests start."""

from __future__ import annotations

import secrets
import socket

# Not those that the system gives to connections, from 32768: one could take the port meanwhile.
_FIRST, _LAST = 20_000, 32_000


def free_port() -> int:
    while True:
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
