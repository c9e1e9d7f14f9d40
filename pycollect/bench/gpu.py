"""The measurements of `bench gpu`: transfers to a GPU, and collectors with a policy on it."""

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
    """Yield the rows of each part as soon as they are measured.

    Rows that need a missing device are marked as not available. A part that fails is reported as a
    row; the next parts are still measured.

    Args:
        parts: Names of the parts, see `cli`.
        device: "cuda:0", ...; on "cpu" only collectors and the host's own rows are measured.
        processes: Numbers of processes of the collectors.
        sides: Keys of `sides.SIDES` (default: all, or `QUICK_SIDES` if `quick`).
        quick: Measure each case for a tenth of the time.

    Raises:
        ValueError: The device or a side does not exist, or a number of processes is below 1.
    """
    place = named_device("--device", device)
    if min(processes) < 1:
        raise ValueError(f"--workers: expected numbers of at least 1, got {min(processes)}")
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--sides: expected names from {', '.join(SIDES)}; got {side!r}")
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
    """Return the functions that measure a part; each result is shown at once."""
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
    if part == "simulator":
        from pycollect.bench.simulator import SIZES as ENVS
        from pycollect.bench.simulator import simulator_rows

        here = "" if device.type == "cpu" else lacking
        return [partial(simulator_rows, envs, sizes.seconds, device, here) for envs in ENVS]
    one = {"host": host_cost_rows, "splits": split_rows, "gathers": gather_rows}[part]
    return [partial(one, sizes, device, lacking)]


def _rows_of(part: str, measured: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measured()
    except Exception as error:  # the time on such a machine is short
        return [missing(f"{part}, which failed", f"{type(error).__name__}: {error}")]
