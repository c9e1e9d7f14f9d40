"""What `bench gpu` measures: batches on their way to a GPU, and collectors with a policy there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
from pycollect.bench.gathers import gather_rows
from pycollect.bench.host_costs import host_cost_rows
from pycollect.bench.rows import Row, missing
from pycollect.bench.sides import LOOP, PEERS, POLICY, SIDES, side_rows
from pycollect.bench.splits import split_rows
from pycollect.devices import named_device, why_not

SECONDS = 1.0  # of each case
QUICK_SECONDS = 0.1
QUICK_SIDES = ("central", "a policy each", LOOP, POLICY, PEERS[0])


def measure(
    parts: Sequence[str],
    device: str,
    processes: Sequence[int],
    sides: Sequence[str] = (),
    *,
    quick: bool,
) -> Iterator[list[Row]]:
    """The rows of those parts, one after the other; where there is no such device, those that need
    one are marked. A part that fails is named, and the others follow.

    Args:
        parts: by their names in `cli`.
        device: "cuda:0", ...; with "cpu" the collectors run, and nothing else that needs one.
        processes: of collectors.
        sides: of collectors, see `sides.SIDES`; those of `QUICK_SIDES` or all where none is named.
        quick: a tenth of the time for each case.

    Raises:
        ValueError: no device or side is called so, or there are to be no processes.
    """
    place = named_device("--device", device)
    if min(processes) < 1:
        raise ValueError(f"--workers: expected numbers of at least 1, got {min(processes)}")
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--sides: expected some of {', '.join(SIDES)}; got {side!r}")
    sides = sides or (QUICK_SIDES if quick else tuple(SIDES))
    # More than caches hold: a batch of 260 MB; 128 MB that are split, 256 MB that are gathered.
    sizes = Sizes(4608, 1_000_000, 256e6, QUICK_SECONDS if quick else SECONDS)
    lacking = "the device is the CPU" if place.type == "cpu" else why_not(place)
    for part in parts:
        for rows in _cases(part, sizes, place, lacking, processes, sides):
            yield _rows_of(part, rows)


def _cases(
    part: str,
    sizes: Sizes,
    device: torch.device,
    lacking: str,
    processes: Sequence[int],
    sides: Sequence[str],
) -> list[Callable[[], list[Row]]]:
    """What gives rows, each to be told when it is there."""
    if part == "collectors" and lacking and device.type != "cpu":
        return [lambda: [missing("collectors", lacking)]]
    if part == "collectors":
        seconds = 2.5 * sizes.seconds
        return [
            partial(side_rows, side, count, seconds, device)
            for count in processes
            for side in sides
        ]
    if part == "steps":
        material = Material(sizes.frames)
        return [
            lambda: host_rows(sizes, material),
            lambda: device_rows(sizes, material, device, lacking),
        ]
    one = {"host": host_cost_rows, "splits": split_rows, "gathers": gather_rows}[part]
    return [partial(one, sizes, device, lacking)]


def _rows_of(part: str, measured: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measured()
    except Exception as error:  # whatever it is: hours of a machine may be at stake
        return [missing(f"{part}, which failed", f"{type(error).__name__}: {error}")]
