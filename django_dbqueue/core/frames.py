"""The frames of a traceback that belong to the project, not to a library."""

from __future__ import annotations

import re

# A frame with its source lines, as ``traceback`` formats it: file, line, function.
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)(?:, in (.*))?(?:\n    .*)*', re.M)
# Where Python and its packages are installed.
_INSTALLED = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python\d[\d.]*)[/\\]|[/\\]django_dbqueue[/\\]|^<"
)


def project_frames(traceback: str) -> str:
    """Return the frames of a formatted traceback that are in no installed package."""
    return "\n".join(
        match[0] for match in _FRAME.finditer(traceback) if not _INSTALLED.search(match[1])
    )


def innermost_frame(stack: str) -> str:
    """Return the innermost frame of the project as ``file:line function``, else of any code.

    "" if the text has no frame.
    """
    frames = list(_FRAME.finditer(stack))
    own = [each for each in frames if not _INSTALLED.search(each[1])]
    for path, line, function in (each.groups() for each in (own or frames)[-1:]):
        name = re.split(r"[/\\]", path)[-1]
        return f"{name}:{line} {function or ''}".strip()
    return ""
