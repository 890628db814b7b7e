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
from functools import partial

from django.db import connection, connections

from .hosts import Host, signal_all
from .servers import MariaDB, PostgreSQL


class Monkey:
    """``killed_at``: the time of each kill, by process id. Process ids may be reused."""

    def __init__(self, hosts: list[Host], server: PostgreSQL | MariaDB, dead_after: float) -> None:
        self._hosts, self._server, self._dead_after = hosts, server, dead_after
        self._silence = dead_after * 1.2
        self._healing: list[threading.Timer] = []
        self.done: Counter[str] = Counter()
        self.killed_at: dict[int, datetime] = {}
        self._actions = [
            *[("kill -9 of a worker or dispatcher", self._kill_child)] * 6,
            ("kill -9 of a supervisor", self._kill_supervisor),
            ("kill -9 of a whole host", self._power_off),
            ("deploy (SIGTERM and restart)", partial(self._signal, signal.SIGTERM)),
            ("deploy (SIGINT and restart)", partial(self._signal, signal.SIGINT)),
            ("immediate shutdown (SIGQUIT)", partial(self._signal, signal.SIGQUIT)),
            ("immediate shutdown (SIGTERM twice)", self._signal_twice),
            ("reload (SIGHUP)", partial(self._signal, signal.SIGHUP)),
            ("signal to a worker or dispatcher", self._signal_child),
            ("process suspended for less than dead_after", self._suspend_child),
            ("host suspended for less than dead_after", partial(self._suspend, 0.1, 0.8)),
            ("host suspended for longer than dead_after", partial(self._suspend, 1.1, 1.4)),
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
        for pid in host.processes():
            with contextlib.suppress(ProcessLookupError):
                self._kill(pid)

    def _signal(self, number: int) -> None:
        """Signal the supervisor alone, as a service manager, or its group, as a terminal."""
        host = random.choice(self._hosts)
        random.choice([os.kill, os.killpg])(host.pid, number)

    def _signal_twice(self) -> None:
        host = random.choice(self._hosts)
        host.kill(signal.SIGTERM)
        self._later(random.uniform(0, 1), lambda: host.kill(signal.SIGTERM))

    def _signal_child(self) -> None:
        """Workers leave SIGINT and SIGHUP to their supervisor, and end on the others."""
        numbers = [signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP]
        if children := random.choice(self._hosts).children():
            os.kill(random.choice(children), random.choice(numbers))

    def _suspend_child(self) -> None:
        """A supervisor replaces a child that makes no progress for two thirds of dead_after."""
        children = random.choice(self._hosts).children()
        self._stop_for(random.sample(children, min(1, len(children))), random.uniform(0.05, 0.95))

    def _suspend(self, shortest: float, longest: float) -> None:
        """Suspend a host: above dead_after, another host declares its processes dead."""
        self._stop_for(random.choice(self._hosts).processes(), random.uniform(shortest, longest))

    def _stop_for(self, pids: list[int], share: float) -> None:
        signal_all(pids, signal.SIGSTOP)
        self._later(share * self._dead_after, lambda: signal_all(pids, signal.SIGCONT))

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
