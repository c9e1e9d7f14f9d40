"""Tables of the results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.race import Row
from benchmarks.report import aligned, commit, facts, short
from examples.real.programs import PROGRAMS
from examples.real.run import Result
from examples.real.sides import ALONE, TORCHRL
from pycollect.bench.report import PACKAGES

MORE_PACKAGES = ("ale-py", "mujoco", "envpool", "stable-baselines3")

INTRODUCTION = (
    "# Real programs\n\n"
    "The command below each table wrote it; [what it does](../../examples/real/README.md). "
    "Frames per CPU-second count the CPU time of a side's process and its descendants, so other "
    "programs on the machine matter little. *ours / it* is pycollect's rate divided by the side's: "
    "the median over the rounds, with the lowest and the highest. A plain loop steps the same "
    "environment and network by hand, with preallocated arrays. *Environment and network alone* "
    "makes only their calls, with actions drawn in advance, and stores nothing."
)

HEADINGS = ("side", "frames/CPU-second", "ours / it", "wanted", "frames/s", "ours / it, frames/s")


def section(result: Result, figures: bool = True) -> str:
    """Return one program's part of the page."""
    verdict = (
        "all as recorded by their environment"
        if not result.wrong
        else f"{len(result.wrong)} WRONG: " + "; ".join(result.wrong)
    )
    before, after = result.load
    times = {row.side: row.cpu_ratio for row in result.rows}
    parts = [
        f"## {PROGRAMS[result.name].title}",
        f"Episodes compared: {result.episodes}, {verdict}. Load: {before:.1f} to {after:.1f}.",
        aligned([HEADINGS, *map(_cells, result.rows)]) if figures else "",
        _most_of(times) if figures else "",
        *(f"{side} is left out: {why}." for side, why in result.left_out.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _most_of(times: dict[str, float]) -> str:
    """Return how much faster than TorchRL the environment and network calls alone are."""
    if not times.keys() >= {ALONE, TORCHRL}:
        return ""
    most = times[TORCHRL] / times[ALONE]
    return f"{ALONE[0].upper()}{ALONE[1:]} reach {short(most)} times the rate of TorchRL."


def _cells(row: Row) -> tuple[str, ...]:
    is_ours = row.cpu_ratio_lowest == row.cpu_ratio_highest == 1
    met = row.wanted is not None and row.cpu_ratio >= row.wanted
    lowest, highest = short(row.cpu_ratio_lowest), short(row.cpu_ratio_highest)
    return (
        row.side,
        f"{row.frames_per_cpu_second:,.0f}",
        "" if is_ours else f"{short(row.cpu_ratio)} ({lowest} to {highest})",
        "" if row.wanted is None else f">= {row.wanted:g}: {'yes' if met else 'NO'}",
        f"{row.frames_per_second:,.0f}",
        "" if is_ours else short(row.ratio),
    )


def keep(folder: Path, result: Result, command: str) -> None:
    """Write the result to `real.json`, replacing the program's earlier one, and to `real.md`."""
    kept = folder / "real.json"
    entries: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    entries[result.name] = {
        "command": command,
        "commit": commit(),
        "machine": facts((*PACKAGES, *MORE_PACKAGES)),
        "result": asdict(result),
    }
    entries = {name: entries[name] for name in PROGRAMS if name in entries}
    kept.write_text(json.dumps(entries, indent=1) + "\n")
    (folder / "real.md").write_text(page(entries))


def page(entries: dict[str, Any]) -> str:
    """Return the page with all stored programs."""
    runs = {name: (entry["command"], entry["commit"]) for name, entry in entries.items()}
    known = list(entries.values())[-1]["machine"]
    parts = [
        INTRODUCTION,
        summary(entries),
        "\n".join(f"- {name}: {value}" for name, value in known.items()),
    ]
    for name, entry in entries.items():
        command, measured = runs[name]
        parts += [section(_result(entry["result"])).strip(), f"`{command}`, commit {measured}"]
    return "\n\n".join(parts) + "\n"


def summary(entries: dict[str, Any]) -> str:
    """Return a table: our frames per CPU-second, and their ratio to each other side."""
    others = ("plain loop", "TorchRL", "SB3", "Gymnasium")
    headings = ("", "pycollect", *(f"times {other}" for other in others))
    lines = []
    for name, entry in entries.items():
        rows = _result(entry["result"]).rows
        ratios = [[row.cpu_ratio for row in rows if other in row.side] for other in others]
        cells = ["" if not own else f"{own[0]:.2f}" for own in ratios]
        lines.append((PROGRAMS[name].title, f"{rows[0].frames_per_cpu_second:,.0f}", *cells))
    return aligned([headings, *lines])


def _result(kept: dict[str, Any]) -> Result:
    rows = tuple(Row(**row) for row in kept["rows"])
    return Result(**{**kept, "rows": rows})
