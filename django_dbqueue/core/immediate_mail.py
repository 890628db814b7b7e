"""Mail that is sent at once, though the project's mail backend enqueues messages."""

from __future__ import annotations

from contextvars import ContextVar

# Read by contrib/mail.py. Alerts of a queue that does not run must not wait in that queue.
is_immediate: ContextVar[bool] = ContextVar("is_immediate", default=False)
