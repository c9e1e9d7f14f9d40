"""How a collected batch becomes the TensorDict for the caller, or goes to a replay buffer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from pycollect._core import Slab, Uninterrupted
from pycollect.data import gather_cuda as on_cuda
from pycollect.data.devices import CPU
from pycollect.data.extras import Extras, with_extras
from pycollect.data.frame import MASK, TRAJ_IDS, BatchLeaves
from pycollect.data.layout import Key, torch_dtype
from pycollect.data.multistep import MultiStep
from pycollect.data.objects import cells_of
from pycollect.data.slabs import slab_tensors, to_tensordict
from pycollect.data.split import split_with_plan
from pycollect.data.upload import Uploads
from pycollect.driver.accounts import Ledger, Statistics
from pycollect.driver.options import StreamOptions
from pycollect.errors import warn_user
from pycollect.worker.report import Episode
from pycollect.worker.worker import Worker


@dataclass(frozen=True)
class Batch:
    """A batch of rollouts before delivery.

    Attributes:
        slab: Memory of the tensors.
        tensors: Tensors in the slab, by key.
        shape: Batch dimensions, time last.
        leaves: Entries of a frame.
        frames_of: Number of collected frames of each worker, in the order of their rows.
            Uncollected cells are not counted.
        versions: Oldest policy version that acted in the rollout of each worker.
        episodes: Episodes that ended in this batch.
        extras: Extras in the shape of the batch, or ``None``.
        device: Device to deliver the batch to.
        reported_device: Value of ``td.device``; ``None`` if no device was requested.
        on_device: Tensors on the environments' device, outside the slab, by key.
        joined: How rollouts are joined: "stack", 0 or -1; ``None`` for a single rollout.
        parts: If rollouts are concatenated, the size of each rollout along that dimension.
        sources: For workers with several processes, the processes that follow each other along time
            in the worker's rollout, by worker.
        stacked: Whether the first dimension of each worker's rollout is its processes.
    """

    slab: Slab
    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    leaves: BatchLeaves
    frames_of: Mapping[int, int] = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()
    extras: Extras | None = None
    device: torch.device = CPU
    reported_device: torch.device | None = None
    on_device: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    joined: str | int | None = None
    parts: Sequence[int] = ()
    sources: Mapping[int, Sequence[int]] = field(default_factory=dict)
    stacked: bool = False


def blank_batch(
    worker: Worker, slab: Slab, device: torch.device, reported_device: torch.device | None
) -> Batch:
    """Return a batch of zeros in this slab, with the entries of this worker's batches.

    Extras are absent. With `set_truncated`, the end flags of the last frames are set.
    """
    shape = worker.batch_shape
    tensors = slab_tensors(slab, shape, worker.slab_leaves.keys)
    for tensor in tensors.values():
        tensor.zero_()
    kept = worker.slab_leaves.keys
    on_device = {
        leaf.key: torch.zeros([*shape, *leaf.shape], dtype=torch_dtype(leaf.dtype), device="cpu")
        for leaf in worker.leaves.all
        if leaf.key not in kept and leaf.key in worker.leaves.keys
    }
    if worker.options.set_truncated:
        entries = {**tensors, **on_device}
        for key, tensor in entries.items():
            has_end = key[0] == "next" and (*key[:-1], "truncated") in entries
            if has_end and key[-1] in ("done", "truncated"):
                tensor.select(len(shape) - 1, -1).fill_(True)
    extras = {
        extra.key: cells_of([extra.absent() for _ in range(prod(shape))], shape)
        for extra in worker.leaves.extras
    }
    return Batch(
        slab,
        tensors,
        shape,
        worker.leaves,
        extras=extras or None,
        device=device,
        reported_device=reported_device,
        on_device=on_device,
    )


def assemble(batch: Batch, options: StreamOptions, uploads: Uploads | None) -> TensorDictBase:
    """Return the batch as a TensorDict with cast observations; on the host without `uploads`."""
    cast = partial(options.cast.apply, leaves=batch.leaves) if options.cast else None
    tensors, device = batch.tensors, batch.reported_device
    if batch.device.type == "cpu" or uploads is None:
        tensors = tensors if cast is None else cast(tensors)
        device = device if batch.device.type == "cpu" else None
    elif tensors:
        uploader = uploads.to(batch.device)
        tensors = uploader.upload(batch.slab, tensors, cast)
        device = uploader.device
    if batch.on_device:
        target = batch.device if uploads is not None else CPU
        moved = {key: tensor.to(target) for key, tensor in batch.on_device.items()}
        tensors = {**tensors, **(moved if cast is None else cast(moved))}
        tensors = {key: tensors[key] for key in batch.leaves.keys if key in tensors}
    td: TensorDictBase = to_tensordict(tensors, batch.shape, device, batch.leaves.shapes)
    if extras_batch := batch.leaves.extras_batch(batch.extras):
        td = with_extras(td, extras_batch)  # moves extras that are tensors to the device
    return td if device is None or batch.reported_device is not None else td.clear_device_()


def prepare(options: StreamOptions, uploads: Uploads) -> None:
    """Load the device code that `finish` needs, before the first batch."""
    if options.split_trajs or isinstance(options.postproc, MultiStep):
        for device in uploads.devices:
            on_cuda.prepare(device)


def rollouts_of(td: TensorDictBase, batch: Batch) -> Iterator[tuple[int, int, TensorDictBase]]:
    """Yield worker, index of its process, and frames, [T] or [*P, T], of each rollout."""
    workers, joined = list(batch.frames_of), batch.joined
    if joined is None:
        parts: Iterable[TensorDictBase] = [td]
    elif joined == "stack":
        parts = td.unbind(0)
    else:
        parts = td.split(list(batch.parts), td.ndim - 1 if joined == -1 else 0)
    for worker, part in zip(workers, parts, strict=True):
        sources = batch.sources.get(worker, (0,))
        if len(sources) == 1:
            yield worker, sources[0], part
            continue
        steps = part.shape[-1] // len(sources)
        for source, rollout in zip(sources, part.split(steps, part.ndim - 1), strict=True):
            yield worker, source, rollout


def finish(
    td: TensorDictBase, options: StreamOptions, host: Mapping[Key, torch.Tensor]
) -> TensorDictBase:
    """Return the batch for the caller: split, without ids if not requested, post-processed.

    Args:
        host: Entries of the batch that are also in host memory, by key, to find trajectories.
    """
    if options.split_trajs and not options.trajectories:
        td, _ = split_with_plan(td, "padded", signals=host)
    if options.drop_uncollected:
        td = _collected(td, host)
    if not options.track_traj_ids:
        td = _without(td, TRAJ_IDS)
    if options.postproc is not None:
        td = options.postproc(td)
        if td is None:
            raise TypeError(
                "postproc: expected a function that returns the batch, got one that returned None"
            )
    return td


def _collected(td: TensorDictBase, host: Mapping[Key, torch.Tensor]) -> TensorDictBase:
    """Return only the collected frames, [N], one environment after the other."""
    flat = td.flatten(0, td.ndim - 1) if td.ndim > 1 else td
    mask = td.get(MASK, None)
    if mask is None:
        return flat
    host_mask = host.get(MASK, mask)
    if host_mask.numel() != mask.numel():  # `td` is a part of the batch
        host_mask = mask
    rows = host_mask.flatten().nonzero().squeeze(-1)
    return _without(flat, MASK)[rows.to(mask.device)]


def _without(td: TensorDictBase, key: Key) -> TensorDictBase:
    td = td.exclude(key)
    if td.get("collector").is_empty():
        td = td.exclude("collector")
    return td


# Replay buffers


def pieces(
    td: TensorDictBase, batch: Batch, options: StreamOptions
) -> Iterator[tuple[Mapping[int, int], TensorDictBase]]:
    """Split a batch into the pieces to write; yield each piece with its frames by worker.

    A piece is one rollout, [T] or [*P, T]. Empty cells at its end are left out only if the buffer
    extends along time; otherwise an item is a row, and all rows have the same length. A sync batch
    is written as a whole, flattened without a copy, if the buffer stores single items and so cannot
    distinguish the two.
    """
    if batch.joined == "stack" and td.get(MASK, None) is None and _takes_items(options, td):
        td.names = None
        yield batch.frames_of, td.flatten(0, 2 if batch.stacked else 1)
        return
    for worker, _, rollout in rollouts_of(td, batch):
        for part in rollout.unbind(0) if batch.stacked else (rollout,):
            part.names = None  # the buffer's items have no time dimension
            mask = part.get(MASK, None)
            if mask is None:
                yield {worker: part.numel()}, part
            elif frames := int(mask.sum()):
                extends_time = getattr(options.replay_buffer, "dim_extend", 0) == part.ndim - 1
                yield {worker: frames}, _without_end(part, mask) if extends_time else part


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


def warn_of_joins(options: StreamOptions, set_truncated: bool, workers: int) -> None:
    """Warn if the buffer would take rollouts of several workers for one.

    In the buffer, rollouts of several workers follow each other, and few of them end with a done.
    """
    if options.trajectories or set_truncated:
        return
    sampler = getattr(options.replay_buffer, "sampler", None)
    by_flags = not getattr(sampler, "_fetch_traj", True)  # a SliceSampler with an end_key
    if by_flags:
        warn_user(
            "replay_buffer: its sampler finds trajectories by done flags, so it joins rollouts of "
            'different workers that end without one; use traj_key=("collector", "traj_ids"), '
            "replay_write_mode='trajectory' or set_truncated=True"
        )
    if workers > 1 and _sums_as_written(options.replay_buffer):
        warn_user(
            "replay_buffer: its MultiStepTransform sums rewards of frames in the order in which "
            "they are written, so it joins rollouts of different workers that end without a done; "
            "use postproc=MultiStep(), replay_write_mode='trajectory' or set_truncated=True"
        )


def warn_of_sums(options: StreamOptions, envs: int) -> None:
    """Warn if the buffer would sum rewards of different environments of a step."""
    buffer = options.replay_buffer
    is_flat = not options.extend_buffer and getattr(buffer, "dim_extend", None) == 0
    if envs > 1 and is_flat and _sums_as_written(buffer):
        warn_user(
            "replay_buffer: its MultiStepTransform takes the environments of a step for steps in "
            "time; use a storage with ndim=2, or postproc=MultiStep()"
        )


def _sums_as_written(buffer: Any) -> bool:
    """Return whether the buffer has TorchRL's MultiStepTransform, which keeps the last frames."""
    transform = getattr(buffer, "transform", None)
    module = sys.modules.get("torchrl.envs.transforms.rb_transforms")
    kind = getattr(module, "MultiStepTransform", ())
    return isinstance(transform, nn.Module) and any(
        isinstance(own, kind) for own in transform.modules()
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
    """

    def __init__(self, ledger: Ledger, statistics: Statistics) -> None:
        self._ledger, self._statistics = ledger, statistics
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
                self._statistics.frames += frames
                self._statistics.progress["replay_written_frames"] += frames

    def withdraw(self, frames_of: Mapping[int, int]) -> None:
        """No longer expect frames of each worker; the caller counts them as lost."""
        for worker, frames in frames_of.items():
            self._expected[worker] -= frames
            self._ledger.deliver(worker, -frames)

    def __enter__(self) -> BufferWrite:
        return self

    def __exit__(self, *exception: object) -> None:
        with Uninterrupted():
            for worker, frames in self._expected.items():
                self._ledger.deliver(worker, -frames)
                self._ledger.lose(worker, frames, "replay_buffer")
