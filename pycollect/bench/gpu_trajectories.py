"""Trajectories on a device: splitting, also by TorchRL; the kernel and torch's indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
from tensordict import TensorDict

from pycollect import cuda
from pycollect._core import SplitPlan
from pycollect.bench.clock import device_seconds, median_host_seconds, median_seconds, seconds_of
from pycollect.bench.copies import DEVICE_COPY, Sizes
from pycollect.bench.report import Row, missing
from pycollect.bench.sides import lacks
from pycollect.data import gather_cuda as on_cuda
from pycollect.data.devices import CPU
from pycollect.data.gather_cuda import split_on_device
from pycollect.data.layout import Key
from pycollect.data.multistep import MultiStep
from pycollect.data.slabs import to_tensordict
from pycollect.data.split import split_trajectories
from pycollect.data.tensordicts import as_signal

FRAME_BYTES = 128
_SPLIT, _KERNEL, _TORCHRL = "split", "split, the launch alone", "split, TorchRL"
_EPISODES = (93, 107, 81, 119, 99, 101, 87, 113, 97, 103)
"""Uneven lengths of trajectories: one and its place in the padded target are seldom aligned."""
_ROW, _EPISODE = sum(_EPISODES), sum(_EPISODES) // len(_EPISODES)
"""Frames in a row of the batch, and in a trajectory: 1000, 100."""
_CALLS = 6  # few enough that none waits for the table of an earlier one
_MOST_FRAMES = 64_000_000  # 64 MB of flags: more than the L2 cache
_RUNS = (100, 1_000, 10_000, 100_000)
_TOO_SLOW = "the host was too slow to queue the calls"


class Form(NamedTuple):
    """A collector's batch [rows, steps] with 12 leaves and trajectory ids.

    A frame is an image of uint8, or one-dimensional and float32. `action` is the number of
    components.
    """

    name: str
    shape: tuple[int, int]
    frame: tuple[int, ...]
    action: int
    steps: int


FORMS = (
    Form("CartPole", (64, 1000), (4,), 2, 100),
    Form("MuJoCo", (16, 2000), (17,), 6, 500),
    Form("pixels", (14, 128), (4, 84, 84), 1, 64),
    Form("32 float32", (1000, 1000), (32,), 4, 100),
)


def split_rows(sizes: Sizes, device: torch.device, why_not: str) -> list[Row]:
    """Measure splits of frames of 128 bytes, each read and written once, in trajectories of 100."""
    rows = [_whole("split, CPU", sizes, CPU, None)]
    if why_not:
        return rows + [missing(name, why_not) for name in (_SPLIT, _KERNEL, _TORCHRL)]
    return [
        *rows,
        _whole(_SPLIT, sizes, device, DEVICE_COPY),
        _launch(sizes, device),
        _torchrls(sizes, device),
        *chain.from_iterable(_calls(form, sizes, device) for form in FORMS),
    ]


def _whole(name: str, sizes: Sizes, device: torch.device, limit: str | None) -> Row:
    """Measure a whole call: copy flags to the host, make the plan, and move frames."""
    td = _batch(sizes.split_frames, device)
    seconds = median_seconds(lambda: split_trajectories(td), sizes.seconds, device)
    peer = None if limit is None else _TORCHRL
    return Row(name, _megabytes(td), seconds, limit=limit, peer=peer, frames=td.numel())


def _launch(sizes: Sizes, device: torch.device) -> Row:
    """Measure the launch with a finished plan, in device time."""
    if not cuda.is_torchs():
        return missing(_KERNEL, cuda.why_not())
    td = _batch(sizes.split_frames, device)
    plan = SplitPlan(None, as_signal(td["collector", "traj_ids"]), None, batch_dims=td.ndim)
    leaves: dict[Key, torch.Tensor] = {("observation",): td["observation"]}
    lead = (plan.count, plan.longest)
    seconds = device_seconds(lambda: split_on_device(plan, leaves, lead, td.ndim), _CALLS)
    if seconds is None:
        return missing(_KERNEL, _TOO_SLOW)
    return Row(
        _KERNEL,
        _megabytes(td),
        seconds,
        limit=DEVICE_COPY,
        peer=_TORCHRL,
        frames=td.numel(),
        note="device time",
    )


def _torchrls(sizes: Sizes, device: torch.device) -> Row:
    """Measure one call of TorchRL's function, whose time grows with the number of trajectories."""
    if reason := lacks("torchrl"):
        return missing(_TORCHRL, reason)
    from torchrl.collectors.utils import split_trajectories as split

    theirs: Any = split
    theirs(_batch(_ROW, device))  # the first call loads modules
    td = _batch(sizes.split_frames, device)
    seconds = seconds_of(lambda: theirs(td), device)
    return Row(
        _TORCHRL, _megabytes(td), seconds, limit=DEVICE_COPY, frames=td.numel(), note="one call"
    )


