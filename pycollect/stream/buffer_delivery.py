"""What a replay buffer gets of a batch: the rollouts in it, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect.batch.frame import MASK
from pycollect.stream.delivery import rollouts_of
from pycollect.stream.options import StreamOptions
from pycollect.stream.source import Batch


def pieces(
    td: TensorDictBase, batch: Batch, options: StreamOptions
) -> Iterator[tuple[Mapping[int, int], TensorDictBase]]:
    """What a batch is given to the buffer in: frames of each worker, and these.

    That is each rollout, [T] or [*P, T]; or all of a sync batch one after the other, without a
    copy, where the buffer takes items only and could not tell.
    """
    if batch.how == "stack" and td.get(MASK, None) is None and _takes_items(options, td):
        td.names = None
        yield batch.frames_of, td.flatten(0, 2 if batch.beside else 1)
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
    """Worker, number of frames, and these, of each rollout.

    Empty cells behind the last step of one that ended before the others are left out.
    """
    for worker, _, rollout in rollouts_of(td, batch):
        for own in rollout.unbind(0) if batch.beside else (rollout,):
            own.names = None  # of a buffer's items, none is the time
            mask = own.get(MASK, None)
            if mask is None:
                yield worker, own.numel(), own
            elif frames := int(mask.sum()):
                yield worker, frames, _without_end(own, mask)


def extend(td: TensorDictBase, options: StreamOptions) -> None:
    """Give a rollout to the buffer: as it is, or step by step.

    Step by step, an item is what all environments of the worker did in one step: [] or [*P]. Steps
    in which none of them did anything are left out.
    """
    put(td if options.extend_buffer else _steps(td, options.replay_buffer), options.replay_buffer)


def put(td: TensorDictBase, buffer: Any) -> None:
    """Extend the buffer by frames, which say the device that its storage names, if they say none.

    Where the storage does not name one ("auto", say), they say what they said.
    """
    device = getattr(getattr(buffer, "storage", None), "device", None)
    if isinstance(device, torch.device) and isinstance(td, TensorDictBase) and td.device is None:
        td = td.to(device)
    buffer.extend(td)


def written_before(options: StreamOptions) -> int:
    """How many items were written into the buffer already, as far as that matters and it tells."""
    if not options.init_random_frames:
        return 0
    return int(getattr(options.replay_buffer, "write_count", 0))


def _without_end(rollout: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
    if mask[..., -1].any():
        return rollout
    return rollout[..., : int(_stepped(mask).nonzero()[-1]) + 1]


def _stepped(mask: torch.Tensor) -> torch.Tensor:
    """Of which steps there is a frame of any environment, bool [T]."""
    return mask.reshape(-1, mask.shape[-1]).any(0)


def _steps(rollout: TensorDictBase, buffer: object) -> TensorDictBase:
    mask = rollout.get(MASK, None)
    if mask is not None:
        rollout = rollout[..., _stepped(mask)]
    if getattr(buffer, "dim_extend", 0) == rollout.ndim - 1:  # it puts that dimension first itself
        return rollout
    return rollout.permute(rollout.ndim - 1, *range(rollout.ndim - 1))
