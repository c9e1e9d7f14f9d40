"""Batches cut into their trajectories: padded rows, or flat with offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from tensordict import TensorDict, TensorDictBase

from pycollect._core import Leaf, SplitPlan
from pycollect.batch.extras_in_batches import with_extras, without_extras
from pycollect.batch.layout import Key, dotted, dtype_name
from pycollect.batch.slab_views import to_tensordict
from pycollect.batch.tensordicts import (
    NestedKey,
    allocate,
    any_of,
    as_int64,
    as_key,
    as_signal,
    flatten,
    is_plain,
    meta_keys,
    refuse,
    restore_nested,
    spare_memory,
)
from pycollect.trajectories.nested import nested, nested_layout
from pycollect.trajectories.on_cuda import on_one_device, split_on_device

_memory = spare_memory()


class FlatTrajectories(NamedTuple):
    """Trajectories one after the other; trajectory i is ``td[offsets[i]:offsets[i + 1]]``.

    Attributes:
        td: all frames, batch size [F], F the number of frames.
        offsets: int64 [N + 1], the first 0 and the last F: the form that
            ``torch.nested.nested_tensor_from_jagged`` takes.
        lengths: int64 [N].
    """

    td: TensorDict
    offsets: torch.Tensor
    lengths: torch.Tensor


@overload
def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = ...,
    trajectory_key: NestedKey | None = ...,
    done_key: NestedKey | None = ...,
    as_nested: bool | torch.layout = ...,
    format: Literal["padded"] = ...,
    padding_id: int = ...,
) -> TensorDict: ...
@overload
def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = ...,
    trajectory_key: NestedKey | None = ...,
    done_key: NestedKey | None = ...,
    as_nested: Literal[False] = ...,
    format: Literal["cat"],
    padding_id: int = ...,
) -> FlatTrajectories: ...
def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
    format: str = "padded",
    padding_id: int = -1,
) -> TensorDict | FlatTrajectories:
    """Cuts a batch of rollouts into its trajectories, one row each.

    A trajectory ends at a done, where the trajectory id changes, and at a row's end; ids are never
    compared across such an end, so repeated ones cannot merge. Uncollected cells (id -1 or mask
    False) are dropped; where one stands inside of a trajectory, the frames before and after it are
    two rows. Trajectories come in the batch's row-major order. Time and memory are linear in the
    frames written.

    Differs from TorchRL's function of this name: the result has two batch dimensions whatever the
    lengths; dones cut where there are ids too; trajectory ids are -1 in padding, not 0, unless
    `padding_id` says so; torch.jagged gives jagged tensors.

    Args:
        rollout_tensordict: batch size [T], [P, T], [B, P, T], ...: time is the last dimension.
            Leaves may lie anywhere in memory. Those in host memory go through the core, those of a
            CUDA device through one launch of its kernel. Those that need a gradient, and those of
            other devices, go through torch's own indexing (slower, differentiable).
        prefix: where ``"traj_ids"`` and ``"mask"`` are read and written. Default: "collector" if
            the batch has such an entry, else the root.
        trajectory_key: the trajectory ids, integers of the batch's shape; the mask lies beside
            them. With it, dones do not cut unless `done_key` is given too. If there is no such
            entry, it is written: the trajectories numbered from 0.
        done_key: the entry under "next" that ends a trajectory, default "done"; bool, of the
            batch's shape or with more dimensions, of which any flag ends it (one per agent, say).
        as_nested: True or torch.strided for nested tensors of that layout, torch.jagged for those.
            Nothing is padded.
        format: "padded" or "cat"; with `as_nested` it is left alone.
        padding_id: what the trajectory ids are in padding. With 0, which is the id of a trajectory
            too, ids can be counted by their maximum; where frames are is in the mask alone then.

    Returns:
        "padded": a new TensorDict [N, T_max], zeros behind each trajectory's end, with a bool mask
        [N, T_max] of the cells that hold a frame. "cat": :class:`FlatTrajectories`, without a mask.
        The input is not changed and shares no memory with the result. Entries that are no tensors
        (NonTensorData) are None in padding; one with ragged entries is a lazy stack over time.
        With `as_nested`: a TensorDict of nested tensors without a mask, batch size [N, -1] (or
        [N, T] where all lengths are T), [N] where they are jagged; ``to_padded_tensor`` makes the
        padded form of strided ones.

    Raises:
        ValueError: no batch dimension, an unknown format or layout, ids, done or mask of another
            dtype or shape, a `padding_id` that the ids' dtype cannot hold.
        KeyError: neither ids nor dones, or no entry of the given `done_key`.
        NotImplementedError: `as_nested=torch.jagged` with a version of torch that cannot make them.
        TypeError: no TensorDict; a tensor that is not a strided one; a `padding_id` that is no
            integer; with `as_nested`, entries that are no tensors, or ragged, and strided ones of a
            dtype that torch does not make such tensors of.
    """
    td = rollout_tensordict
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"rollout_tensordict: expected a TensorDict, got {type(td).__name__}")
    if isinstance(padding_id, bool) or not isinstance(padding_id, int):
        raise TypeError(f"padding_id: expected an integer, got {padding_id!r}")
    if format not in ("padded", "cat"):
        raise ValueError(f'format: expected "padded" or "cat", got {format!r}')
    layout = nested_layout(as_nested)
    if layout is not None:
        if format != "padded":
            raise ValueError(f"format: expected none beside as_nested, got {format!r}")
        _refuse_extras(td)
        format = "cat"
    result, plan = split_with_plan(
        td,
        format,
        prefix=prefix,
        trajectory_key=trajectory_key,
        done_key=done_key,
        padding_id=padding_id,
    )
    if format == "padded":
        return result
    offsets, lengths = torch.from_numpy(plan.offsets), torch.from_numpy(plan.lengths)
    if layout is not None:
        return nested(result, offsets, lengths, layout)
    return FlatTrajectories(result, offsets, lengths)


def _refuse_extras(td: TensorDictBase) -> None:
    extras = without_extras(td)[1].extras
    if extras:
        raise TypeError(
            f"{dotted(next(iter(extras)))}: expected a tensor of one shape, which a nested tensor "
            'can be made of; leave it out by td.exclude, or use format="cat"'
        )


def split_with_plan(
    td: TensorDictBase,
    format: str,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    signals: Mapping[Key, torch.Tensor] | None = None,
    padding_id: int = -1,
) -> tuple[TensorDict, SplitPlan]:
    """As :func:`split_trajectories`, with the plan: where in the batch each trajectory lay.

    Args:
        signals: copies of leaves in host memory, by key, so that flags and ids of a batch on a
            device need not be fetched.
        padding_id: what the ids are in padding.
    """
    if td.ndim < 1:
        raise ValueError("rollout_tensordict: expected at least one batch dimension, got none")
    td, parcel = without_extras(td)
    leaves, nested, others = flatten(td)
    refuse(others)
    ids_key, mask_key = meta_keys(td, prefix, trajectory_key)
    known = {**leaves, **(signals or {})}
    ids = known.get(ids_key)
    done = _done(known, done_key, needed=ids is None, wanted=trajectory_key is None)
    plan = SplitPlan(
        as_signal(None if done is None else any_of(done, td.ndim)),
        as_signal(as_int64(ids_key, ids)),
        as_signal(known.get(mask_key)),
        batch_dims=td.ndim,
    )
    leaves.pop(mask_key, None)
    form = _Padded(plan, td, padding_id) if format == "padded" else _Flat(plan, td)
    tensors = _gather(form, leaves)
    form.number(tensors, ids_key)
    if isinstance(form, _Padded):
        tensors[mask_key] = form.mask.to(tensors[ids_key].device)
    result: Any = to_tensordict(tensors, form.lead, td.device)
    restore_nested(result, nested, form.lead, td.ndim)
    if parcel:
        mask = form.mask if isinstance(form, _Padded) else None
        result = with_extras(result, parcel.moved(_cells(form), mask))
    return result, plan


class _Padded:
    """The form [N, T_max]."""

    def __init__(self, plan: SplitPlan, td: TensorDictBase, padding_id: int) -> None:
        self.plan = plan
        self.padding_id = padding_id
        self.batch_shape = td.shape
        self.lead = (plan.count, plan.longest)
        self.mask = torch.empty(self.lead, dtype=torch.bool, device="cpu")
        plan.mask(self.mask)

    def write(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.plan.padded(sources, targets)

    def select(self, leaf: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        frames = leaf[cells]
        return torch.where(self._mask_for(frames), frames, torch.zeros_like(frames))

    def number(self, tensors: dict[Key, torch.Tensor], key: Key) -> None:
        """Ids have a value of their own in padding; where there are none, they are numbered."""
        if key not in tensors:
            numbers = torch.arange(self.lead[0], device="cpu")
            tensors[key] = numbers.unsqueeze(1).expand(self.lead).clone()
        ids = tensors[key]
        if self.padding_id == -1 and not ids.dtype.is_signed:
            return  # stays 0
        limits = torch.iinfo(ids.dtype)
        if not limits.min <= self.padding_id <= limits.max:
            raise ValueError(
                f"padding_id: expected a value of {ids.dtype}, which {dotted(key)} has, "
                f"got {self.padding_id}"
            )
        if ids.device.type == "cpu":
            self.plan.pad(ids, self.padding_id)
        else:
            ids.masked_fill_(~self._mask_for(ids), self.padding_id)

    def _mask_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mask, with dimensions of extent 1 for those of a frame."""
        return self.mask.to(tensor.device).reshape(*self.lead, *[1] * (tensor.ndim - 2))


