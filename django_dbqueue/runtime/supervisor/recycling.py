"""Recycling: which worker processes are too old or too large, and are to be replaced."""

from __future__ import annotations

import time

from ..resident_memory import resident_mb
from .children import Child, ChildProcess

# Seconds that a worker process lives at least: a limit that is too low must not cost all the time.
MIN_LIFETIME = 10.0
# Up to this age in seconds, a process over its memory limit shows that the limit is too low.
TOO_SOON = 60.0


def reason_to_recycle(child: Child) -> str | None:
    """Return the reason why a worker process is to be replaced, or None."""
    age = time.monotonic() - child.born
    if not isinstance(child, ChildProcess) or child.role != "worker" or age < MIN_LIFETIME:
        return None
    options = child.spec.options
    # The jitter spreads the replacements of hosts that were started together.
    if options.max_age is not None and age > options.max_age * child.jitter:
        return f"is {age:.0f} s old (max_age={options.max_age:g})"
    if options.max_memory is None or (used := resident_mb(child.pid or 0)) is None:
        return None
    if used <= options.max_memory:
        return None
    hint = f" {age:.0f} s after its start: raise max_memory" if age < TOO_SOON else ""
    return f"uses {used:.0f} MB{hint} (max_memory={options.max_memory})"
