"""Results of measurements: rows with their ratios, as a table, as JSON and as a plot, and the facts
about the machine. Only `save_plot` imports matplotlib, and only `machine` imports torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("pycollect-rl", "torch", "tensordict", "torchrl", "ray", "gymnasium", "numpy")
_CARD = {
    "driver": "driver_version",
    "bus": "pci.bus_id",
    "link generation": "pcie.link.gen.current",
    "link generation at most": "pcie.link.gen.max",
    "link width": "pcie.link.width.current",
    "link width at most": "pcie.link.width.max",
}
"""Facts about a GPU, and their names in nvidia-smi."""
_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    megabytes: float = 0.0  # 10^6 bytes moved or written in one round
    seconds: float | None = None
    available: bool = True  # False if this machine cannot run the case; nothing was measured then
    limit: str | None = None  # name of the row with the best possible rate
    ratio: float | None = None  # this rate divided by the limit's
    peer: str | None = None  # name of the row in which TorchRL or plain torch does the same work
    times: float | None = None  # this rate / the peer's; if there is none, peer's time / this one's
    hidden: float | None = None  # share of the copies' time that overlapped with a learner's work
    frames: int | None = None
    note: str = ""  # why figures are missing, or a remark on them

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes per second, or None if nothing was measured or moved."""
        if not self.seconds or not self.megabytes:
            return None
        return self.megabytes / 1e3 / self.seconds

    @property
    def frames_per_second(self) -> float | None:
        """Frames per second, or None if frames were not counted."""
        return self.frames / self.seconds if self.frames and self.seconds else None


def missing(name: str, why: str) -> Row:
    """Return the row of a case that cannot be measured here."""
    return Row(name, available=False, note=why)


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, each compared with its limit and its peer."""
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
    for ours, theirs in (
        (row.gigabytes_per_second, other.gigabytes_per_second),
        (row.frames_per_second, other.frames_per_second),
    ):
        if ours and theirs:
            return ours / theirs
    if row.megabytes or other.megabytes or not (row.seconds and other.seconds):
        return None
    return other.seconds / row.seconds


_LIMIT = "of the limit"
_HEADS = ("case", "MB", "ms", "GB/s", "frames/s", _LIMIT, "x peer", "hidden", "")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a terminal."""
    limits = {row.limit for row in rows if row.limit is not None}
    limit = f"of the {limits.pop()}" if len(limits) == 1 else _LIMIT
    heads = tuple(limit if head == _LIMIT else head for head in _HEADS)
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, len(heads) - 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    rule = ("---", *("---:" for _ in _HEADS[2:]), "---")
    lines = [_HEADS, rule, *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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


def write_json(path: Path, rows: Sequence[Row], facts: Mapping[str, Any], command: str) -> None:
    """Write the rows, the machine's facts, and the command."""
    own = [
        {
            **asdict(row),
            "gigabytes_per_second": row.gigabytes_per_second,
            "frames_per_second": row.frames_per_second,
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": facts, "rows": own}, indent=1)
    path.write_text(text + "\n")


def read_json(path: Path) -> tuple[str, dict[str, Any], list[Row]]:
    """Read the command, the facts and the rows that `write_json` wrote.

    Raises:
        OSError, ValueError, KeyError: The file does not exist or has another format.
    """
    written = json.loads(path.read_text())
    names = {field.name for field in fields(Row)}
    rows = [Row(**{k: v for k, v in row.items() if k in names}) for row in written["rows"]]
    return written["command"], written["machine"], rows


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the measured rates in two panels: frames/s, and GB/s of rows that move bytes.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in reversed(rows) if row.seconds]
    rates = {
        "frames/s": [(row, row.frames_per_second) for row in measured if not row.megabytes],
        "GB/s": [(row, row.gigabytes_per_second) for row in measured],
    }
    panels = [(label, [own for own in rates[label] if own[1]]) for label in rates]
    panels = [(label, bars) for label, bars in panels if bars]
    limits = {row.limit for row in rows}
    heights = [1 + 0.25 * len(bars) for _, bars in panels] or [1]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    every = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (label, bars) in zip(every, panels, strict=False):
        colors = ["0.6" if row.name in limits else "#1f5fa8" for row, _ in bars]
        axes.barh([row.name for row, _ in bars], [rate for _, rate in bars], color=colors)
        axes.set_xscale("log")
        axes.set_xlabel(f"{label} (grey: limits)")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def machine(packages: Sequence[str] = (*PACKAGES, "pybind11")) -> dict[str, Any]:
    """Return the facts by name, with the versions of packages; None for unknown ones.

    An idle GPU may report a slower link than it has, so call this after using it.
    """
    import torch

    card = _card()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        **card,
        "NUMA nodes": len(list(_NODES.glob("node[0-9]*"))) or None,
        "NUMA node of the GPU": _node_of(card["bus"]),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "huge pages": _text(_PAGES / "enabled"),
        "huge pages of shared memory": _text(_PAGES / "shmem_enabled"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": _first_line([os.environ.get("CXX", "c++"), "--version"]),
        "load average": os.getloadavg()[0],
        **{name: _version(name) for name in packages},
    }


def headline(facts: dict[str, Any]) -> str:
    """Return the most important facts in one line."""
    if facts["gpu"] is None:
        return f"no GPU, {facts['cores']} cores"
    return (
        f"{facts['gpu']}, driver {facts['driver']}, PCIe {facts['link generation']} x "
        f"{facts['link width']}, NUMA node {facts['NUMA node of the GPU']} of "
        f"{facts['NUMA nodes']}, {facts['cores']} cores, huge pages of shared memory: "
        f"{facts['huge pages of shared memory']}"
    )


def _card() -> dict[str, str | None]:
    """Return the facts of the first GPU that nvidia-smi lists."""
    query = f"--query-gpu={','.join(_CARD.values())}"
    line = _first_line(["nvidia-smi", query, "--format=csv,noheader", "--id=0"])
    values = [value.strip() for value in (line or "").split(",")]
    if len(values) != len(_CARD):
        return dict.fromkeys(_CARD)
    return dict(zip(_CARD, values, strict=True))


def _node_of(bus: str | None) -> int | None:
    """Return the NUMA node of a PCI device; Linux reports -1 if it has none."""
    if bus is None:
        return None
    domain, _, rest = bus.lower().partition(":")
    found = _text(_PCI / f"{domain[-4:]}:{rest}" / "numa_node")
    return None if found is None else int(found)


def _first_line(command: list[str]) -> str | None:
    """Return the first line of a program's output, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    lines = result.stdout.splitlines()
    return lines[0] if result.returncode == 0 and lines else None


def _field(path: str, name: str) -> str | None:
    """Return the first value of that name in a file of ``name : value`` lines."""
    lines = (_text(Path(path)) or "").splitlines()
    values = (line.split(":", 1)[1].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
