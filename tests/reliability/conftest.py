from __future__ import annotations

import threading

import pytest
from django.db import connections

from .. import proxy as proxies

# The machine is in several files; what they assert is to be told as in a test's own.
pytest.register_assert_rewrite(
    *(f"{__package__}.machine_{noun}" for noun in ("actors", "jobs", "keys", "limits", "batches", "liveness"))
)


@pytest.fixture
def proxy(transactional_db):
    """A line to the test's database that can be cut; its address is ``proxy.url``."""
    if connections["default"].vendor == "sqlite":
        pytest.skip("There is no line to cut.")
    line, url = proxies.to_the_test_database()
    line.url = url
    yield line
    line.close()


class Elsewhere:
    """Something that is done on another thread, and so on another connection."""

    def __init__(self, action):
        self._action, self._value, self._error = action, None, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self, seconds):
        """Until it is done, or held up by somebody's lock."""
        self._thread.join(seconds)

    def result(self):
        self._thread.join(30)
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
