"""What `bench gpu` measures: batches on their way to a GPU, beside plain copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
from pycollect.bench.gathers import gather_rows
from pycollect.bench.host_costs import host_cost_rows
from pycollect.bench.nature import WORKERS, nature_rows
from pycollect.bench.rows import Row, missing
from pycollect.bench.splits import split_rows
from pycollect.bench.wholes import collector_rows
from pycollect.devices import why_not

QUICK = (128, 20_000, 4e6, 0.1)
"""Frames of a batch, frames that are split, bytes that are gathered, seconds of each case."""
WHOLE = (1280, 1_000_000, 256e6, 1.0)


def measure(parts: Sequence[str], *, quick: bool) -> Iterator[list[Row]]:
    """The rows of those parts, one after the other; where there is no GPU, those that need one are
    marked. A part that fails is told, and the others follow.
    """
    sizes = Sizes(*(QUICK if quick else WHOLE))
    device = torch.device("cuda", 0)
    reason = why_not(device)
    material = Material(sizes.frames)
    measured: dict[str, Sequence[Callable[[], list[Row]]]] = {
        "host": [lambda: host_cost_rows(sizes, device, reason)],
        "steps": [
            lambda: host_rows(sizes, material),
            lambda: device_rows(sizes, material, device, reason),
        ],
        "splits": [lambda: split_rows(sizes, device, reason)],
        "gathers": [lambda: gather_rows(sizes, device, reason)],
        "collectors": [
            lambda: collector_rows(sizes, material.megabytes, device, reason, quick=quick)
        ],
        "nature": [
            partial(nature_rows, device, reason, quick=quick, workers=(count,)) for count in WORKERS
        ],
    }
    for part in parts:
        for rows in measured[part]:
            yield _rows_of(part, rows)


def _rows_of(part: str, measured: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measured()
    except Exception as error:  # whatever it is: hours of a machine may be at stake
        return [missing(f"{part}, which failed", f"{type(error).__name__}: {error}")]
