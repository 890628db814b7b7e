"""Plots, as SVG. Each function returns False without figures to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..scenarios import GRID
from ..systems import LIMITS
from .figures import NAMES, OUR, Figures

# Ours, and all others.
BLUE, GREY, LIGHT = "#1f6feb", "#8b949e", "#c9d1d9"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dbqueue",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


@contextmanager
def drawn(file: Path, title: str, height: float) -> Iterator[Any]:
    """Yield axes, and write them to the file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    file.parent.mkdir(exist_ok=True)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
        axes.set_title(title)
        yield axes
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def append(figures: Figures, title: str, file: Path) -> bool:
    scenarios = {"1 × 8": "append 1 × 8", "2 × 4": "append 2 × 4"}
    run = figures.of(*scenarios.values())
    # Beside the bars of the limits, those of all queues would look equally short.
    names = [name for name in run.systems(scenarios.values()) if name not in LIMITS]
    if not names:
        return False
    names.sort(key=lambda name: run.median("append 1 × 8", name) or 0.0)
    with drawn(file, title, 1 + 0.5 * len(names)) as axes:
        for offset, (label, scenario), colour in zip(
            (0.2, -0.2), scenarios.items(), (BLUE, LIGHT), strict=True
        ):
            values = [run.median(scenario, name) or 0.0 for name in names]
            bars = axes.barh(
                [place + offset for place in range(len(names))],
                values,
                0.4,
                label=label,
                color=colour,
            )
            axes.bar_label(bars, [f"{value:,.0f}" if value else "—" for value in values], padding=3)
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
        axes.set_xlabel("jobs a second")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.12)
        axes.legend(loc="lower right")
    return True


def latency(figures: Figures, title: str, file: Path) -> bool:
    run = figures.of("latency")
    found = [
        (name, run.median("latency", name, "p50"), run.median("latency", name, "p99"))
        for name in run.systems(["latency"])
    ]
    if not found:
        return False
    found.sort(key=lambda each: -(each[1] or 0.0))
    with drawn(file, title, 1 + 0.4 * len(found)) as axes:
        for place, (name, p50, p99) in enumerate(found):
            colour = BLUE if name == OUR else GREY
            axes.plot([p50, p99], [place, place], color=colour, linewidth=2)
            axes.plot(p50, place, "o", color=colour, label="median" if place == 0 else None)
            axes.plot(
                p99,
                place,
                "|",
                color=colour,
                markersize=12,
                label="99 of 100" if place == 0 else None,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yticks(range(len(found)), [NAMES[name] for name, _, _ in found])
        axes.set_xlabel("milliseconds, on a logarithmic scale")
        axes.legend(loc="upper right")
    return True


def grid(figures: Figures, title: str, file: Path) -> bool:
    scenarios = {f"{p} × {t}": f"append {p} × {t}" for p, t in GRID}
    run = figures.of(*scenarios.values())
    found = {
        label: rate for label, scenario in scenarios.items() if (rate := run.median(scenario, OUR))
    }
    if not found:
        return False
    with drawn(file, title, 3.5) as axes:
        axes.bar_label(
            axes.bar(list(found), list(found.values()), color=BLUE),
            [f"{rate:,.0f}" for rate in found.values()],
        )
        axes.set_xlabel("processes × threads")
        axes.set_ylabel("jobs a second")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return True


def snapshot(figures: Figures, title: str, file: Path) -> bool:
    """Plot each round's rate in intervals of five seconds."""
    scenarios = {"none": "snapshot, none", "held": "snapshot, held"}
    run = figures.of(*scenarios.values())
    if not run.systems(scenarios.values()):
        return False
    from matplotlib.ticker import MultipleLocator

    with drawn(file, title, 3.5) as axes:
        for (label, scenario), colour in zip(scenarios.items(), (GREY, BLUE), strict=True):
            for number, rates in enumerate(run.values(scenario, OUR, "rates")):
                axes.plot(
                    [5 * (place + 1) for place in range(len(rates))],
                    rates,
                    "o-",
                    color=colour,
                    label=None if number else label,
                )
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.set_xlabel("seconds")
        axes.set_ylabel("jobs a second")
        axes.xaxis.set_major_locator(MultipleLocator(5))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(title="open snapshot", loc="lower right")
    return True


PLOTS: dict[str, tuple[str, Callable[[Figures, str, Path], bool]]] = {
    "append": ("Jobs a second that append a byte to a file", append),
    "latency": ("From the commit to the start", latency),
    "grid": ("Jobs a second, by processes and threads", grid),
    "snapshot": ("Jobs a second, while another session holds a snapshot", snapshot),
}
