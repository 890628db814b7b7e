"""Queues that the settings of a project name."""

from __future__ import annotations

import difflib

from ..compat import task_backends


def check_known(database: str, queue: str) -> None:
    """Raise ValueError for a queue that no backend of this database has in its ``QUEUES``.

    No worker would serve it. A backend with an empty list has queues of any name.
    """
    known: set[str] = set()
    for alias in task_backends:
        backend = task_backends[alias]
        if getattr(backend, "database", None) == database:
            if not backend.queues:
                return
            known |= set(backend.queues)
    if known and queue not in known:
        near = difflib.get_close_matches(queue, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"QUEUES has {', '.join(sorted(known))}."
        raise ValueError(f"{queue!r} is in no QUEUES, so no worker would serve it. {hint}")
