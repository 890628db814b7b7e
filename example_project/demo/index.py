"""Run workers until everything is indexed, and print the result."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from django.db import connection
from django.template.defaultfilters import pluralize

from django_dbqueue.models import Failure, Queue

from ..models import Scan
from ..progress import Progress
from ..tasks import INDEX
from . import DemoError
from .children import command, log_of
from .console import Bar, say, shortened, width

BETWEEN_LOOKS = 0.2
PATIENCE = 60.0


def index(processes: int) -> None:
    """Run the waiting jobs. Raises DemoError if the workers cannot finish them."""
    before = Progress.now()
    if not before.unfinished and not Scan.objects.under_way().exists():
        say(f"The demo is complete: all {before.total:,} jobs are finished.")
    else:
        seconds = _run_to_the_end(processes, before)
        _say_how_it_went(Progress.now(), before, seconds)
    _say_the_result()


def follow(check: Callable[[], None]) -> None:
    """Show how far the workers are, until everything is indexed. ``check`` raises if they end."""
    before, started = Progress.now(), time.monotonic()
    if before.unfinished:
        bar = Bar(before.finished)
        try:
            while (progress := Progress.now()).unfinished and not _paused():
                check()
                bar.show(progress)
                time.sleep(BETWEEN_LOOKS)
            bar.show(progress)
        finally:
            bar.close()
        _say_how_it_went(progress, before, time.monotonic() - started)
    else:
        say(f"All {before.total:,} jobs are finished.")
    _say_the_result()


def _say_the_result() -> None:
    if last := Scan.objects.finished().first():
        say(f"The last scan: {last}.")
    if _paused():
        say(f"The queue {INDEX!r} is paused: its jobs wait until it is resumed in the admin.")
    _say_what_failed()


def how_to_run(processes: int) -> list[str]:
    """Return the arguments of ``runqueue``. SQLite has one writer, so one process is enough."""
    return ["--embedded"] if connection.vendor == "sqlite" else ["--processes", str(processes)]


def _run_to_the_end(processes: int, before: Progress) -> float:
    started = time.monotonic()
    bar = Bar(before.finished)
    try:
        _drain(processes, bar)
        if Progress.now().unfinished and not _paused():
            _wait_for_the_rest(processes, bar)
    finally:
        bar.close()
    return time.monotonic() - started


def _paused() -> bool:
    return Queue.objects.paused().filter(name=INDEX).exists()


def _drain(processes: int, bar: Bar) -> None:
    with command("runqueue", "--drain", *how_to_run(processes)) as workers:
        while (code := _exit_code(workers)) is None:
            bar.show(Progress.now())
    progress = Progress.now()
    bar.show(progress)
    # Code 1 means failed jobs, which some of the library's files cause, or an error of the command.
    if code not in (0, 1) or (code == 1 and not progress.failed):
        raise DemoError(f"The workers ended with exit code {code}. See {log_of('runqueue')}.")


def _wait_for_the_rest(processes: int, bar: Bar) -> None:
    """Run jobs that wait for a retry, or whose killed worker is not yet declared dead."""
    fewest, progressed = Progress.now().unfinished, time.monotonic()
    with command("runqueue", *how_to_run(processes)) as workers:
        while (progress := Progress.now()).unfinished:
            bar.show(progress)
            if progress.unfinished < fewest:
                fewest, progressed = progress.unfinished, time.monotonic()
            if time.monotonic() - progressed > PATIENCE or _exit_code(workers) is not None:
                raise DemoError(f"{fewest:,} jobs do not run. See {log_of('runqueue')}.")
        bar.show(progress)


def _exit_code(workers: subprocess.Popen[bytes]) -> int | None:
    try:
        return workers.wait(BETWEEN_LOOKS)
    except subprocess.TimeoutExpired:
        return None


def _say_how_it_went(after: Progress, before: Progress, seconds: float) -> None:
    jobs = after.finished - before.finished
    say(f"{jobs:,} job{pluralize(jobs)} in {seconds:.1f} s, {jobs / seconds:,.0f} a second.")
    say(f"In all, {after.done:,} are done and {after.failed:,} failed.")


def _say_what_failed() -> None:
    failures = list(Failure.objects.open().order_by("-count", "pk"))
    if failures:
        say("\nWhat failed, by its cause:")
    for failure in failures:
        kind = failure.error_type.rpartition(".")[2]
        what = shortened(f"{kind} in {failure.location}: {failure.message}", width() - 9)
        say(f"{failure.count:6,} × {what}")
