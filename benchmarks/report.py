"""Write results as a table and as JSON."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.race import Row
from pycollect.bench.report import PACKAGES, machine

HEADINGS = ("case", "side", "frames/s", "us/frame", "GB/s", "peak RSS, MB", "ours / it", "wanted")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    return aligned([HEADINGS, *(_cells(row) for row in rows)])


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table that is padded for terminals; the first line has the headings."""
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
    """Return a ratio with three digits."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return the facts that figures depend on: machine, system, versions and load."""
    known = machine(packages)
    return {
        **{name: known[name] for name in ("processor", "cores", "memory", "system", "python")},
        "load_average_at_the_end": known["load average"],
        **{name: known[name] for name in packages},
    }


def commit() -> str:
    """Return the measured commit, with a plus if files differ from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], capture_output=True, text=True
    )
    return answer.stdout.strip() or "not known"


def write(stem: Path, rows: Sequence[Row], command: str) -> None:
    """Write ``stem.json`` and ``stem.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    known = facts()
    how = {"command": command, "commit": commit()}
    results = {**how, "machine": known, "rows": [asdict(row) for row in rows]}
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    listed = "\n".join(f"- {name}: {value}" for name, value in known.items())
    stem.with_suffix(".md").write_text(
        f"`{command}`, commit {how['commit']}\n\n{listed}\n\n{table(rows)}\n"
    )
