"""Backend that a user of the admin has chosen.

``QueueRouter`` uses its database for code that names none.
"""

from __future__ import annotations

from contextvars import ContextVar

# The alias in TASKS; None outside of a page of the admin.
chosen_backend: ContextVar[str | None] = ContextVar("chosen_backend", default=None)
