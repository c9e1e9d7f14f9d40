"""Draw the published results as a bar chart for the README.

python -m benchmarks.chart [--from results.json] [--to docs/benchmarks.svg]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parent.parent
_COLORS = {"pycollect": "#1f5fa8", "TorchRL": "#d9772b"}

CASES = {
    "Pendulum, in process, T=2000": "Pendulum in this process",
    "CartPole x64, categorical": "64 CartPoles in a vector environment",
    "Pendulum, processes, sync, 2 workers of 1, T=400": "Pendulum in two processes",
    "CartPole, processes, sync, 2 workers of 1, T=400": "CartPole in two processes",
    "CartPole, processes, sync, 2 workers of 8, T=400": "8 CartPoles in each of two processes",
    "Pendulum, Ray, 2 actors, sync, T=2000": "Pendulum in two Ray actors",
}
"""Labels of the cases to draw, by their names in the results."""


class Bars(NamedTuple):
    """One case: its label, and the rate of each side divided by that of plain loops."""

    label: str
    sides: Mapping[str, float]


def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bars]:
    """Return the bars of all cases.

    Raises:
        ValueError: A case is not among the rows, or lacks a side.
    """
    found = []
    for case, label in CASES.items():
        ratios = {row["side"]: row["ratio"] for row in rows if row["case"] == case}
        loop_ratio = _of("plain loop", case, ratios)
        sides = {side: loop_ratio / _of(side, case, ratios) for side in _COLORS}
        found.append(Bars(label, sides))
    return found


def _of(side: str, case: str, ratios: Mapping[str, float]) -> float:
    """Return our rate divided by a side's."""
    for name, ratio in ratios.items():
        if side in name:
            return ratio
    raise ValueError(f"results: expected a side {side!r} of {case!r}, got {list(ratios)}")


def draw(cases: Sequence[Bars], path: Path) -> None:
    """Draw the bars into an SVG file; the same figures give the same bytes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    height = 0.8 / len(_COLORS)
    with matplotlib.rc_context({"svg.hashsalt": "pycollect", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 0.8 + 0.55 * len(cases)), layout="constrained")
        axes = figure.subplots()
        for number, (side, color) in enumerate(_COLORS.items()):
            places = [place + number * height for place in range(len(cases))]
            drawn = axes.barh(
                places, [case.sides[side] for case in cases], height, color=color, label=side
            )
            axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9, color="0.3")
        axes.axvline(1, color="0.45", lw=1, ls="--")
        axes.set_yticks([place + height / 2 for place in range(len(cases))])
        axes.set_yticklabels([case.label for case in cases])
        axes.invert_yaxis()
        axes.set_title("Frames per second; plain loop = 1", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_COLORS))
        figure.savefig(path, format="svg", metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    results = _ROOT / "benchmarks" / "results" / "results.json"
    parser.add_argument("--from", dest="source", type=Path, default=results)
    parser.add_argument("--to", type=Path, default=_ROOT / "docs" / "benchmarks.svg")
    args = parser.parse_args(arguments)
    draw(bars(json.loads(args.source.read_text())["rows"]), args.to)


if __name__ == "__main__":
    main()
