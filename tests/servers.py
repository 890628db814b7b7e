"""PostgreSQL and PgBouncer of a test's own, on free ports of the loopback, for tests that kill them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings

from .ports import free_port

# Nothing has to outlive the machine, and what a killed process has written the system still has.
QUICK = {
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": 100,
    "listen_addresses": "127.0.0.1",
}


def find(program: str) -> str:
    """Where a server's program is: on the PATH, or where Debian has it. Without it the test is skipped; in CI it fails."""
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") or max(
        glob(f"/usr/lib/postgresql/*/bin/{program}"),
        default=None,
        key=lambda path: int(path.split("/")[4]),
    )
    if not found:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"There is no {program}.")
    return found


def folder() -> Path:
    """One that the servers' user may write into; not in pytest's, which only this user may enter."""
    path = tempfile.mkdtemp(prefix="dbqueue-servers-")
    if user := _user():
        shutil.chown(path, user)
    return Path(path)


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """What the first of the test run's processes makes at that path, for all of them."""
    scratch = Path(settings.SCRATCH)
    scratch.chmod(0o711)
    home = scratch / "servers"
    with (scratch / "servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / name).exists():
            home.mkdir(exist_ok=True)
            if user := _user():
                shutil.chown(home, user)
            make(home / f"{name}.new")
            (home / f"{name}.new").rename(home / name)
    return home / name


def _user() -> str | None:
    """PostgreSQL and PgBouncer do not run as root."""
    return "postgres" if os.getuid() == 0 else None


def run(*command: Any) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, user=_user(), cwd="/")


class Server:
    """A process that is started, and killed with its children."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with (self.home.parent / f"{self.home.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, user=_user(), cwd="/"
            )
        end = time.monotonic() + 120
        while True:
            try:
                return self.ask("SELECT 1") and None
            except psycopg.OperationalError as error:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise AssertionError(
                        (self.home.parent / f"{self.home.name}.log").read_text()[-2000:]
                    ) from error
                time.sleep(0.05)

    def ask(self, sql: str, database: str = "postgres") -> Any:
        """The first value, asked for on a connection of its own; None if there is no row."""
        address = (
            f"host=127.0.0.1 port={self.port} user=postgres dbname={database} connect_timeout=10"
        )
        with contextlib.closing(
            psycopg.connect(address, autocommit=True, prepare_threshold=None)
        ) as connection:
            cursor = connection.execute(sql)
            row = cursor.fetchone() if cursor.description else None
            return row[0] if row else None

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        """All of its processes, as a host that loses its power."""
        if self._process and self._process.poll() is None:
            children = (
                Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
                .read_text()
                .split()
            )
            self._process.kill()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            self._process.wait()


class PostgreSQL(Server):
    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__(home)
        self._postgres = find("postgres")
        self.options: dict[str, Any] = {
            **QUICK,
            "port": self.port,
            "unix_socket_directories": "",
            **options,
        }

    def create(self) -> None:
        run(
            find("initdb"),
            "--auth=trust",
            "--username=postgres",
            "--no-sync",
            "--no-locale",
            "--encoding=UTF8",
            "--wal-segsize=1",
            "-D",
            self.home,
        )

    def copy(self, home: Path, **options: Any) -> PostgreSQL:
        """Another, on a copy of the data of this one, which must be down."""
        run("cp", "-a", self.home, home)
        return PostgreSQL(home, **options)

    def standby(self, port: int) -> None:
        """Follow the primary that is to be had there. Not begun yet."""
        run("touch", self.home / "standby.signal")
        self.options["primary_conninfo"] = (
            f"host=127.0.0.1 port={port} user=postgres application_name=standby"
        )
        self.options["wal_retrieve_retry_interval"] = "100ms"

    def command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.options.items()]
        return [self._postgres, "-D", str(self.home), *settings]

    def stop(self) -> None:
        """In order, without waiting for sessions."""
        self.signal(signal.SIGINT)
        assert self._process
        self._process.wait(120)

    def promote(self) -> None:
        run(find("pg_ctl"), "promote", "-w", "-D", self.home)

    def url(self, database: str = "queue") -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"


class PgBouncer(Server):
    """In front of a PostgreSQL, with the settings given."""

    def __init__(self, home: Path, server: PostgreSQL, **settings: Any) -> None:
        super().__init__(home)
        self._pgbouncer, self._file = find("pgbouncer"), home.with_suffix(".ini")
        pooled = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "admin_users": "postgres",
            "ignore_startup_parameters": "extra_float_digits",
            **settings,
        }
        lines = "\n".join(f"{name} = {value}" for name, value in pooled.items())
        where = f"* = host=127.0.0.1 port={server.port} user=postgres"
        self._file.write_text(f"[databases]\n{where}\n\n[pgbouncer]\n{lines}\n")
        self._file.chmod(0o644)

    def command(self) -> list[str]:
        return [self._pgbouncer, str(self._file)]

    def url(self, database: str = "queue") -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"


def migrate(url: str) -> None:
    migrated = subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "-v0"],
        env={**os.environ, **environment(url)},
        capture_output=True,
        text=True,
    )
    assert migrated.returncode == 0, migrated.stderr


def environment(url: str) -> Mapping[str, str]:
    """For a process that works on the database there, and not on that of the test run."""
    return {
        "DATABASE_URL": url,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DBQUEUE_IN_TEST_DATABASE": "",
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    path = folder()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
