"""Batches cut into their trajectories: padded rows, or flat with offsets."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from pycollect._core import Layout, Leaf, MemoryPool, Placement, SplitPlan
from pycollect.batch import slab_tensors, to_tensordict
from pycollect.layout import Key, dotted, dtype_name, torch_dtype

NestedKey = str | tuple[str, ...]

# Results of the last calls, used again once their last view is gone: two, because a caller often
# holds one while the next is made.
_memory = MemoryPool(2, os.environ.get("PYCOLLECT_POISON") == "1")


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
) -> TensorDict: ...
@overload
def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = ...,
    trajectory_key: NestedKey | None = ...,
    done_key: NestedKey | None = ...,
    as_nested: bool | torch.layout = ...,
    format: Literal["cat"],
) -> FlatTrajectories: ...
def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
    format: str = "padded",
) -> TensorDict | FlatTrajectories:
    """Cuts a batch of rollouts into its trajectories, one row each.

    A trajectory ends at a done, where the trajectory id changes, and at a row's end; ids are never
    compared across such an end, so repeated ones cannot merge. Uncollected cells (id -1 or mask
    False) are dropped; where one stands inside of a trajectory, the frames before and after it are
    two rows. Trajectories come in the batch's row-major order. Time and memory are linear in the
    frames written.

    Differs from TorchRL's function of this name: the result has two batch dimensions whatever the
    lengths; dones cut where there are ids too; trajectory ids are -1 in padding, not 0.

    Args:
        rollout_tensordict: batch size [T], [P, T], [B, P, T], ...: time is the last dimension.
            Leaves may lie anywhere in memory. Those that need a gradient or are not in host memory
            go through torch's own indexing (slower, differentiable); the others through the core.
        prefix: where ``"traj_ids"`` and ``"mask"`` are read and written. Default: "collector" if
            the batch has such an entry, else the root.
        trajectory_key: the trajectory ids, integers of the batch's shape; the mask lies beside
            them. With it, dones do not cut unless `done_key` is given too. If there is no such
            entry, it is written: the trajectories numbered from 0.
        done_key: the entry under "next" that ends a trajectory, default "done"; bool, of the
            batch's shape or with a trailing 1.
        as_nested: only False. Nested tensors can be made from ``format="cat"``:
            ``torch.nested.nested_tensor_from_jagged(values, offsets)``.
        format: "padded" or "cat".

    Returns:
        "padded": a new TensorDict [N, T_max], zeros behind each trajectory's end, with a bool mask
        [N, T_max] of the cells that hold a frame. "cat": :class:`FlatTrajectories`, without a mask.
        The input is not changed and shares no memory with the result.

    Raises:
        ValueError: no batch dimension, an unknown format, ids, done or mask of another dtype or
            shape.
        KeyError: neither ids nor dones, or no entry of the given `done_key`.
        TypeError: a leaf that is not a tensor, or not a strided one.
    """
    td = rollout_tensordict
    if format not in ("padded", "cat"):
        raise ValueError(f'format: expected "padded" or "cat", got {format!r}')
    if as_nested is not False:
        raise ValueError(
            f'as_nested: expected False, got {as_nested!r}; use format="cat" and '
            "torch.nested.nested_tensor_from_jagged"
        )
    if td.ndim < 1:
        raise ValueError("rollout_tensordict: expected at least one batch dimension, got none")
    leaves, nested = _flatten(td)
    ids_key, mask_key = _meta_keys(td, prefix, trajectory_key)
    ids = leaves.get(ids_key)
    done = _done(leaves, done_key, needed=ids is None, wanted=trajectory_key is None)
    plan = SplitPlan(
        _signal(done),
        _signal(_as_int64(ids_key, ids)),
        _signal(leaves.pop(mask_key, None)),
        batch_dims=td.ndim,
    )
    form = _Padded(plan, td) if format == "padded" else _Flat(plan, td)
    tensors = _gather(form, leaves)
    form.number(tensors, ids_key)
    if isinstance(form, _Padded):
        tensors[mask_key] = form.mask
    result = to_tensordict(tensors, form.lead, td.device)
    _restore_nested(result, nested, form.lead, td.ndim)
    if isinstance(form, _Padded):
        return result
    return FlatTrajectories(result, torch.from_numpy(plan.offsets), torch.from_numpy(plan.lengths))


class _Padded:
    """The form [N, T_max]."""

    def __init__(self, plan: SplitPlan, td: TensorDictBase) -> None:
        self.plan = plan
        self.batch_shape = td.shape
        self.lead = (plan.count, plan.longest)
        self.mask = torch.empty(self.lead, dtype=torch.bool)
        plan.mask(self.mask)

    def write(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.plan.padded(sources, targets)

    def select(self, leaf: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        frames = leaf[cells]
        return torch.where(self._mask_for(frames), frames, torch.zeros_like(frames))

    def number(self, tensors: dict[Key, torch.Tensor], key: Key) -> None:
        """Ids are -1 in padding; where there are none, trajectories are numbered."""
        if key not in tensors:
            tensors[key] = torch.arange(self.lead[0]).unsqueeze(1).expand(self.lead).clone()
        ids = tensors[key]
        if not ids.dtype.is_signed:
            return
        if ids.device.type == "cpu":
            self.plan.pad(ids, -1)
        else:
            ids.masked_fill_(~self._mask_for(ids), -1)

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
            tensors[key] = torch.arange(self.plan.count).repeat_interleave(lengths)


def _gather(form: _Padded | _Flat, leaves: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Every leaf in its new form, in the order of `leaves`."""
    ndim = len(form.batch_shape)
    plain = {key: leaf.detach() for key, leaf in leaves.items() if _is_plain(leaf)}
    result = _allocate(
        form.lead, [Leaf(k, dtype_name(x.dtype), tuple(x.shape[ndim:])) for k, x in plain.items()]
    )
    form.write(list(plain.values()), list(result.values()))
    if len(plain) == len(leaves):
        return result
    cells = torch.empty(form.lead, dtype=torch.int64)
    form.write([torch.arange(form.batch_shape.numel()).reshape(form.batch_shape)], [cells])
    for key, leaf in leaves.items():
        if key not in plain:
            frames = leaf.reshape(-1, *leaf.shape[ndim:])
            result[key] = form.select(frames, cells.to(leaf.device))
    return {key: result[key] for key in leaves}


