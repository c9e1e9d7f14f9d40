"""The plot of a benchmark: rates and their limits. Only this file uses matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pycollect.bench.rows import Row


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the measured rates in two panels: frames/s, and GB/s of rows that move bytes.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in reversed(rows) if row.seconds]
    bytes_ = [row for row in measured if row.gigabytes_per_second]
    frames = [row for row in measured if row.frames_per_second and row not in bytes_]
    limits = {row.limit for row in rows}
    panels: list[tuple[list[Row], Callable[[Row], float | None], str]] = [
        (own, rate, label)
        for own, rate, label in (
            (frames, lambda row: row.frames_per_second, "frames/s"),
            (bytes_, lambda row: row.gigabytes_per_second, "GB/s"),
        )
        if own
    ]
    heights = [1 + 0.25 * len(own) for own, _, _ in panels] or [1]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    if panels:
        every = figure.subplots(len(panels), squeeze=False, height_ratios=heights)
        for axes, (own, rate, label) in zip(every[:, 0], panels, strict=True):
            _draw(axes, own, rate, f"{label} (grey: limits)", limits)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw(
    axes: Any,
    rows: Sequence[Row],
    rate: Callable[[Row], float | None],
    label: str,
    limits: set[str | None],
) -> None:
    axes.barh(
        [row.name for row in rows],
        [rate(row) or 0.0 for row in rows],
        color=["0.6" if row.name in limits else "#1f5fa8" for row in rows],
    )
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
