"""``python -m tests.walk``: the functions of the package that one job passes through, for docs/architecture.md.

A real worker, with one thread and PostgreSQL, runs one job of a task without options. Every function
that the enqueueing thread, the worker's loop, the job's thread and the settler call is recorded, from
the call of ``enqueue()`` until the job's execution is committed. Those that the worker's threads call
without a job too are listed last. Needs Python 3.12.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from .__main__ import _own_postgres

BEGIN, END = "<!-- walk -->", "<!-- end of walk -->"
PAGE = Path(__file__).parent.parent / "docs/architecture.md"
STEPS = {
    "MainThread": "Enqueue, in the project's process",
    "worker": "Claim, in the worker's loop",
    "job-0": "Run, on a thread of the pool",
    "settler": "Settle, on the settler's thread",
}
ROUNDS = "Each round of the worker's threads"


class Walk:
    """Records each function of the package once, under the thread that calls it first.

    ``rounds`` are the functions that are called before ``job_is_enqueued`` is set.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self.functions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.rounds: dict[str, list[str]] = defaultdict(list)
        self.job_is_enqueued = False
        self._seen: set[Any] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or code.co_name.startswith("<"):
            return
        self._seen.add(code)
        if code.co_filename.startswith(self._package):
            name = threading.current_thread().name
            file = code.co_filename.removeprefix(self._package)
            found = self.functions[name] if self.job_is_enqueued else self.rounds
            found[file].append(code.co_qualname.replace(".<locals>", ""))

    def table(self) -> str:
        steps = {step: self.functions[name] for name, step in STEPS.items()}
        number = sum(len(each) for files in steps.values() for each in files.values())
        files = {file for step in steps.values() for file in step}
        steps[ROUNDS] = self.rounds
        lines = [
            f"{number} functions in {len(files)} files, and {sum(map(len, self.rounds.values()))} that"
            " the worker's threads call in each round, with or without a job:",
            "",
            "| Module | Functions |",
            "| --- | --- |",
        ]
        for step, found in steps.items():
            lines.append(f"| **{step}** | **{sum(map(len, found.values()))}** |")
            lines += [
                f"| `{file}` | {', '.join(f'`{each}`' for each in names)} |"
                for file, names in found.items()
            ]
        return "\n".join(lines)


def record() -> Walk:
    import django
    from django.conf import settings

    settings.DATABASE_ROUTERS = []  # Those of the tests' project are not on the way.
    django.setup()
    from django.db import connection

    import django_dbqueue
    from django_dbqueue.compat import task_backends
    from django_dbqueue.models import Execution
    from django_dbqueue.runtime.shared_status import SharedStatus
    from django_dbqueue.runtime.shutdown import Shutdown
    from django_dbqueue.runtime.worker.worker import Worker

    from . import tasks

    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    backend, stop = task_backends["default"], Shutdown()
    worker = Worker(backend, backend.config.changed(threads=1), SharedStatus.private(10))
    thread = threading.Thread(target=worker.run, args=(stop,), name="worker")
    thread.start()
    walk = Walk(Path(django_dbqueue.__file__).parent)

    def is_settled(job: str) -> bool:
        end = time.monotonic() + 30
        while not Execution.objects.filter(job=job).exists():
            assert time.monotonic() < end, "the job did not run"
            time.sleep(0.01)
        return True

    try:
        # The first job imports and plans what all later ones use.
        assert is_settled(tasks.add.enqueue(1, 2).id)
        time.sleep(2.0)  # The worker is idle, and listens.
        threading.setprofile_all_threads(walk)
        for _ in range(5):
            worker._listener.wake()
            time.sleep(1.0)
        walk.job_is_enqueued = True
        job = tasks.add.enqueue(1, 2)
        threading.setprofile_all_threads(None)
        threading.setprofile_all_threads(walk_without_caller(walk))
        assert is_settled(job.id)
        time.sleep(0.5)  # The settler wakes others after its commit.
    finally:
        threading.setprofile_all_threads(None)
        stop.request()
        thread.join()
    return walk


def walk_without_caller(walk: Walk) -> Any:
    """The caller's own questions about the job are not part of its way."""

    def profile(*event: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            walk(*event)

    return profile


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    with contextlib.ExitStack() as stack:
        for _name, url in _own_postgres(stack):
            os.environ.setdefault("DATABASE_URL", url)
            table = record().table()
            if "--write" in sys.argv:
                before, _begin, rest = PAGE.read_text().partition(BEGIN)
                after = rest.partition(END)[2]
                PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
            print(table)


if __name__ == "__main__":
    main()
