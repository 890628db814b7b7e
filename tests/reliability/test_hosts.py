"""Two hosts and one database, each host with its own name, network and link."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import proxy as proxies
from .. import tasks
from ..conftest import log_of, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(180),
    pytest.mark.skipif(connections["default"].vendor == "sqlite", reason="SQLite is on one host."),
    pytest.mark.skipif(
        not shutil.which("ip") or os.getuid() != 0, reason="Needs root and iproute2."
    ),
]


class Network:
    """A network namespace for one host, with a link to this one and a proxy to the database."""

    def __init__(self) -> None:
        number = os.getpid() % 200
        self.name, self._link, self._address = (
            f"dbq{os.getpid()}",
            f"dbq{os.getpid()}",
            f"10.213.{number}.1",
        )
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self._address}/24", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self.name, "addr", "add", f"10.213.{number}.2/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        self._proxy, self.url = proxies.to_the_test_database(self._address)

    def host(self, name: str) -> list[str]:
        """Return the command prefix that runs a command on that host."""
        inside = 'hostname "$1"; shift; exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            inside,
            "sh",
            name,
        ]

    def disconnect(self) -> None:
        _ip("link", "set", self._link, "down")

    def reconnect(self) -> None:
        _ip("link", "set", self._link, "up")

    def close(self) -> None:
        self._proxy.close()
        _ip("netns", "del", self.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def network(transactional_db) -> Iterator[Network]:
    try:
        network = Network()
    except subprocess.CalledProcessError:
        pytest.skip("Network namespaces are not to be had.")
    yield network
    network.reconnect()
    network.close()


def test_jobs_of_disconnected_host_run_on_another_within_35_seconds(runqueue, network):
    """With default options. The host does not know that it was declared dead."""
    far = runqueue("--only", "workers", inside=network.host("far"), DATABASE_URL=network.url)
    until(lambda: Process.objects.filter(hostname="far", kind="worker").exists())
    long = tasks.begin_and_sleep.enqueue("far", 40)
    until(lambda: Job.objects.running().filter(process__hostname="far").exists())
    runqueue(inside=["unshare", "--uts", "sh", "-c", 'hostname near; exec "$@"', "sh"])
    until(lambda: Process.objects.filter(hostname="near", kind="dispatcher").exists())
    time.sleep(21)  # Until the failure detector has observed for long enough.
    Job.objects.update(args=["near", 0.5])

    network.disconnect()
    began = time.monotonic()

    until(lambda: Execution.objects.filter(job=long.id, outcome="lost").exists())
    recovered = time.monotonic() - began
    until(lambda: Job.objects.get().state == "successful")
    assert recovered < 35
    assert "worker@near" in Execution.objects.get(outcome="successful").process
    network.reconnect()
    until(lambda: "declared dead by others" in log_of(far))
    assert list(Execution.objects.order_by("attempt").values_list("outcome", flat=True)) == [
        "lost",
        "successful",
    ]
    until(lambda: Process.objects.filter(hostname="far", kind="worker").exists())
    print(f"recovered after {recovered:.1f} s")
