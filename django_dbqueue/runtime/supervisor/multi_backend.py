"""Several supervisors in one process, one for each backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..shutdown import Shutdown


def run_all(supervisors: Sequence[Callable[[], int]], stop: Shutdown) -> int:
    """Run each supervisor on its own thread until all have ended. Return the first error's code.

    An outage of one database does not delay the others. If one supervisor fails, all shut down, so
    that a service manager starts all of them again. Raises the first exception of a supervisor.
    """
    codes: list[int] = []
    errors: list[BaseException] = []

    def run(supervisor: Callable[[], int]) -> None:
        try:
            codes.append(code := supervisor())
            is_failed = code != 0
        except BaseException as error:
            errors.append(error)
            is_failed = True
        if is_failed:
            stop.request()

    threads = [
        threading.Thread(target=run, args=(each,), name="supervisor", daemon=True)
        for each in supervisors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return next((code for code in codes if code), 0)
