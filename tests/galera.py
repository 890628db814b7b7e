"""A Galera cluster of the tests' own: three MariaDB servers on this machine, of which each may be killed or cut off."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from .ports import free_port
from .proxy import Proxy

PROVIDER = next(
    (
        path
        for path in map(
            Path, ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")
        )
    ),
    None,
)
HISTORY = "3b5f2c0e-0000-11ee-8000-000000000000"
NUMBER = 3


def what_is_missing() -> str:
    commands = [
        name for name in ("mariadbd", "mariadb-install-db", "mariadb") if not shutil.which(name)
    ]
    return " ".join([*commands, *([] if PROVIDER and PROVIDER.exists() else ["libgalera_smm.so"])])


class Node:
    """One server. Clients connect to ``port``."""

    def __init__(self, number: int, folder: Path, ports: tuple[int, int, int]) -> None:
        self.number, self._folder = number, folder
        self.port, self.group_port, self._transfer_port = ports

    def start(self, members: list[int], user: list[str]) -> None:
        own = {
            "base_port": self.group_port,
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.group_port}",
            "ist.recv_addr": f"127.0.0.1:{self._transfer_port}",
            "gcache.size": "512M",
            # As short as a full machine allows: so long, a killed node holds up the others' commits.
            "evs.suspect_timeout": "PT3S",
            "evs.inactive_timeout": "PT6S",
            "evs.install_timeout": "PT6S",
            "evs.inactive_check_period": "PT0.5S",
        }
        options = {
            "datadir": self._folder / "data",
            "socket": self._folder / "socket",
            "pid-file": self._folder / "pid",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "binlog-format": "ROW",
            "innodb-autoinc-lock-mode": 2,
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "16M",
            "innodb-flush-log-at-trx-commit": 0,
            "wsrep-on": "ON",
            "wsrep-provider": PROVIDER,
            "wsrep-provider-options": ";".join(f"{name}={value}" for name, value in own.items()),
            "wsrep-cluster-name": "dbqueue",
            "wsrep-cluster-address": "gcomm://" + ",".join(f"127.0.0.1:{port}" for port in members),
            "wsrep-node-address": "127.0.0.1",
            "wsrep-slave-threads": 2,
            "wsrep-start-position": f"{HISTORY}:0",
        }
        command = [
            "mariadbd",
            "--no-defaults",
            *user,
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        with (self._folder / "log").open("w") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, sql: str) -> str:
        """Raises SubprocessError if it does not answer."""
        command = [
            "mariadb",
            "--no-defaults",
            f"--socket={self._folder}/socket",
            "-uroot",
            "-NB",
            "-e",
            sql,
        ]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout

    def status(self, name: str) -> str:
        with suppress(subprocess.SubprocessError):
            return self.ask(
                f"SELECT variable_value FROM information_schema.global_status WHERE variable_name = '{name}'"
            ).strip()
        return ""

    def isolate(self, *, yes: bool) -> None:
        """Cut it off from the other nodes, not from its clients; or no longer."""
        self.ask(f"SET GLOBAL wsrep_provider_options = 'gmcast.isolate={int(yes)}'")

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()

    @property
    def has_ended(self) -> bool:
        return self._server.poll() is not None

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


class Cluster:
    """It is started as after a power failure of all: members that remember each other need no state transfer."""

    def __init__(self) -> None:
        # Below the folder for temporary files itself: its user may not enter those of the tests.
        self._folder = Path(tempfile.mkdtemp(prefix="dbqueue-galera-"))
        self._user, self._owner = [], None
        if os.getuid() == 0:
            self._user, self._owner = ["--user=mysql"], pwd.getpwnam("mysql")
        self.nodes: list[Node] = []
        try:
            self._install()
            self._start()
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        self._own(self._folder)
        install = [
            "mariadb-install-db",
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
        subprocess.run(
            [*install, f"--datadir={self._folder}/new", *self._user],
            check=True,
            capture_output=True,
        )
        state = (
            f"# GALERA saved state\nversion: 2.1\nuuid: {HISTORY}\nseqno: 0\nsafe_to_bootstrap: 0\n"
        )
        (self._folder / "new" / "grastate.dat").write_text(state)

    def _start(self) -> None:
        ports = [free_port() for _ in range(3 * NUMBER)]
        members = [
            f"0000000{number}-0000-11ee-8000-000000000001" for number in range(1, NUMBER + 1)
        ]
        view = [
            f"view_id: 3 {members[0]} 1",
            "bootstrap: 0",
            *(f"member: {member} 0" for member in members),
        ]
        for number, member in enumerate(members):
            folder = self._folder / str(number)
            shutil.copytree(self._folder / "new", folder / "data")
            (folder / "data" / "gvwstate.dat").write_text(
                "\n".join([f"my_uuid: {member}", "#vwbeg", *view, "#vwend", ""])
            )
            for path in (folder, *folder.rglob("*")):
                self._own(path)
            self.nodes.append(Node(number, folder, ports[3 * number : 3 * number + 3]))
        for node in self.nodes:
            node.start([each.group_port for each in self.nodes], self._user)
        self.wait_for(self.nodes, 60)

    def wait_for(self, nodes: list[Node], seconds: float) -> None:
        """Until these are members, and no others."""
        end = time.monotonic() + seconds
        wanted = {(str(len(nodes)), "Synced")}
        while {
            (node.status("wsrep_cluster_size"), node.status("wsrep_local_state_comment"))
            for node in nodes
        } != wanted:
            if time.monotonic() > end or any(node.has_ended for node in nodes):
                raise RuntimeError(
                    "The cluster is not complete:\n" + "\n".join(node.log[-3000:] for node in nodes)
                )
            time.sleep(0.1)

    def create(self, database: str) -> bool:
        """Returns whether it is new."""
        found = self.nodes[0].ask(f"SHOW DATABASES LIKE '{database}'")
        if not found:
            self.nodes[0].ask(f"CREATE DATABASE `{database}` CHARACTER SET utf8mb4")
        return not found

    def _own(self, path: Path) -> None:
        if self._owner:
            os.chown(path, self._owner.pw_uid, self._owner.pw_gid)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Balancer(Proxy):
    """Leads each new connection to the next node that serves."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__("")
        self._turns, self._number = itertools.cycle(nodes), len(nodes)

    def _reach(self) -> socket.socket:
        for node in itertools.islice(self._turns, self._number):
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", node.port))
        raise OSError("No node serves.")
