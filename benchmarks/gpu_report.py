"""Make results/gpu.md, gpu.json and gpu.png from the figures of `benchmarks/gpu_call.sh`.

    python -m benchmarks.gpu_report COMMIT FOLDER [FOLDER ...] [--to FOLDER]

Rows of all files become one table. If a row was measured more than once, the last one counts and
the others show the spread. Ratios are computed again and compared with the goals.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pycollect.bench.copies import LEARNERS
from pycollect.bench.gpu_trajectories import FORMS
from pycollect.bench.pixels import CAPTURED, ENVS, LOOP, PEERS, POLICY, SIDES, compared
from pycollect.bench.report import Row, markdown, read_json, save_plot, with_ratios, write_json
from pycollect.bench.simulator import SIZES, STEPS

RESULTS = Path(__file__).parent / "results"
_OF_THE_RUN = (
    "load average",
    "link generation",
    "memory",
    "bus",
    "processor",
    "NUMA node of the GPU",
)
"""Facts that may differ between calls on machines of the same kind."""
_Rows = Mapping[str, Row]
_Figure = Callable[[_Rows], float | None]


class Mark(NamedTuple):
    """A goal.

    Attributes:
        text: Description of the figure.
        wanted: Minimum value of the figure.
        figure: Computes it from the rows; ``None`` if a row is missing.
    """

    text: str
    wanted: float
    figure: _Figure


def _own(name: str, field: str) -> _Figure:
    return lambda rows: getattr(rows[name], field) if name in rows else None


def _times(
    name: str, others: Sequence[str], choose: Callable[[list[float]], float] = max
) -> _Figure:
    """Divide the rate of a row by one of the rates of the other rows (default: the highest).

    Other rows may be missing, except the first.
    """

    def figure(rows: _Rows) -> float | None:
        keys = (name, *others)
        own, *rates = (rows[key].frames_per_second if key in rows else None for key in keys)
        return own / choose([rate for rate in rates if rate]) if own and rates[0] else None

    return figure


def _within(name: str, alone: str) -> _Figure:
    """Divide the limit of a step's time (5 us more than without recording) by its time."""

    def figure(rows: _Rows) -> float | None:
        own, limit = (rows[key].seconds if key in rows else None for key in (name, alone))
        return (limit + 5e-6 * STEPS) / own if own and limit else None

    return figure


def _marks(processes: Sequence[str]) -> list[Mark]:
    """Return all goals in the order of the table."""
    marks = [
        Mark(f"{name}: of a pinned copy", 0.95, _own(name, "ratio"))
        for name in ("upload", "upload, shared slab")
    ]
    for share in LEARNERS:
        name = f"upload beside a learner of {share} copies"
        marks.append(Mark(f"{name}: hidden", 0.9, _own(name, "hidden")))
    for width, wanted in (("pixels", 0.8), ("32 float32", 0.8), ("17 float32", 0.5)):
        name = f"gather, {width}"
        marks.append(Mark(f"{name}: of a device copy", wanted, _own(name, "ratio")))
        marks.append(Mark(f"{name}: of one index_select", 1.5, _own(name, "times")))
    for form in FORMS:
        for call in ("split", "MultiStep"):
            name = f"{call}, {form.name} {list(form.shape)}"
            marks.append(Mark(f"{name}: of index_select per leaf", 1.5, _own(name, "times")))
    for envs in SIZES:
        name = f"{envs} environments there"
        marks.append(
            Mark(
                f"{name}, captured, 5 us per step: of environment and policy alone",
                1.0,
                _within(f"{name}, pycollect, captured", f"{name}, alone, captured"),
            )
        )
        ours = f"{name}, pycollect"
        marks.append(Mark(f"{ours}: of TorchRL", 2.0, _times(ours, [f"{name}, TorchRL"])))
    for count in processes:
        marks += _of_collectors(count)
    return marks


def _of_collectors(count: str) -> list[Mark]:
    def rows(*sides: str) -> list[str]:
        return [f"{side}, {count}" for side in sides]

    marks = []
    for side, limits in (
        ("central", (POLICY,)),
        ("central, captured", (POLICY, CAPTURED)),
    ):
        (own,) = rows(side)
        for alone in limits:
            figure = _times(own, rows(alone, ENVS), min)
            marks.append(Mark(f"{own}: of {alone}, or of {ENVS} if slower", 0.9, figure))
        marks.append(Mark(f"{own}: of TorchRL's best way", 3.0, _times(own, rows(*PEERS))))
        marks.append(Mark(f"{own}: of {LOOP}", 1.5, _times(own, rows(LOOP))))
    (busy,) = rows("start() beside a learner")
    quiet = rows("start() without a learner")
    return [*marks, Mark(f"{busy}: of it alone", 0.8, _times(busy, quiet))]


