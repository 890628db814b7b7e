"""Inject random faults, and record them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from datetime import datetime, timezone

from django.db import connection, connections

from .hosts import Host
from .servers import MariaDB, PostgreSQL


class Monkey:
    """``killed_at``: the time of each kill, by process id. Process ids may be reused."""

    def __init__(
        self, hosts: list[Host], server: PostgreSQL | MariaDB, longest_silence: float
    ) -> None:
        self._hosts, self._server, self._silence = hosts, server, longest_silence
        self._healing: list[threading.Timer] = []
        self.done: Counter[str] = Counter()
        self.killed_at: dict[int, datetime] = {}
        self._actions = [
            *[("kill -9 of a worker or dispatcher", self._kill_child)] * 6,
            ("kill -9 of a supervisor", self._kill_supervisor),
            ("kill -9 of a whole host", self._power_off),
            ("deploy (SIGTERM and restart)", self._deploy),
            ("process suspended for some seconds", self._suspend),
            *[("all connections terminated by the server", self._terminate)] * 2,
            ("connection of a host silent", self._silence_line),
            ("connection of a host cut", self._cut_line),
            ("crash of the server", self._server_crash),
        ]

    def act(self) -> None:
        name, action = random.choice(self._actions)
        print(f"    {time.strftime('%H:%M:%S')}  {name}", flush=True)
        with contextlib.suppress(ProcessLookupError):
            action()
            self.done[name] += 1

    def recover(self) -> None:
        for timer in self._healing:
            timer.join()
        time.sleep(1)  # Until the last kill is detected.
        for host in self._hosts:
            host.keep_alive()

    def _kill_child(self) -> None:
        if children := random.choice(self._hosts).children():
            self._kill(random.choice(children))

    def _kill(self, pid: int) -> None:
        self.killed_at[pid] = datetime.now(timezone.utc)
        os.kill(pid, signal.SIGKILL)

    def _kill_supervisor(self) -> None:
        random.choice(self._hosts).kill()

    def _power_off(self) -> None:
        host = random.choice(self._hosts)
        for pid in [host.pid, *host.children()]:
            with contextlib.suppress(ProcessLookupError):
                self._kill(pid)

    def _deploy(self) -> None:
        random.choice(self._hosts).kill(signal.SIGTERM)

    def _suspend(self) -> None:
        children = random.choice(self._hosts).children()
        if children:
            pid = random.choice(children)
            os.kill(pid, signal.SIGSTOP)
            self._later(random.uniform(2, self._silence), lambda: os.kill(pid, signal.SIGCONT))

    def _terminate(self) -> None:
        with contextlib.suppress(Exception), connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                )
                return
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE id <> connection_id()"
            )
            for (each,) in cursor.fetchall():
                with contextlib.suppress(Exception):
                    cursor.execute(f"KILL {each}")
        connections.close_all()

    def _silence_line(self) -> None:
        line = next(host.line for host in self._hosts if host.line)
        line.silence()
        self._later(random.uniform(2, self._silence), line.heal)

    def _cut_line(self) -> None:
        line = next(host.line for host in self._hosts if host.line)
        line.cut()
        self._later(random.uniform(1, self._silence), line.heal)

    def _server_crash(self) -> None:
        self._server.crash()
        connections.close_all()

    def _later(self, seconds: float, heal) -> None:
        def act() -> None:
            with contextlib.suppress(ProcessLookupError):
                heal()

        timer = threading.Timer(seconds, act)
        timer.start()
        self._healing.append(timer)
