"""Periodic actions on a thread."""

from __future__ import annotations

import threading

from django.db import Error, connections

# Seconds in which the last action must end.
STOP_TIMEOUT = 60.0


class Background(threading.Thread):
    """Acts repeatedly until it is stopped. Actions that the database refuses are skipped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._error: Exception | None = None

    def pause(self) -> float:
        """Return the seconds until the next action."""
        raise NotImplementedError

    def act(self) -> None:
        raise NotImplementedError

    def refused(self) -> None:
        """Handle an action that the database has refused."""

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._error = error
        finally:
            connections.close_all()

    def stop(self) -> None:
        """Stop. Raise the error that has ended the thread, or TimeoutError if it does not end."""
        self._ended.set()
        self.join(STOP_TIMEOUT)
        if self._error:
            raise self._error
        if self.is_alive():
            raise TimeoutError(f"{type(self).__name__} does not end within {STOP_TIMEOUT:g} s.")

    def _run(self) -> None:
        while not self._ended.wait(self.pause()):
            try:
                self.act()
            except Error:
                connections.close_all()
                self.refused()
