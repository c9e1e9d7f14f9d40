"""Split batches into trajectories: padded rows, nested tensors, or flat with offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from tensordict import TensorDict, TensorDictBase

from pycollect._core import Leaf, SplitPlan
from pycollect.data.extras import with_extras, without_extras
from pycollect.data.gather_cuda import on_one_device, split_on_device
from pycollect.data.layout import Key, as_key, dotted, dtype_name
from pycollect.data.slabs import to_tensordict
from pycollect.data.tensordicts import (
    NestedKey,
    allocate,
    any_of,
    as_int64,
    as_signal,
    flatten,
    is_plain,
    meta_keys,
    restore_nested,
    rows_like,
    spare_memory,
)


def nested_layout(as_nested: bool | torch.layout) -> torch.layout | None:
    """Return the requested layout of nested tensors, or ``None`` for no nested tensors."""
    if isinstance(as_nested, bool):
        return torch.strided if as_nested else None
    if as_nested not in (torch.strided, torch.jagged):
        raise ValueError(
            "as_nested: expected True, False, torch.strided or torch.jagged, got "
            f'{as_nested!r}; for separate offsets and lengths, use format="cat"'
        )
    if as_nested == torch.jagged and not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise NotImplementedError(
            f"as_nested: torch {torch.__version__} does not support torch.jagged; use a newer "
            'version, torch.strided or format="cat"'
        )
    return as_nested


def nested(
    flat: TensorDict, offsets: torch.Tensor, lengths: torch.Tensor, layout: torch.layout
) -> TensorDict:
    """Return the entries of `flat` [F] as nested tensors of N rows; jagged ones are views.

    Args:
        offsets: Start of each row in F, and the end of the last, int64 [N + 1].
        lengths: Lengths of the rows, int64 [N].
        layout: torch.strided or torch.jagged.

    Returns:
        Batch size [N, -1] for strided tensors, or [N, T] if all rows have length T. Batch size [N]
        for jagged ones, because a batch size cannot hold their symbolic length.

    Raises:
        ValueError: There are no rows, which strided nested tensors do not support.
        TypeError: Strided nested tensors do not support a dtype.
    """
    sizes = lengths.tolist()
    longest, shortest = max(sizes, default=0), min(sizes, default=0)
    # Leaves of a device share one tensor of offsets, by which torch recognizes equal lengths.
    by_device: dict[torch.device, torch.Tensor] = {}

    def jagged(leaf: torch.Tensor) -> torch.Tensor:
        device_offsets = by_device.setdefault(leaf.device, offsets.to(leaf.device))
        return torch.nested.nested_tensor_from_jagged(
            leaf, device_offsets, min_seqlen=shortest, max_seqlen=longest
        )

    def strided(leaf: torch.Tensor) -> torch.Tensor:
        try:
            return torch.nested.as_nested_tensor(list(torch.split(leaf, sizes)))
        except NotImplementedError as error:
            raise TypeError(
                f"as_nested: torch has no strided nested tensors of {leaf.dtype}; use torch.jagged"
            ) from error

    result: TensorDict
    if layout == torch.jagged:
        result = flat.apply(jagged, batch_size=[len(sizes)])
        return result
    if not sizes:
        raise ValueError(
            "as_nested: expected at least one trajectory, got none; use torch.jagged, which "
            "supports an empty result"
        )
    length = longest if longest == shortest else -1
    result = flat.apply(strided, batch_size=[len(sizes), length])
    return result


_memory = spare_memory()


class FlatTrajectories(NamedTuple):
    """Concatenated trajectories; trajectory i is ``td[offsets[i]:offsets[i + 1]]``.

    Attributes:
        td: All F frames, batch size [F].
        offsets: int64 [N + 1], from 0 to F, in the form that
            ``torch.nested.nested_tensor_from_jagged`` expects.
        lengths: Lengths of the trajectories, int64 [N].
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
    """Split a batch of rollouts into its trajectories, one per row.

    A trajectory ends at a done flag, at a change of the trajectory id and at the end of a row. Ids
    are never compared across rows, so repeated ids do not merge trajectories. Uncollected cells (id
    -1 or mask ``False``) are dropped; one inside a trajectory splits it into two rows. Trajectories
    keep the batch's row-major order. Time and memory are linear in the number of frames written.

    Differences from TorchRL's split_trajectories:

    - The result always has two batch dimensions.
    - Done flags also split trajectories if there are ids.
    - Padding has trajectory id -1, not 0; see `padding_id`.
    - torch.jagged gives jagged tensors.

    Args:
        rollout_tensordict: Batch of size [T], [P, T], [B, P, T] and so on. Time is the last
            dimension. Tensors may have any memory layout. Tensors in host memory are processed by
            the compiled core, CUDA tensors by one kernel launch. Tensors that require gradients, or
            are on another device, are processed by torch indexing, which is slower and
            differentiable.
        prefix: Entry that contains ``"traj_ids"`` and ``"mask"``, in the input and in the result.
            Defaults to ``None``: "collector" if the batch has that entry, else the root.
        trajectory_key: Key of the trajectory ids, integers of the batch's shape; the mask is next
            to them. If it is given, done flags do not split unless `done_key` is given too. If the
            batch lacks the entry, trajectories are numbered from 0. Defaults to ``None``:
            "traj_ids" in `prefix`.
        done_key: Entry under "next" that ends a trajectory: bool, of the batch's shape or with more
            dimensions. With more, any flag of a frame ends it, such as one agent's. Defaults to
            ``None``: "done".
        as_nested: Return nested tensors without padding. ``True`` or torch.strided gives strided
            ones, torch.jagged gives jagged ones (default: ``False``).
        format: "padded" or "cat". Leave the default if `as_nested` is given (default: "padded").
        padding_id: Trajectory id of padding. With 0, the maximum id counts the trajectories, but 0
            is also a real id, so only the mask identifies frames (default: -1).

    Returns:
        A new TensorDict [N, T_max] for "padded", zero after the end of each trajectory, with a bool
        mask [N, T_max] of real frames. For "cat", :class:`FlatTrajectories`, without a mask. The
        input is not modified and shares no memory with the result.

        Entries that are not tensors (NonTensorData) are ``None`` in padding; ragged ones become a
        lazy stack over time.

        With `as_nested`: a TensorDict of nested tensors without a mask. Its batch size is [N, -1]
        for strided tensors, [N, T] if all lengths are T, and [N] for jagged tensors.
        ``to_padded_tensor`` pads strided ones.

    Raises:
        ValueError: The batch has no batch dimension; the format or layout is unknown; ids, done or
            mask have another dtype or shape; or the ids' dtype cannot hold `padding_id`.
        KeyError: The batch has neither ids nor dones, or lacks `done_key`.
        NotImplementedError: This version of torch does not support `as_nested=torch.jagged`.
        TypeError: The input is not a TensorDict, a tensor is not strided, or `padding_id` is not an
            int. With `as_nested`: an entry is not a tensor or is ragged, or torch has no strided
            nested tensors of its dtype.
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
            raise ValueError(
                f'format: expected the default "padded" because as_nested is given, got {format!r}'
            )
        for key in without_extras(td)[1].extras:
            raise TypeError(
                f"{dotted(key)}: as_nested needs tensors with the same shape in each frame; "
                'exclude this entry with td.exclude, or use format="cat"'
            )
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
    """Split like :func:`split_trajectories`; also return the source cells as a plan.

    `signals` are copies of entries in host memory, by key, which need not be fetched from a device.
    """
    if td.ndim < 1:
        raise ValueError("rollout_tensordict: expected at least one batch dimension, got none")
    td, extras_batch = without_extras(td)
    leaves, nested = flatten(td)
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
    if form.mask is not None:
        tensors[mask_key] = form.mask.to(tensors[ids_key].device)
    result: Any = to_tensordict(tensors, form.lead, td.device)
    restore_nested(result, nested, form.lead, td.ndim)
    if extras_batch:
        result = with_extras(result, extras_batch.moved(_cells(form), form.mask))
    return result, plan


class _Padded:
    """The layout [N, T_max]."""

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
        mask = rows_like(self.mask.to(frames.device), frames)
        return torch.where(mask, frames, torch.zeros_like(frames))

    def number(self, tensors: dict[Key, torch.Tensor], key: Key) -> None:
        """Fill ids in padding; number the trajectories if the batch has no ids."""
        if key not in tensors:
            numbers = torch.arange(self.lead[0], device="cpu")
            tensors[key] = numbers.unsqueeze(1).expand(self.lead).clone()
        ids = tensors[key]
        if self.padding_id == -1 and not ids.dtype.is_signed:
            return  # padding has id 0
        limits = torch.iinfo(ids.dtype)
        if not limits.min <= self.padding_id <= limits.max:
            raise ValueError(
                f"padding_id: expected a value that fits {ids.dtype}, the dtype of {dotted(key)}, "
                f"got {self.padding_id}"
            )
        if ids.device.type == "cpu":
            self.plan.pad(ids, self.padding_id)
        else:
            ids.masked_fill_(~rows_like(self.mask.to(ids.device), ids), self.padding_id)


class _Flat:
    """The layout [F]."""

    mask: ClassVar[None] = None

    def __init__(self, plan: SplitPlan, td: TensorDictBase) -> None:
        self.plan = plan
        self.batch_shape = td.shape
        self.lead = (plan.frames,)

    def write(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.plan.flat(sources, targets)

    def select(self, leaf: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        return leaf[cells]

    def number(self, tensors: dict[Key, torch.Tensor], key: Key) -> None:
        """Number the trajectories if the batch has no ids."""
        if key not in tensors:
            lengths = torch.from_numpy(self.plan.lengths)
            numbers = torch.arange(self.plan.count, device="cpu")
            tensors[key] = numbers.repeat_interleave(lengths)


def _gather(form: _Padded | _Flat, leaves: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Return every entry in its new layout, in the order of `leaves`."""
    ndim = len(form.batch_shape)
    plain = {key: leaf.detach() for key, leaf in leaves.items() if is_plain(leaf)}
    result = allocate(
        _memory,
        form.lead,
        [Leaf(k, dtype_name(x.dtype), tuple(x.shape[ndim:])) for k, x in plain.items()],
    )
    form.write(list(plain.values()), list(result.values()))
    on_device = on_one_device({key: leaf for key, leaf in leaves.items() if key not in plain})
    if on_device:
        result |= split_on_device(form.plan, on_device, form.lead, ndim)
    if rest := [key for key in leaves if key not in result]:
        cells = _cells(form)
        for key in rest:
            frames = leaves[key].flatten(0, ndim - 1)
            result[key] = form.select(frames, cells.to(frames.device))
    return {key: result[key] for key in leaves}


def _cells(form: _Padded | _Flat) -> torch.Tensor:
    """Return the source cell of each frame, in row-major order, and 0 in padding."""
    cells = torch.empty(form.lead, dtype=torch.int64, device="cpu")
    sources = torch.arange(form.batch_shape.numel(), device="cpu")
    form.write([sources.reshape(form.batch_shape)], [cells])
    return cells


def _done(
    leaves: dict[Key, torch.Tensor], done_key: NestedKey | None, *, needed: bool, wanted: bool
) -> torch.Tensor | None:
    """Return the done flags under "next", or ``None`` if they do not split."""
    key = as_key("done" if done_key is None else done_key)
    key = key if key[0] == "next" else ("next", *key)
    if done_key is None and not needed:
        return leaves.get(key) if wanted else None
    if key not in leaves:
        if done_key is not None:
            raise KeyError(f"done_key: expected an entry {dotted(key)} in the batch, got none")
        raise KeyError(
            "rollout_tensordict: expected an entry next.done or trajectory ids, got neither"
        )
    return leaves[key]
