"""The release of the project that a process runs, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Where deployments put the name of the release, or the commit: the first that is set is it.
VARIABLES = (
    *("RELEASE", "SENTRY_RELEASE", "GIT_COMMIT", "HEROKU_SLUG_COMMIT", "SOURCE_VERSION"),
    *("RENDER_GIT_COMMIT", "RAILWAY_GIT_COMMIT_SHA", "K_REVISION"),
)
# The largest number of characters of a release.
LONGEST = 100


def from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return the release that the environment names, cut to 100 characters; "" if it names none."""
    found = (environment.get(name, "").strip() for name in VARIABLES)
    value = next((value for value in found if value), "")
    # Bytes that are not UTF-8 are surrogates here, which no database stores.
    text = value.encode("utf-8", "replace").decode()
    return "".join(each for each in text if each.isprintable())[:LONGEST]
