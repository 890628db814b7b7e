"""Notifications to systemd: readiness, reload, shutdown, status and watchdog.

The protocol is that of sd_notify(3) and sd_watchdog_enabled(3): datagrams to a Unix socket.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..shutdown import Shutdown
from .supervisor import Supervisor


class Notifier:
    """Notifies the service manager of the state of this process's supervisors.

    Does nothing without NOTIFY_SOCKET. A notification that cannot be sent raises no error, and
    sending never blocks; it is repeated until the service manager has room for it.
    """

    # Seconds between two looks at the supervisors.
    INTERVAL = 0.5

    def __init__(self) -> None:
        """Read the variables of the environment, and remove them: children must not notify."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        timeout = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "") or str(os.getpid())
        # A leading @ stands for the null byte of an abstract name.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = pid == str(os.getpid()) and timeout.isascii() and timeout.isdigit()
        # Half of the timeout, in seconds, as sd_watchdog_enabled(3) recommends.
        self._watchdog = int(timeout) / 2e6 if is_watched else 0.0
        self._watchdog_at = 0.0
        # The state and the status that the service manager has received.
        self._sent = ("", "")
        self._is_reloading = False
        self._socket: socket.socket | None = None
        self._lock, self._wake = threading.Lock(), threading.Event()

    def watch(self, supervisors: Sequence[Supervisor], stop: Shutdown) -> None:
        """Notify from now on, on a thread of this process.

        READY=1 is sent when all supervisors are ready, STOPPING=1 when ``stop`` is requested, and
        WATCHDOG=1 while all of them are live. STATUS= is what runs, or why they are not ready.
        """
        if not self._address:
            return
        self._supervisors, self._stop = supervisors, stop
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        stop.on_request(self._wake.set)
        threading.Thread(target=self._run, name="systemd", daemon=True).start()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Notify that the block reloads the settings; READY=1 follows when all are ready again."""
        with self._lock:
            self._is_reloading = True
            # The service manager compares it with the time at which it has asked for the reload.
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            if self._send("RELOADING=1", f"MONOTONIC_USEC={now}"):
                self._sent = ("RELOADING=1", "")
        try:
            yield
        finally:
            self._is_reloading = False
            self._wake.set()

    def _run(self) -> None:
        interval = min(self.INTERVAL, self._watchdog or self.INTERVAL)
        while self._socket:
            with self._lock:
                self._notify()
            self._wake.wait(interval)
            self._wake.clear()

    def _notify(self) -> None:
        reasons = [f"{it.alias}: {why}" for it in self._supervisors for why in it.why_not_ready()]
        running = [f"{it.alias}: {it.composition}" for it in self._supervisors]
        state, status = self._sent[0], f"STATUS={'; '.join(reasons or running)}"
        if self._stop.requested:
            state = "STOPPING=1"
        elif not reasons and not self._is_reloading:
            state = "READY=1"
        news = [line for line in (state, status) if line not in self._sent]
        if news and self._send(*news):
            self._sent = (state, status)
        is_due = self._watchdog and time.monotonic() >= self._watchdog_at
        if is_due and self._is_live() and self._send("WATCHDOG=1"):
            self._watchdog_at = time.monotonic() + self._watchdog

    def _is_live(self) -> bool:
        return not any(each.why_not_live() for each in self._supervisors)

    def _send(self, *lines: str) -> bool:
        """Return whether the service manager's socket has taken the datagram."""
        if not self._socket:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True
