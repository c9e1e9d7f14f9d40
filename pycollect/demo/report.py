"""The result of a demo run: a summary and a plot. Only `drawn` imports matplotlib."""

from __future__ import annotations

from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

from pycollect.demo.train import RECENT_EPISODES, Run

_PHASES = {
    "idle": "waiting for workers",
    "env": "environments",
    "policy": "policy",
    "record": "recording",
    "transport": "transport",
    "assemble": "assembly",
    "deliver": "delivery",
    "user": "learning",
}
"""Phases of a run by their names in `stats()["seconds"]`."""
_RETURN, _SPEED, _QUIET = "#1f5fa8", "#d9772b", "0.45"


def summary(run: Run) -> str:
    """Return the outcome, the collector's times and the figures, as plain text."""
    return "\n".join([_verdict(run), "", *_times(run), "", *_figures(run)])


def _verdict(run: Run) -> str:
    target = run.task.target
    if run.outcome == "interrupted":
        return "Interrupted."
    if run.outcome == "target":
        return f"Solved: the mean return passed {target:g}."
    if target is None:
        return "The frame budget is used up."
    return f"The frame budget is used up, but the mean return did not pass {target:g}."


def _times(run: Run) -> list[str]:
    seconds = run.stats.get("seconds", {})
    total = seconds.get("elapsed", 0.0)
    rows = {label: seconds[name] for name, label in _PHASES.items() if name in seconds}
    return [
        f"{'where the time went':<24}{'seconds':>10}{'share':>9}",
        *(
            f"{label:<24}{value:>10.2f}{value / total if total else 0.0:>9.1%}"
            for label, value in {**rows, "total": total}.items()
        ),
    ]


def _figures(run: Run) -> list[str]:
    stats = run.stats
    frames, episodes = stats.get("frames", 0), stats.get("episodes", 0)
    workers = [worker["seconds"] for worker in stats.get("workers", {}).values()]
    phases = ("env", "policy", "record")
    worked = sum(seconds.get(name, 0.0) for seconds in workers for name in phases)
    mean = stats.get("episode_return")
    last = f"of the last {min(episodes, RECENT_EPISODES)} episodes"
    return [
        row("frames", f"{frames:,}"),
        row("frames/s", _rate(frames, run.points[-1].seconds if run.points else 0.0)),
        row("  of each worker", _rate(frames, worked)),
        row("episodes", f"{episodes:,}"),
        row("mean return", "-" if mean is None else f"{mean:.1f} {last}"),
    ]


def _rate(frames: int, seconds: float) -> str:
    return f"{frames / seconds:,.0f}" if seconds else "-"


def row(label: str, value: str) -> str:
    """Return one line of the summary's figures."""
    return f"{label:<24}{value}"


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
    """Return matplotlib's figure of a run with at least one batch: returns and frames/s."""
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
        axes.tick_params(color=_QUIET, labelcolor="0.3")
    return figure


def _draw_returns(axes: Any, run: Run) -> None:
    known = [point for point in run.points if not isnan(point.mean_return)]
    axes.plot(
        [point.seconds for point in known],
        [point.mean_return for point in known],
        color=_RETURN,
        lw=2,
        marker="o" if len(known) == 1 else None,  # a single point has no line
    )
    axes.margins(y=0.1)  # space for the target's label
    _caption(axes, f"Mean return of the last {RECENT_EPISODES} episodes")
    target = run.task.target
    if target is not None:
        axes.axhline(target, color=_QUIET, lw=1, ls="--")
        place = {"xytext": (4, 3), "textcoords": "offset points", "color": _QUIET}
        axes.annotate(f"target {target:g}", (0, target), **place)


def _draw_speed(axes: Any, run: Run) -> None:
    edges = [0.0, *(point.seconds for point in run.points)]
    counts = [0, *(point.frames for point in run.points)]
    speeds = [
        (after - before) / (end - start)
        for (start, end), (before, after) in zip(pairwise(edges), pairwise(counts), strict=True)
    ]
    axes.stairs(speeds, edges, color=_SPEED, lw=1.5)
    axes.stairs(speeds, edges, color=_SPEED, alpha=0.12, fill=True)
    average = counts[-1] / edges[-1]
    axes.axhline(average, color=_QUIET, lw=1, ls="--")
    _caption(axes, f"Frames per second, learning included (dashed: average {average:,.0f})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _caption(axes: Any, text: str) -> None:
    """Set a caption above the panel, which is easier to read than a rotated axis label."""
    axes.set_title(text, loc="left", fontsize=10, color="0.3")
