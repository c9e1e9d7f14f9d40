"""Results as a table to read and as JSON to keep."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.race import Row

HEADINGS = ("case", "side", "frames/s", "us/frame", "GB/s", "peak RSS, MB", "ours / it", "wanted")
PACKAGES = ("pycollect-rl", "torch", "tensordict", "torchrl", "ray", "gymnasium", "numpy")


def table(rows: Sequence[Row]) -> str:
    """The rows as a markdown table."""
    return aligned([HEADINGS, *(_cells(row) for row in rows)])


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """A markdown table, padded so that it reads well in a terminal too; headings first."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    padded.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(padded)


def _cells(row: Row) -> tuple[str, ...]:
    wanted = ""
    if row.wanted is not None:
        wanted = f">= {row.wanted:g}: {'yes' if row.met else 'NO'}"
    ratio = f"{short(row.ratio)} ({short(row.ratio_lowest)} to {short(row.ratio_highest)})"
    return (
        row.case,
        row.side,
        f"{row.frames_per_second:,.0f}",
        f"{1e6 / row.frames_per_second:.3g}",
        f"{row.gigabytes_per_second:.4f}",
        f"{row.peak_rss_megabytes:,.0f}",
        "" if row.ratio == row.ratio_lowest == row.ratio_highest == 1 else ratio,
        wanted,
    )


def short(ratio: float) -> str:
    """A ratio, three digits of it."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """What the figures depend on: machine, system, versions, and how busy it all was."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average_at_the_end": os.getloadavg()[0],
        **{name: _version(name) for name in packages},
    }


def commit() -> str:
    """The commit that is measured; with a plus where files differ from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], capture_output=True, text=True
    )
    return answer.stdout.strip() or "not known"


def write(stem: Path, rows: Sequence[Row], command: str) -> None:
    """Write ``stem.json`` and ``stem.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    facts = machine()
    how = {"command": command, "commit": commit()}
    results = {**how, "machine": facts, "rows": [asdict(row) for row in rows]}
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    stem.with_suffix(".md").write_text(
        f"`{command}`, commit {how['commit']}\n\n{listed}\n\n{table(rows)}\n"
    )


def _field(path: str, name: str) -> str | None:
    """The first value of that name in a file of ``name : value`` lines, None without one."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    values = (line.split(":", 1)[1].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
