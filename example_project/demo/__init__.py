"""``python -m example_project.demo``: the standard library indexed by jobs, shown while it happens, and then served."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".demo"


class DemoError(Exception):
    """What keeps the demo from going on, and what to do about it."""
