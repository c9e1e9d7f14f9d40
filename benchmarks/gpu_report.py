"""Writes gpu.md and a plot from what `python -m pycollect bench gpu --json` wrote.

    python -m benchmarks.gpu_report COMMIT gpu.json nature.json [--again again.json] [--to FOLDER]

Rows of all files become one table, and one gpu.json, in which ratios are made anew. With --again
there is a column more: how far a second run was from the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pycollect.bench.plot import save_plot
from pycollect.bench.rows import Row, markdown, read_json, with_ratios, write_json

RESULTS = Path(__file__).parent / "results"
_CHANGES = ("load average", "link generation")  # from one command to the next


def report(commit: str, files: Sequence[Path], again: Path | None, folder: Path) -> None:
    """Write ``gpu.json``, ``gpu.md`` and ``gpu.png``.

    Args:
        commit: of what was measured.
        files: of runs on one machine.
        again: another run of some of it.

    Raises:
        ValueError: the files are of different machines or versions.
    """
    runs = [read_json(file) for file in files]
    _, facts, _ = runs[0]
    for file, (_, others, _) in zip(files, runs, strict=True):
        for name, value in facts.items():
            if name not in _CHANGES and others.get(name) != value:
                raise ValueError(
                    f"{file}: expected the machine of {files[0]}, with {name} {value}, got "
                    f"{others.get(name)}"
                )
    rows = with_ratios(row for _, _, own in runs for row in own)
    commands = [command for command, _, _ in runs]
    text = [
        f"Commit {commit}.\n",
        *(f"- `{command}`" for command in commands),
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        markdown(rows),
    ]
    if again is not None:
        text += ["", *_spread(rows, read_json(again)[2])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text("\n".join(text) + "\n")
    write_json(folder / "gpu.json", rows, {"commit": commit, **facts}, "; ".join(commands))
    save_plot(rows, str(facts["gpu"] or "no GPU"), folder / "gpu.png")


def _spread(rows: Sequence[Row], again: Sequence[Row]) -> list[str]:
    """A second run's rate over the first's, or its time's inverse, row by row."""
    other = {row.name: row for row in again}
    lines = ["| case | again, x |", "| --- | ---: |"]
    for row in rows:
        second = other.get(row.name)
        if second is None or not (second.seconds and row.seconds):
            continue
        first_rate, rate = row.gigabytes_per_second, second.gigabytes_per_second
        times = rate / first_rate if rate and first_rate else row.seconds / second.seconds
        lines.append(f"| {row.name} | {times:.2f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="gpu.md and a plot from figures in JSON")
    parser.add_argument("commit", help="what was measured")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="FILE", help="a second run, for the spread")
    parser.add_argument("--to", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args(arguments)
    report(args.commit, args.files, args.again, args.to)


if __name__ == "__main__":
    main()
