"""Write a collector's `stats()` over time, to TensorBoard or a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol


class HasStats(Protocol):
    """The part of a collector that a StatsWriter needs."""

    def stats(self) -> dict[str, Any]:
        """Return statistics, like :meth:`pycollect.SyncDataCollector.stats`."""


class StatsWriter:
    """Write the numbers of a collector's `stats()`, one point or row per call.

    Nested entries get names such as "seconds/env" and "workers/0/frames". The returns of a vector
    reward get "episode_return/0", "episode_return/1" and so on. A StatsWriter is also a context
    manager.

    Args:
        target: A file name that ends in ".csv", which is overwritten, or a folder for TensorBoard,
            which requires the package "tensorboard". A number that first appears later, such as the
            return of the first episode, adds a column that is empty in earlier rows.

    Raises:
        ImportError: `target` is a folder and TensorBoard is not installed.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        path = Path(target)
        kind = _Csv if path.suffix == ".csv" else _TensorBoard
        self._sink: _Csv | _TensorBoard = kind(path)

    def write(self, collector: HasStats, step: int | None = None) -> None:
        """Write the collector's current statistics.

        Args:
            collector: Any collector, or an object with a `stats()` that returns numbers in nested
                dicts.
            step: Position on the horizontal axis. Defaults to ``None``: the number of delivered
                frames.
        """
        stats = collector.stats()
        self._sink.write(dict(_numbers(stats)), int(stats["frames"]) if step is None else step)

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        self._sink.close()

    def __enter__(self) -> StatsWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file."""
        self.close()


def _numbers(stats: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested dicts by path."""
    for name, value in stats.items():
        path = f"{prefix}{name}"
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, float(value)


class _Csv:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("w", newline="")
        self._columns: list[str] = []

    def write(self, numbers: dict[str, float], step: int) -> None:
        row = {"step": float(step), **numbers}
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def _widen(self, new: list[str]) -> None:
        """Rewrite the file with more columns, which are empty in existing rows."""
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self._columns = [*self._columns, *new]
        self._file.seek(0)
        writer = csv.DictWriter(self._file, self._columns)
        writer.writeheader()
        writer.writerows(rows)

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "StatsWriter needs TensorBoard to write into a folder: pip install tensorboard; "
                "a path that ends in .csv does not need it"
            ) from error
        self._writer = SummaryWriter(str(path))

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
