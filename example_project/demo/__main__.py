"""Command line: an early end prints one line, never a traceback."""

from __future__ import annotations

import sys

from . import DemoError
from .interrupts import deferred, end_on_signals


def main() -> int:
    """Run the demo. Returns the exit code."""
    try:
        end_on_signals()
        with deferred():
            from .run import run
        run()
        return 0
    except KeyboardInterrupt:
        print("\nStopped. Start the demo again to continue.", flush=True)
        return 130
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
