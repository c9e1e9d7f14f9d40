"""Results of measurements: rows of a table, JSON, ratios to limits and peers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: Name of the case.
        megabytes: 10^6 bytes moved or written in one round.
        seconds: Median duration of one round.
        available: False if this machine cannot run the case; nothing was measured then.
        limit: Name of the row with the best possible rate.
        ratio: This rate divided by the limit's.
        peer: Name of the row in which TorchRL or plain torch does the same work.
        times: This rate divided by the peer's. Without bytes and frames, the peer's time divided by
            this row's.
        hidden: Share of the copies' time that overlapped with a learner's work.
        frames: Number of frames in one round.
        note: Why figures are missing, or a remark on them.
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
