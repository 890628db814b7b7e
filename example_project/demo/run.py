"""The demo as a list of steps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from . import FOLDER
from .database import chosen_database, database_errors, set_django_up
from .interrupts import deferred
from .locks import check_port, only_one

WHAT = "Index the standard library with jobs, watch them, and serve the search page and the admin."
MOST_PROCESSES = 8


def run() -> None:
    """Run the demo with the command line's options. Raises DemoError if it cannot continue."""
    options = _options()
    if not options.once:
        check_port(options.port)
    FOLDER.mkdir(exist_ok=True)
    with only_one(), chosen_database(), database_errors():
        with deferred():
            set_django_up()
            from .index import index
            from .prepare import prepare
            from .serve import serve
        prepare()
        if options.once:
            index(options.processes)
        else:
            serve(options.port, options.processes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=WHAT)
    parser.add_argument(
        "--once", action="store_true", help="index, print the result, and end without serving"
    )
    parser.add_argument(
        "--port", type=_whole(65535), default=8000, help="port of the server (default: %(default)s)"
    )
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    parser.add_argument(
        "--processes",
        type=_whole(1000),
        default=processes,
        help="worker processes (default: %(default)s)",
    )
    return parser.parse_args()


def _whole(most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return whole
