"""Plugin of pytest: the fixture ``dbqueue``. Its entry point loads it with the package."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def dbqueue(db: None) -> ModuleType:
    """The helpers of ``django_dbqueue.testing``, in a test that may use the database."""
    from . import testing  # Django's settings are known only now.

    return testing
