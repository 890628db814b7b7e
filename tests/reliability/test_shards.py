"""The jobs of each customer in one of two PostgreSQL servers, under one ``runqueue`` and one admin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.conf import settings

from ..servers import PostgreSQL

pytestmark = pytest.mark.timeout(240)


def test_customers_are_spread_over_two_servers(home, migrated, tmp_path):
    servers: list[PostgreSQL] = [
        home.start(migrated.copy(home.folder / name)) for name in ("first", "second")
    ]
    log = tmp_path / "log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.scenario"],
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.sharding.settings",
                "PROJECT_DATABASE": f"sqlite:///{tmp_path}/project.sqlite3",
                "SHARD_0": servers[0].url(),
                "SHARD_1": servers[1].url(),
            },
            cwd=settings.BASE_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
        with child:
            asked = []
            for line in child.stdout:
                if line in ("kill\n", "start\n"):
                    asked.append(line.strip())
                    getattr(servers[1], asked[-1])()
                    child.stdin.write("done\n")
                    child.stdin.flush()
    assert child.returncode == 0, log.read_text()
    assert asked == ["kill", "start"]