def _calls(form: Form, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Measure whole calls, with the kernel and with torch's indexing of each leaf."""
    td = _delivered(form, device)
    multi_step = MultiStep(0.99, 3)
    works: dict[str, Callable[[], object]] = {
        "split": lambda: split_trajectories(td),
        "MultiStep": lambda: multi_step(td),
    }
    for what, work in works.items():
        name = f"{what}, {form.name} {list(form.shape)}"
        peer = f"{name}, torch's indexing"
        seconds = median_seconds(work, sizes.seconds, device)
        yield Row(name, seconds=seconds, peer=peer, frames=td.numel(), note="one launch")
        with mock.patch.object(on_cuda, "_gather", return_value=None):
            seconds = median_seconds(work, sizes.seconds, device)
        yield Row(peer, seconds=seconds, frames=td.numel(), note="index_select of each leaf")


_FLAGS = ("done", "terminated", "truncated")
_LEAVES: tuple[Key, ...] = (
    *((name,) for name in ("observation", "action", "sample_log_prob", "state_value", *_FLAGS)),
    *(("next", name) for name in ("observation", "reward", *_FLAGS)),
    ("collector", "traj_ids"),
)


def _delivered(form: Form, device: torch.device) -> TensorDict:
    rows, steps = form.shape
    widths = {"observation": form.frame, "action": (form.action,)}
    tensors: dict[Key, torch.Tensor] = {}
    for key in _LEAVES:
        shape = (rows, steps, *widths.get(key[-1], (1,)))
        if key[-1] in _FLAGS:
            tensors[key] = torch.zeros(shape, dtype=torch.bool, device=device)
        elif len(shape) > 3:
            tensors[key] = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        else:
            tensors[key] = torch.rand(shape, device=device)
    ends = slice(form.steps - 1, None, form.steps)
    tensors["next", "done"][:, ends] = True
    ids = torch.arange(rows * steps, device=device) // form.steps
    tensors["collector", "traj_ids"] = ids.reshape(rows, steps)
    return to_tensordict(tensors, form.shape)


def _megabytes(td: TensorDict) -> float:
    """Return the 10^6 bytes that are read and written."""
    frames: int = td.numel()
    return 2 * FRAME_BYTES * frames / 1e6


def _batch(frames: int, device: torch.device) -> TensorDict:
    shape = [frames // _ROW, _ROW]
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    done[:, _EPISODE - 1 :: _EPISODE] = True
    ids = torch.arange(done.numel() // _EPISODE).repeat_interleave(_EPISODE).reshape(shape)
    tensors = {
        ("observation",): torch.rand(*shape, FRAME_BYTES // 4, device=device),
        ("next", "done"): done.to(device),
        ("collector", "traj_ids"): ids.to(device),
    }
    return to_tensordict(tensors, shape)


class Width(NamedTuple):
    """The frames of one leaf."""

    name: str
    dtype: torch.dtype
    items: int

    @property
    def bytes(self) -> int:
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
    """A leaf with rows of 1000 frames; its trajectories of 81 to 119 frames get padded."""

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
        """Gather by one launch, including its table."""
        leaves: dict[Key, torch.Tensor] = {("leaf",): self.leaf}
        return split_on_device(self.plan, leaves, (self.plan.count, self.plan.longest), 2)

    def by_torch(self) -> torch.Tensor:
        """Gather by torch with indices that are on the device already, without zeroing padding."""
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
        return missing(name, _TOO_SLOW)
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
