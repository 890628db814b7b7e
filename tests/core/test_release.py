"""The release that the environment names."""

from __future__ import annotations

import os

import pytest

from django_dbqueue.core.options import Options
from django_dbqueue.core.release import VARIABLES, from_environment


@pytest.mark.parametrize(
    ("environment", "release"),
    [
        ({}, ""),
        ({"RELEASE": "v1", "SENTRY_RELEASE": "v2"}, "v1"),
        ({"RELEASE": " ", "SENTRY_RELEASE": " v2\n"}, "v2"),
        ({"GIT_COMMIT": "a" * 150}, "a" * 100),
        ({"RELEASE": "v\udcff"}, "v?"),
        ({"OTHER": "v1"}, ""),
    ],
)
def test_first_name_in_the_environment_is_the_release(environment, release):
    assert from_environment(environment) == release


def test_option_takes_precedence_over_the_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert Options().current_release == ""
    monkeypatch.setitem(os.environ, "SENTRY_RELEASE", "v1")

    assert Options().current_release == "v1"
    assert Options(release="v2").current_release == "v2"
    assert Options(release="").current_release == ""
