"""A TCP proxy in front of a database, whose line can be cut or go silent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from urllib.parse import parse_qs, urlsplit, urlunsplit


class Proxy:
    """Listens on a port of its own. ``cut``: connections are closed, and refused. ``silent``: nothing gets through any more."""

    def __init__(self, target: tuple[str, int] | str, address: str = "127.0.0.1") -> None:
        self._target = target
        self._listener = socket.create_server((address, 0))
        self.port = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._refusing = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, port: int) -> None:
        """New connections go to another server here; those that are open stay where they are."""
        self._target = "127.0.0.1", port

    def refuse(self) -> None:
        """As a server that has no connection left: those that are open stay so."""
        self._refusing = True

    def cut(self) -> None:
        self.refuse()
        self._close_all()

    def silence(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        """What was silent stays so: a half-open connection does not come to life again."""
        self._refusing = False
        if not self._open.is_set():
            self._close_all()
        self._open.set()

    def close(self) -> None:
        self._listener.close()
        self.cut()
        self._open.set()

    def _close_all(self) -> None:
        """Shut the sockets down; the threads that copy between them close them."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._refusing:
                    self._sockets.append(client)
            if client not in self._sockets:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.wait()
        try:
            server = self._reach()
        except OSError:
            client.close()
            return
        with self._lock:
            is_cut = client not in self._sockets
            self._sockets.append(server)
        if is_cut:  # While the server was reached.
            server.shutdown(socket.SHUT_RDWR)
        back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
        back.start()
        self._pump(client, server)
        back.join()
        client.close()
        server.close()

    def _reach(self) -> socket.socket:
        """A host and port, or the path of a socket."""
        if not isinstance(self._target, str):
            return socket.create_connection(self._target)
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target)
        return server

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def in_front_of(url: str, address: str = "127.0.0.1") -> tuple[Proxy, str]:
    """A proxy in front of the database at a URL, and the URL through it."""
    parts = urlsplit(url)
    port = parts.port or (5432 if parts.scheme.startswith("postgres") else 3306)
    folder = parse_qs(parts.query).get("host")
    proxy = Proxy(
        f"{folder[0]}/.s.PGSQL.{port}" if folder else (parts.hostname or "127.0.0.1", port), address
    )
    user, at, _ = parts.netloc.rpartition("@")
    return proxy, urlunsplit(parts._replace(netloc=f"{user}{at}{address}:{proxy.port}", query=""))


def to_the_test_database(address: str = "127.0.0.1") -> tuple[Proxy, str]:
    return in_front_of(os.environ["DATABASE_URL"], address)
