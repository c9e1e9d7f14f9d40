"""The kernel that moves trajectories, compared with torch's indexing, by width of frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pycollect import cuda
from pycollect._core import SplitPlan
from pycollect.batch.layout import Key
from pycollect.batch.tensordicts import as_signal
from pycollect.bench.clock import device_seconds, median_host_seconds, median_seconds
from pycollect.bench.copies import DEVICE_COPY, Sizes
from pycollect.bench.rows import Row, missing
from pycollect.trajectories.on_cuda import split_on_device

_EPISODES = (93, 107, 81, 119, 99, 101, 87, 113, 97, 103)
"""The lengths of the trajectories in a row of the batch, uneven: a trajectory and its place in the
padded target are seldom aligned alike."""
_ROW, _EPISODE = sum(_EPISODES), sum(_EPISODES) // len(_EPISODES)
_CALLS = 6  # few enough that none waits for the table of an earlier one
_MOST_FRAMES = 64_000_000  # 64 MB of flags: more than the L2 cache
_RUNS = (100, 1_000, 10_000, 100_000)


@dataclass(frozen=True)
class Width:
    """The frames of one leaf.

    Attributes:
        name: Description of the frames.
        dtype: of their items.
        items: in a frame.
    """

    name: str
    dtype: torch.dtype
    items: int

    @property
    def bytes(self) -> int:
        """Of a frame."""
        return self.items * self.dtype.itemsize


WIDTHS = (
    Width("pixels", torch.uint8, 4 * 84 * 84),
    Width("32 float32", torch.float32, 32),
    Width("17 float32", torch.float32, 17),
    Width("11 float32", torch.float32, 11),
    Width("int64", torch.int64, 1),
    Width("float32", torch.float32, 1),
    Width("flag", torch.bool, 1),
)


class Case:
    """A leaf with rows of 1000 frames; its trajectories of 81 to 119 frames get padded.

    Args:
        bytes: Approximate size of the leaf.
    """

    def __init__(self, width: Width, bytes: float, device: torch.device) -> None:
        frames = min(int(bytes) // width.bytes, _MOST_FRAMES)
        rows = max(frames // _ROW, 1)
        lengths = torch.tensor(_EPISODES).repeat(rows)
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.plan = SplitPlan(None, as_signal(ids.reshape(rows, _ROW)), None, batch_dims=2)
        shape = (rows, _ROW, width.items)
        self.leaf = torch.randint(0, 2, shape, dtype=torch.uint8, device=device).to(width.dtype)
        column = torch.arange(self.plan.longest)
        first = (lengths.cumsum(0) - lengths)[:, None]
        self.index = torch.where(column < lengths[:, None], first + column, 0).flatten().to(device)
        self.megabytes = (self.leaf.nbytes + len(self.index) * width.bytes) / 1e6  # read, written

    def by_the_core(self) -> object:
        """One launch, with the table that it needs."""
        leaves: dict[Key, torch.Tensor] = {("leaf",): self.leaf}
        return split_on_device(self.plan, leaves, (self.plan.count, self.plan.longest), 2)

    def by_torch(self) -> torch.Tensor:
        """Torch's indexing, its indices on the device already; padding is not even set to zero."""
        return self.leaf.flatten(0, 1).index_select(0, self.index)


def gather_rows(sizes: Sizes, device: torch.device, why_not: str) -> list[Row]:
    """Return device times of the kernel and of torch's indexing, and host times of calls."""
    reason = why_not or ("" if cuda.is_torchs() else cuda.why_not())
    rows: list[Row] = []
    for width in WIDTHS:
        rows += _width_rows(width, sizes, device, reason)
    return rows + [_host_row(runs, sizes, device, reason) for runs in _RUNS]


def _width_rows(width: Width, sizes: Sizes, device: torch.device, reason: str) -> list[Row]:
    name = f"gather, {width.name}"
    peer = f"{name}, torch's indexing"
    if reason:
        return [missing(own, reason) for own in (name, peer)]
    case = Case(width, sizes.gathered, device)
    call = median_seconds(case.by_the_core, sizes.seconds, device)
    note = (
        f"frames of {width.bytes} bytes, {case.plan.count} trajectories; device time, "
        f"{1e3 * call:.3g} ms with the host's"
    )
    return [
        _row(name, case, device_seconds(case.by_the_core, _CALLS), peer, note),
        _row(peer, case, device_seconds(case.by_torch, _CALLS), None, "device time"),
    ]


def _row(name: str, case: Case, seconds: float | None, peer: str | None, note: str) -> Row:
    if seconds is None:
        return missing(name, "the host was too slow to queue the calls")
    return Row(name, case.megabytes, seconds, limit=DEVICE_COPY, peer=peer, note=note)


def _host_row(runs: int, sizes: Sizes, device: torch.device, reason: str) -> Row:
    """Measure how long a call blocks the host if its stream has tens of milliseconds of work."""
    name = f"gather of {runs} trajectories, host's time on a busy stream"
    if reason:
        return missing(name, reason)
    case = Case(Width("flag", torch.bool, 1), runs * _EPISODE, device)
    before: Callable[[], object] = partial(torch.cuda._sleep, 100_000_000)  # some 50 ms
    seconds = median_host_seconds(case.by_the_core, sizes.seconds, device, before)
    return Row(name, seconds=seconds, note=f"{case.plan.count} trajectories")
