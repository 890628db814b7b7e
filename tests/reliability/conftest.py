from __future__ import annotations

import pytest
from django.db import connections

from .. import proxy as proxies


@pytest.fixture
def proxy(transactional_db):
    """A line to the test's database that can be cut; its address is ``proxy.url``."""
    if connections["default"].vendor == "sqlite":
        pytest.skip("There is no line to cut.")
    line, url = proxies.to_the_test_database()
    line.url = url
    yield line
    line.close()
