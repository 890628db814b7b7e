"""The systems that are measured: one small file each, with the settings that its documentation has for production."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

OURS = ["dbqueue"]
LIMITS = ["psycopg_loop"]
RIVALS: list[str] = []


class System:
    """What a benchmark asks of a queue. Whatever imports the system itself does so inside the methods, as the driver has it
    installed, and the benchmark has not.
    """

    # What pip installs for it, beside Django and psycopg.
    requires: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    # Of Django's settings.
    settings: dict[str, Any] = {}
    # The statement that says how many jobs have ended.
    ended = ""

    def task(self, function: Callable[..., Any]) -> Any:
        """The function as a task."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what it needs in an empty database."""
        from django.core.management import call_command

        call_command("migrate", run_syncdb=True, verbosity=0)

    def enqueue(self, task: Any, *args: Any) -> None:
        raise NotImplementedError

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        """One by one, where it has nothing better."""
        for call in calls:
            self.enqueue(task, *call)

    def work(self, processes: int, threads: int) -> None:
        """Run jobs until the process is told to end."""
        raise NotImplementedError


@cache
def system(name: str) -> System:
    return import_module(f"{__name__}.{name}").Adapter()  # type: ignore[no-any-return]
