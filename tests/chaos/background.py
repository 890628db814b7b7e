"""What is done beside the harm, again and again, on a thread of its own."""

from __future__ import annotations

import threading

from django.db import Error, connections

# The time in which whatever it does last comes to an end, in seconds.
PATIENCE = 60.0


class Background(threading.Thread):
    """Acts, and pauses, until it is stopped. What the database does not let it do is left out."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._error: Exception | None = None

    def pause(self) -> float:
        """Seconds until it acts next."""
        raise NotImplementedError

    def act(self) -> None:
        raise NotImplementedError

    def refused(self) -> None:
        """The database was away, or refused what it did."""

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._error = error
        finally:
            connections.close_all()

    def stop(self) -> None:
        """Raises the error that has ended it before, or TimeoutError if it does not end."""
        self._ended.set()
        self.join(PATIENCE)
        if self._error:
            raise self._error
        if self.is_alive():
            raise TimeoutError(f"{type(self).__name__} does not end within {PATIENCE:g} s.")

    def _run(self) -> None:
        while not self._ended.wait(self.pause()):
            try:
                self.act()
            except Error:
                connections.close_all()
                self.refused()