class _Flat:
    """The form [F]."""

    def __init__(self, plan: SplitPlan, td: TensorDictBase) -> None:
        self.plan = plan
        self.batch_shape = td.shape
        self.lead = (plan.frames,)

    def write(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.plan.flat(sources, targets)

    def select(self, leaf: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        return leaf[cells]

    def number(self, tensors: dict[Key, torch.Tensor], key: Key) -> None:
        """Where there are no ids, trajectories are numbered."""
        if key not in tensors:
            lengths = torch.from_numpy(self.plan.lengths)
            numbers = torch.arange(self.plan.count, device="cpu")
            tensors[key] = numbers.repeat_interleave(lengths)


def _gather(form: _Padded | _Flat, leaves: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Every leaf in its new form, in the order of `leaves`."""
    ndim = len(form.batch_shape)
    plain = {key: leaf.detach() for key, leaf in leaves.items() if is_plain(leaf)}
    result = allocate(
        _memory,
        form.lead,
        [Leaf(k, dtype_name(x.dtype), tuple(x.shape[ndim:])) for k, x in plain.items()],
    )
    form.write(list(plain.values()), list(result.values()))
    there = on_one_device({key: leaf for key, leaf in leaves.items() if key not in plain})
    if there:
        result |= split_on_device(form.plan, there, form.lead, ndim)
    if len(result) == len(leaves):
        return {key: result[key] for key in leaves}
    cells = _cells(form)
    for key, leaf in leaves.items():
        if key not in result:
            frames = leaf.flatten(0, ndim - 1)
            result[key] = form.select(frames, cells.to(leaf.device))
    return {key: result[key] for key in leaves}


def _cells(form: _Padded | _Flat) -> torch.Tensor:
    """The row-major places in the batch from which the frames come, 0 in padding."""
    cells = torch.empty(form.lead, dtype=torch.int64, device="cpu")
    every = torch.arange(form.batch_shape.numel(), device="cpu")
    form.write([every.reshape(form.batch_shape)], [cells])
    return cells


def _done(
    leaves: dict[Key, torch.Tensor], done_key: NestedKey | None, *, needed: bool, wanted: bool
) -> torch.Tensor | None:
    """The done flags under "next"; None where they do not cut."""
    key = as_key("done" if done_key is None else done_key)
    key = key if key[0] == "next" else ("next", *key)
    if done_key is None and not needed:
        return leaves.get(key) if wanted else None
    if key not in leaves:
        if done_key is not None:
            raise KeyError(f"done_key: expected {dotted(key)} in the batch, got none")
        raise KeyError("rollout_tensordict: expected next.done, or trajectory ids, got neither")
    return leaves[key]
