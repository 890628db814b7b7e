"""Write the tables and plots of a page between its markers.

A marker is ``<!-- table: drain -->`` … ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .figures import Figures, Run
from .plots import PLOTS
from .tables import TABLES

KEPT = Path(__file__).parent.parent / "figures"
MARK = re.compile(r"(<!-- (table|plot): (\w+) -->\n).*?(<!-- end -->)", re.S)
NOTHING = "*Not measured yet.*"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="Files of figures, as JSON. Default: all in benchmarks/figures.",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=Path("docs"),
        help="The folder of benchmarks.md (default: %(default)s).",
    )
    given = parser.parse_args()
    figures = Figures([Run.read(file) for file in given.files or sorted(KEPT.glob("*.json"))])
    write(given.into, figures)


def write(folder: Path, figures: Figures) -> None:
    page = folder / "benchmarks.md"
    page.write_text(
        MARK.sub(
            lambda mark: mark[1] + part(folder, figures, mark[2], mark[3]) + "\n" + mark[4],
            page.read_text(),
        )
    )


def part(folder: Path, figures: Figures, kind: str, name: str) -> str:
    """Return the text between two markers."""
    if kind == "table":
        return TABLES[name](figures) or NOTHING
    title, draw = PLOTS[name]
    file = folder / "benchmarks" / f"{name}.svg"
    return f"![{title}](benchmarks/{file.name})" if draw(figures, title, file) else NOTHING


if __name__ == "__main__":
    main()