def _allocate(lead: tuple[int, ...], leaves: list[Leaf]) -> dict[Key, torch.Tensor]:
    """Uninitialised tensors [*lead, *frame], all in one block of memory that each keeps alive."""
    if not leaves or 0 in lead:
        return {
            leaf.key: torch.empty((*lead, *leaf.shape), dtype=torch_dtype(leaf.dtype))
            for leaf in leaves
        }
    envs, steps = lead if len(lead) == 2 else (1, *lead)
    slab = _memory.acquire(Placement(Layout(leaves), 1, envs, steps))
    return slab_tensors(slab, lead, [leaf.key for leaf in leaves])


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether the core can read it, and nothing is lost if it does."""
    return (
        leaf.device.type == "cpu"
        and not (leaf.requires_grad and torch.is_grad_enabled())
        and not leaf.is_conj()
        and not leaf.is_neg()
        and _is_numeric(leaf.dtype)
    )


def _is_numeric(dtype: torch.dtype) -> bool:
    try:
        dtype_name(dtype)
    except ValueError:
        return False
    return True


def _flatten(td: TensorDictBase) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Size]]:
    """The leaves by key path, and the batch sizes of the nested TensorDicts."""
    leaves: dict[Key, torch.Tensor] = {}
    nested: dict[Key, torch.Size] = {}

    def visit(node: TensorDictBase, path: Key) -> None:
        for name, value in node.items():
            key = (*path, name)
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                leaves[key] = value
            elif isinstance(value, TensorDictBase) and not _is_non_tensor(value):
                nested[key] = value.batch_size
                visit(value, key)
            else:
                raise TypeError(
                    f"{dotted(key)}: expected a strided tensor, got {_describe(value)}; "
                    f"leave it out by td.exclude({key!r})"
                )

    visit(td, ())
    return leaves, nested


def _is_non_tensor(value: Any) -> bool:
    return bool(getattr(value, "_is_non_tensor", False))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not is_tensor_collection(value):
        return f"a tensor of layout {value.layout}"
    return type(value).__name__


def _restore_nested(
    result: TensorDict, nested: dict[Key, torch.Size], lead: tuple[int, ...], ndim: int
) -> None:
    """Nested TensorDicts keep the batch dimensions that they have beyond the root's."""
    for key, size in nested.items():
        target = (*lead, *size[ndim:])
        if key not in result.keys(include_nested=True):
            result.set(key, TensorDict({}, batch_size=target))
        elif len(size) > ndim:
            result.get(key).batch_size = torch.Size(target)


def _as_key(key: NestedKey) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _meta_keys(
    td: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[Key, Key]:
    """Where the ids and the mask lie."""
    if trajectory_key is not None:
        key = _as_key(trajectory_key)
        return key, (*key[:-1], "mask")
    if prefix is None:
        prefix = ("collector",) if "collector" in td.keys() else ()  # noqa: SIM118 (not a dict)
    base = _as_key(prefix)
    return (*base, "traj_ids"), (*base, "mask")


def _done(
    leaves: dict[Key, torch.Tensor], done_key: NestedKey | None, *, needed: bool, wanted: bool
) -> torch.Tensor | None:
    """The done flags under "next"; None where they do not cut."""
    key = _as_key("done" if done_key is None else done_key)
    key = key if key[0] == "next" else ("next", *key)
    if done_key is None and not needed:
        return leaves.get(key) if wanted else None
    if key not in leaves:
        raise KeyError(
            f"expected {dotted(key)}"
            + (", or trajectory ids, in the batch, got neither" if needed else " in the batch")
        )
    return leaves[key]


def _as_int64(key: Key, ids: torch.Tensor | None) -> torch.Tensor | None:
    if ids is None:
        return None
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"{dotted(key)}: expected integers, got {ids.dtype}")
    return ids.to(torch.int64)


def _signal(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As the core can read it."""
    return None if tensor is None else tensor.detach().cpu()