def report(commit: str, folders: Sequence[Path], to: Path) -> None:
    """Write ``gpu.json``, ``gpu.md`` and ``gpu.png``.

    Args:
        commit: Measured commit.
        folders: Folders with the files of `bench --json`, in the order of the calls.
        to: Folder of the results.

    Raises:
        ValueError: There are no files, or they are from different cards or versions.
    """
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    if not files:
        raise ValueError(f"folders: expected files of figures in {', '.join(map(str, folders))}")
    runs = [read_json(file) for file in files]
    facts = _facts(files, [facts for _, facts, _ in runs])
    measured: dict[str, list[Row]] = {}
    for command, _, own in runs:
        for row in _named(command, own):
            measured.setdefault(row.name, []).append(row)
    rows = [_last(rows) for rows in measured.values()]
    sides = {row.name for row in rows if row.name.rpartition(", ")[0] in SIDES}
    rows = with_ratios(compared(row) if row.name in sides else row for row in rows)
    commands = [re.sub(r" --json \S+", "", command) for command, _, _ in runs]
    processes = [*dict.fromkeys(name.rpartition(", ")[2] for name in sorted(sides))]
    text = [
        f"Commit {commit}.\n",
        *(f"- `{command}`" for command in commands),
        "",
        *(f"- {name}: {value}" for name, value in facts.items() if value is not None),
        "",
        *_wanted(rows, processes),
        "",
        markdown(rows),
        "",
        *_spread(measured),
    ]
    to.mkdir(parents=True, exist_ok=True)
    (to / "gpu.md").write_text("\n".join(text).rstrip() + "\n")
    write_json(to / "gpu.json", rows, {"commit": commit, **facts}, "; ".join(commands))
    drawn = [row for row in rows if row.name in sides or row.gigabytes_per_second]
    save_plot(drawn, str(facts["gpu"] or "no GPU"), to / "gpu.png")


def _facts(files: Sequence[Path], all_facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all files; facts that may differ list every value."""
    facts: dict[str, Any] = {}
    for name in all_facts[0]:
        by_file = {file: own[name] for file, own in zip(files, all_facts, strict=True) if own[name]}
        values = [*dict.fromkeys(by_file.values())]
        if len(values) > 1 and name not in _OF_THE_RUN:
            first, other = (
                next(file for file in by_file if by_file[file] == value) for value in values[:2]
            )
            raise ValueError(f"{other}: expected {name} {values[0]} as in {first}, got {values[1]}")
        facts[name] = values[0] if len(values) == 1 else "; ".join(map(str, values)) or None
    return facts


def _named(command: str, rows: Sequence[Row]) -> list[Row]:
    """Put the environment before the names of `bench cpu`, which has one per file."""
    env = re.search(r"bench cpu .*--env (?:\S*[:/])?(\w+)", command)
    if env is None or ";" in command:  # several commands: the rows of an earlier report
        return list(rows)
    first = f"{env[1]}: "
    return [
        replace(
            row,
            name=first + row.name,
            limit=row.limit and first + row.limit,
            peer=row.peer and first + row.peer,
        )
        for row in rows
    ]


def _last(rows: Sequence[Row]) -> Row:
    """Return the last row with a figure."""
    return next((row for row in reversed(rows) if row.seconds), rows[-1])


def _wanted(rows: Sequence[Row], processes: Sequence[str]) -> list[str]:
    """Return a table of goals and measured figures."""
    known = {row.name: row for row in rows if row.available}
    lines = ["| figure | wanted | measured | |", "| --- | ---: | ---: | --- |"]
    for mark in _marks(processes):
        figure = mark.figure(known)
        if figure is not None:
            word = "yes" if figure >= mark.wanted else "no"
            lines.append(f"| {mark.text} | {mark.wanted:g} | {figure:.2f} | {word} |")
    return lines


def _spread(measured: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the spread of rows that were measured more than once."""
    lines = ["| case | slowest / fastest |", "| --- | ---: |"]
    for name, rows in measured.items():
        seconds = [row.seconds for row in rows if row.seconds]
        if len(seconds) > 1:
            lines.append(f"| {name} | {max(seconds) / min(seconds):.2f} |")
    return lines if len(lines) > 2 else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="gpu.md, gpu.json and a chart of measured figures")
    parser.add_argument("commit", help="measured commit")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--to", type=Path, metavar="FOLDER", default=RESULTS)
    args = parser.parse_args(arguments)
    report(args.commit, args.folders, args.to)


if __name__ == "__main__":
    main()
