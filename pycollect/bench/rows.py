"""What was measured: rows of a table, JSON, ratios to the limits."""

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
        name: of the case.
        megabytes: moved or written in one round, 10^6 bytes.
        seconds: of one round: the median.
        available: False for what this machine cannot do; nothing was measured then.
        limit: the name of the row that says what is possible.
        ratio: this rate over the limit's.
        peer: the name of the row of the same work by TorchRL, or by torch alone.
        times: this rate over the peer's; where nothing is moved and no frame is counted, the peer's
            time over this one.
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
    """The rows to read in a terminal; what all are compared with is named."""
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
    """The rows as a table of markdown."""
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
    """Write the rows, what they depend on, and what was called."""
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
    """What `write_json` was given: the command, the facts, the rows.

    Raises:
        OSError, ValueError, KeyError: there is no such file, or it is not one of these.
    """
    written = json.loads(path.read_text())
    names = {field.name for field in fields(Row)}
    rows = [Row(**{k: v for k, v in row.items() if k in names}) for row in written["rows"]]
    return written["command"], written["machine"], rows
