"""``python -m example_project.demo``: index the standard library by jobs, and serve the search."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".demo"


class DemoError(Exception):
    """The demo cannot continue. The message has the reason and the remedy."""
