"""The frames of a traceback that belong to the project, not to a library."""

from __future__ import annotations

import re

# A frame with its source lines, as ``traceback`` formats it.
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+.*(?:\n    .*)*', re.M)
# Where Python and its packages are installed.
_INSTALLED = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python\d[\d.]*)[/\\]|[/\\]django_dbqueue[/\\]|^<"
)


def project_frames(traceback: str) -> str:
    """Return the frames of a formatted traceback that are in no installed package."""
    return "\n".join(
        match[0] for match in _FRAME.finditer(traceback) if not _INSTALLED.search(match[1])
    )
