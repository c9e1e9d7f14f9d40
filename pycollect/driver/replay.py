"""Write rollouts and trajectories to a replay buffer, and count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from pycollect._core import Uninterrupted
from pycollect.data.frame import MASK
from pycollect.driver.accounts import Ledger
from pycollect.driver.delivery import Batch, rollouts_of
from pycollect.driver.options import StreamOptions
from pycollect.errors import warn_user


def pieces(
    td: TensorDictBase, batch: Batch, options: StreamOptions
) -> Iterator[tuple[Mapping[int, int], TensorDictBase]]:
    """Split a batch into the pieces to write; yield each piece with its frames by worker.

    A piece is one rollout, [T] or [*P, T]. A sync batch is written as a whole, flattened without a
    copy, if the buffer stores single items and so cannot distinguish the two.
    """
    if batch.joined == "stack" and td.get(MASK, None) is None and _takes_items(options, td):
        td.names = None
        yield batch.frames_of, td.flatten(0, 2 if batch.stacked else 1)
        return
    for worker, frames, rollout in _rollouts(td, batch):
        yield {worker: frames}, rollout


def _takes_items(options: StreamOptions, td: TensorDictBase) -> bool:
    buffer = options.replay_buffer
    transform = getattr(buffer, "transform", None)
    return (
        options.extend_buffer
        and options.postproc is None
        and getattr(buffer, "dim_extend", None) == 0
        and (transform is not None and len(transform) == 0)
        and getattr(buffer.storage, "max_size", 0) >= td.numel()
    )


def _rollouts(td: TensorDictBase, batch: Batch) -> Iterator[tuple[int, int, TensorDictBase]]:
    """Yield worker, number of frames, and frames of each rollout.

    Empty cells at the end of a rollout that stopped early are removed.
    """
    for worker, _, rollout in rollouts_of(td, batch):
        for part in rollout.unbind(0) if batch.stacked else (rollout,):
            part.names = None  # the buffer's items have no time dimension
            mask = part.get(MASK, None)
            if mask is None:
                yield worker, part.numel(), part
            elif frames := int(mask.sum()):
                yield worker, frames, _without_end(part, mask)


def extend(td: TensorDictBase, options: StreamOptions) -> None:
    """Write a rollout to the buffer, as it is or step by step.

    Step by step, an item is one step of all environments of the worker, [] or [*P]. Steps without a
    frame are left out.
    """
    put(td if options.extend_buffer else _steps(td, options.replay_buffer), options.replay_buffer)


def put(td: TensorDictBase, buffer: Any) -> None:
    """Extend the buffer by frames; set their device to that of the storage if they have none.

    If the storage names no device, for example "auto", the frames keep theirs.
    """
    device = getattr(getattr(buffer, "storage", None), "device", None)
    if isinstance(device, torch.device) and isinstance(td, TensorDictBase) and td.device is None:
        td = td.to(device)
    buffer.extend(td)


def written_before(options: StreamOptions) -> int:
    """Return the number of items already written to the buffer, 0 if unknown or not needed."""
    if not options.init_random_frames:
        return 0
    return int(getattr(options.replay_buffer, "write_count", 0))


def _without_end(rollout: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
    if mask[..., -1].any():
        return rollout
    return rollout[..., : int(_stepped(mask).nonzero()[-1]) + 1]


def _stepped(mask: torch.Tensor) -> torch.Tensor:
    """Return which steps have a frame of any environment, bool [T]."""
    return mask.reshape(-1, mask.shape[-1]).any(0)


def _steps(rollout: TensorDictBase, buffer: object) -> TensorDictBase:
    mask = rollout.get(MASK, None)
    if mask is not None:
        rollout = rollout[..., _stepped(mask)]
    if getattr(buffer, "dim_extend", 0) == rollout.ndim - 1:  # the buffer moves time to the front
        return rollout
    return rollout.permute(rollout.ndim - 1, *range(rollout.ndim - 1))


def warn_of_slices(options: StreamOptions, set_truncated: bool) -> None:
    """Warn if slices sampled by done flags would run from one worker's rollout to the next.

    In the buffer, rollouts of several workers follow each other, and few of them end with a done.
    """
    sampler = getattr(options.replay_buffer, "sampler", None)
    by_flags = not getattr(sampler, "_fetch_traj", True)  # a SliceSampler with an end_key
    if by_flags and not options.trajectories and not set_truncated:
        warn_user(
            "replay_buffer: its sampler finds trajectories by done flags, so it joins rollouts of "
            'different workers that end without one; use traj_key=("collector", "traj_ids"), '
            "replay_write_mode='trajectory' or set_truncated=True"
        )


def warn_of_training(options: StreamOptions) -> None:
    """Warn if `start` would run modules in the background that the learner may train.

    For example, a value estimator switches off the gradients of its network while it runs.
    """
    postproc = options.postproc
    inside = vars(postproc).values() if isinstance(postproc, nn.Module) else ()
    modules = [module for module in (postproc, *inside) if isinstance(module, nn.Module)]
    if any(weight.requires_grad for module in modules for weight in module.parameters()):
        warn_user(
            "start: postproc has parameters and runs in a background thread, while this thread may "
            "train them; give postproc copies of trained modules (copy.deepcopy)"
        )


class BufferWrite:
    """Counts the frames of one batch while its pieces are written to a replay buffer.

    At the end of the context, expected frames that were not written are counted as lost: an
    exception prevented it.

    Attributes:
        frames: Number of frames written to the buffer.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._expected: Counter[int] = Counter()
        self.frames = 0

    def expect(self, frames_of: Mapping[int, int]) -> None:
        """Announce frames of each worker that will be written.

        They count as delivered from now on. Otherwise a buffer that shuts the collector down or
        seeds it would count them as lost in flight.
        """
        with Uninterrupted():
            for worker, frames in frames_of.items():
                self._expected[worker] += frames
                self._ledger.deliver(worker, frames)

    def count(self, frames_of: Mapping[int, int]) -> None:
        """Record that frames of each worker were written."""
        with Uninterrupted():
            for worker, frames in frames_of.items():
                self._expected[worker] -= frames
                self.frames += frames

    def __enter__(self) -> BufferWrite:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker, frames in self._expected.items():
            self._ledger.deliver(worker, -frames)
            self._ledger.lose(worker, frames, "replay_buffer")
