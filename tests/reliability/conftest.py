from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import environ
import pytest
from django.db import connections, transaction

from .. import proxy as proxies
from .. import servers
from ..conftest import LONG

# The state machine has several files; pytest rewrites their assertions as in test files.
pytest.register_assert_rewrite(
    *(
        f"{__package__}.machine_{noun}"
        for noun in ("actors", "jobs", "keys", "limits", "batches", "liveness")
    )
)


@pytest.fixture
def proxy(transactional_db):
    """A proxy to the test's database that can be cut; its address is ``proxy.url``."""
    if connections["default"].vendor == "sqlite":
        pytest.skip("There is no connection to cut.")
    line, url = proxies.to_the_test_database()
    line.url = url
    yield line
    line.close()


@pytest.fixture(scope="session")
def migrated():
    """A stopped PostgreSQL server with the tests' tables, which servers of single tests copy."""
    if connections["default"].vendor != "postgresql":
        pytest.skip("Only PostgreSQL is replicated and pooled here.")

    def make(path):
        server = servers.PostgreSQL(path)
        server.create()
        server.start()
        server.ask("CREATE DATABASE queue")
        servers.migrate(server.url())
        server.stop()

    return servers.PostgreSQL(servers.shared("migrated", make))


@pytest.fixture
def home():
    """A folder for a test's own servers, started by ``home.start`` and killed after the test."""
    with servers.scratch() as folder:
        home = Home(folder)
        yield home
        for server in home.started:
            server.kill()


class Home:
    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []

    def start(self, server: servers.Server):
        self.started.append(server)
        server.start()
        return server


@pytest.fixture
def use_database(transactional_db):
    """Have all of the test's threads use the database at a URL."""
    before = connections.settings["default"]

    def use(url):
        connections["default"].close()
        del connections["default"]
        connections.settings["default"] = {**before, **environ.Env.db_url_config(url)}

    yield use
    connections["default"].close()
    del connections["default"]
    connections.settings["default"] = before


class Elsewhere:
    """Runs an action on another thread, and so on another connection."""

    def __init__(self, action):
        self._action, self._value, self._error = action, None, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self, seconds):
        """Wait until it is done, or until the timeout if a lock blocks it."""
        self._thread.join(seconds)

    def result(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error
        return self._value

    def _run(self):
        try:
            self._value = self._action()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()


@contextmanager
def held_open(action):
    """Run an action in a transaction on another thread, and keep the transaction open."""
    done, go_on = threading.Event(), threading.Event()

    def act():
        with transaction.atomic():
            action()
            done.set()
            assert go_on.wait(2 * LONG)  # Longer than the test waits for concurrent work.

    other = Elsewhere(act)
    assert done.wait(LONG)
    try:
        yield
    finally:
        go_on.set()
        other.result()
