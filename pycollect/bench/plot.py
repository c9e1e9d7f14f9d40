"""The plot of a benchmark: rates beside the limits. The only file here that knows matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycollect.bench.rows import Row


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the rates of all rows that were measured.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in reversed(rows) if row.gigabytes_per_second]
    figure = Figure(figsize=(8, 1 + 0.3 * len(measured)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    limits = {row.limit for row in rows}
    axes.barh(
        [row.name for row in measured],
        [row.gigabytes_per_second or 0.0 for row in measured],
        color=["0.6" if row.name in limits else "#1f5fa8" for row in measured],
    )
    axes.set_xscale("log")
    axes.set_xlabel("GB/s (grey: limits)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
