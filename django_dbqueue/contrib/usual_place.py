"""Backend and queue of the ready-made tasks."""

from __future__ import annotations

from typing import Any

from ..compat import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, task_backends


def usual_place() -> dict[str, Any]:
    """Return the backend and the queue of these tasks.

    The project may have neither a backend nor a queue named "default".
    """
    backends = task_backends.settings
    alias = (
        DEFAULT_TASK_BACKEND_ALIAS
        if DEFAULT_TASK_BACKEND_ALIAS in backends
        else next(iter(backends))
    )
    queues = list(backends[alias].get("QUEUES") or [DEFAULT_TASK_QUEUE_NAME])
    queue = DEFAULT_TASK_QUEUE_NAME if DEFAULT_TASK_QUEUE_NAME in queues else queues[0]
    return {"backend": alias, "queue_name": queue}
