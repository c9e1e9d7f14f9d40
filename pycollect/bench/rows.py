"""What was measured: rows of a table, JSON, ratios to the limits."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("pycollect", "torch", "tensordict", "torchrl", "ray", "gymnasium", "numpy")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: of the case.
        megabytes: moved or written in one round, 10^6 bytes.
        seconds: of one round: the median.
        available: False for what this machine cannot do; nothing was measured then.
        limit: the name of the row that says what is possible.
        ratio: this rate over the limit's.
        peer: the name of TorchRL's row of the same work.
        times: this rate over the peer's.
        hidden: the share of the copies' time that passed while a learner worked.
        frames: in one round.
        note: why there is nothing, or what the figures are of.
    """

    name: str
    megabytes: float = 0.0
    seconds: float | None = None
    available: bool = True
    limit: str | None = None
    ratio: float | None = None
    peer: str | None = None
    times: float | None = None
    hidden: float | None = None
    frames: int | None = None
    note: str = ""

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes per second; None where nothing was measured, or nothing moved."""
        if not self.seconds or not self.megabytes:
            return None
        return self.megabytes / 1e3 / self.seconds

    @property
    def frames_per_second(self) -> float | None:
        """None where frames are not what was counted."""
        return self.frames / self.seconds if self.frames and self.seconds else None


def missing(name: str, why: str) -> Row:
    """The row of what cannot be measured here."""
    return Row(name, available=False, note=why)


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """The rows, those with a limit or a peer compared with it."""
    known = {row.name: row for row in rows}

    def ratio(row: Row, name: str | None) -> float | None:
        return _ratio(row, known.get(name or ""))

    return [
        replace(row, ratio=ratio(row, row.limit), times=ratio(row, row.peer))
        for row in known.values()
    ]


def _ratio(row: Row, other: Row | None) -> float | None:
    if other is None:
        return None
    ours, theirs = row.gigabytes_per_second, other.gigabytes_per_second
    return ours / theirs if ours and theirs else None


def table(rows: Sequence[Row]) -> str:
    """The rows to read."""
    heads = ("case", "MB", "ms", "GB/s", "frames/s", "of the limit", "x TorchRL", "hidden", "")
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, len(heads) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    if not row.available:
        return (row.name, *["-"] * 7, f"not available: {row.note}")
    return (
        row.name,
        _number(row.megabytes or None, ".4g"),
        _number(row.seconds and 1e3 * row.seconds, ".4g"),
        _number(row.gigabytes_per_second, ".3g"),
        _number(row.frames_per_second, ",.0f"),
        _number(row.ratio, ".0%"),
        _number(row.times, ",.1f"),
        _number(row.hidden, ".0%"),
        row.note,
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def write_json(path: Path, rows: Sequence[Row], quick: bool) -> None:
    """Write the rows and what they depend on."""
    own = [
        {
            **asdict(row),
            "gigabytes_per_second": row.gigabytes_per_second,
            "frames_per_second": row.frames_per_second,
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine(), "quick": quick, "rows": own}, indent=1) + "\n"
    )


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
