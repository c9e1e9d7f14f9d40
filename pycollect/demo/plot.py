"""The plot of a run: return and frames/s over time. Only this file uses matplotlib."""

from __future__ import annotations

from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

from pycollect.demo.train import RECENT_EPISODES, Run

RETURN, SPEED, QUIET = "#1f5fa8", "#d9772b", "0.45"


def save_plot(run: Run, title: str, folder: Path) -> Path:
    """Draw a run with at least one batch, and save it in `folder`, which is made if missing.

    Returns:
        The path of the PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure = drawn(run, title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.task.env_id.replace('/', '-')}.png"
    figure.savefig(path, dpi=150)
    return path


def drawn(run: Run, title: str) -> Any:
    """Return matplotlib's figure of a run with at least one batch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    if all(isnan(point.mean_return) for point in run.points):
        panels = [figure.subplots()]
        figure.supxlabel("No episode ended, so there is no return to show", fontsize=10)
    else:
        panels = [*figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))]
        _draw_returns(panels[0], run)
    _draw_speed(panels[-1], run)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.tick_params(color=QUIET, labelcolor="0.3")
    return figure


def _draw_returns(axes: Any, run: Run) -> None:
    known = [point for point in run.points if not isnan(point.mean_return)]
    axes.plot(
        [point.seconds for point in known],
        [point.mean_return for point in known],
        color=RETURN,
        lw=2,
        marker="o" if len(known) == 1 else None,  # a single point has no line
    )
    axes.margins(y=0.1)  # room for the target's label
    _say(axes, f"Mean return of the last {RECENT_EPISODES} episodes")
    if run.task.target is not None:
        axes.axhline(run.task.target, color=QUIET, lw=1, ls="--")
        axes.annotate(
            f"target {run.task.target:g}",
            (0, run.task.target),
            xytext=(4, 3),
            textcoords="offset points",
            color=QUIET,
        )


def _draw_speed(axes: Any, run: Run) -> None:
    edges = [0.0, *(point.seconds for point in run.points)]
    counts = [0, *(point.frames for point in run.points)]
    speeds = [
        (after - before) / (end - start)
        for (start, end), (before, after) in zip(pairwise(edges), pairwise(counts), strict=True)
    ]
    axes.stairs(speeds, edges, color=SPEED, lw=1.5)
    axes.stairs(speeds, edges, color=SPEED, alpha=0.12, fill=True)
    average = counts[-1] / edges[-1]
    axes.axhline(average, color=QUIET, lw=1, ls="--")
    _say(axes, f"Frames per second, learning included (dashed: average {average:,.0f})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _say(axes: Any, text: str) -> None:
    """Set a caption above the panel, which is easier to read than a rotated axis label."""
    axes.set_title(text, loc="left", fontsize=10, color="0.3")
