"""Convert between TensorDicts and tensors by key path, which the core can read."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from pycollect._core import Layout, Leaf, MemoryPool, Placement
from pycollect.data.layout import NAMES, Key, as_key, dotted, torch_dtype
from pycollect.data.objects import is_object
from pycollect.data.slabs import poisons, slab_tensors

NestedKey = str | tuple[str, ...]


def spare_memory() -> MemoryPool:
    """Return a pool of memory for results, reused after the last view of a result is freed.

    Two blocks are kept, because a caller often holds one result while the next is made.
    """
    return MemoryPool(2, poisons())


def flatten(td: TensorDictBase) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Size]]:
    """Return tensors, and the batch sizes of nested TensorDicts, by key path; without a copy."""
    leaves: dict[Key, torch.Tensor] = {}
    nested: dict[Key, torch.Size] = {}

    def visit(node: TensorDictBase, path: Key) -> None:
        for name, value in node.items():
            key = (*path, name)
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                leaves[key] = value
            elif isinstance(value, TensorDictBase) and not is_object(value):
                nested[key] = value.batch_size
                visit(value, key)
            else:
                raise TypeError(
                    f"{dotted(key)}: expected a strided tensor, got {_describe(value)}; "
                    f"exclude it with td.exclude({key!r})"
                )

    visit(td, ())
    return leaves, nested


def restore_nested(
    result: TensorDict, nested: dict[Key, torch.Size], lead: tuple[int, ...], ndim: int
) -> None:
    """Restore the batch dimensions that nested TensorDicts had after those of the root."""
    for key, size in nested.items():
        target = (*lead, *size[ndim:])
        if key not in result.keys(include_nested=True):
            result.set(key, TensorDict({}, batch_size=target))
        elif len(size) > ndim:
            result.get(key).batch_size = torch.Size(target)


def allocate(
    memory: MemoryPool, lead: tuple[int, ...], leaves: list[Leaf]
) -> dict[Key, torch.Tensor]:
    """Return uninitialized tensors [*lead, *frame] in one block, which each keeps alive."""
    if not leaves or 0 in lead:
        return {
            leaf.key: torch.empty((*lead, *leaf.shape), dtype=torch_dtype(leaf.dtype), device="cpu")
            for leaf in leaves
        }
    slab = memory.acquire(Placement(Layout(leaves), 1, math.prod(lead[:-1]), lead[-1]))
    return slab_tensors(slab, lead, [leaf.key for leaf in leaves])


def is_plain(leaf: torch.Tensor) -> bool:
    """Return whether the core can read the tensor on the host without losing information."""
    return leaf.device.type == "cpu" and is_raw(leaf)


def is_raw(leaf: torch.Tensor) -> bool:
    """Return whether the tensor's memory alone has all information, on any device."""
    return (
        not (leaf.requires_grad and torch.is_grad_enabled())
        and not leaf.is_conj()
        and not leaf.is_neg()
        and leaf.dtype in NAMES
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not is_tensor_collection(value):
        return f"a tensor of layout {value.layout}"
    return type(value).__name__


def meta_keys(
    td: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[Key, Key]:
    """Return the keys of the trajectory ids and of the mask."""
    if trajectory_key is not None:
        key = as_key(trajectory_key)
        return key, (*key[:-1], "mask")
    if prefix is None:
        prefix = ("collector",) if "collector" in td.keys() else ()  # noqa: SIM118 (not a dict)
    base = as_key(prefix)
    return (*base, "traj_ids"), (*base, "mask")


def as_int64(key: Key, ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return trajectory ids for the core; raise a ValueError if they are not integers."""
    if ids is None:
        return None
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"{dotted(key)}: expected integers, got {ids.dtype}")
    return ids.to(torch.int64)


def rows_like(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values of rows with as many dimensions as `like`, so that they broadcast to it."""
    return rows.view((*rows.shape, *[1] * (like.ndim - rows.ndim)))


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for tensors that do not count it."""
    return -1 if tensor.is_inference() else tensor._version


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor, unless it has them and is not writable (`Tensor.expand`)."""
    try:
        target.copy_(values)
    except RuntimeError:
        if not torch.equal(target, values.to(target)):
            raise


def any_of(done: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return one flag per frame: whether any of its flags is set, such as one agent's."""
    return done.flatten(ndim).any(-1) if done.shape[ndim:].numel() > 1 else done


def any_done(leaves: dict[Key, torch.Tensor], ndim: int) -> torch.Tensor | None:
    """Return the done flags among leaves under "next", perhaps of nested ones, or ``None``."""
    if ("done",) in leaves:
        return any_of(leaves["done",], ndim)
    found: torch.Tensor | None = None
    for key, leaf in leaves.items():
        if key[-1] == "done":
            done = any_of(leaf, ndim).reshape(leaf.shape[:ndim])
            found = done if found is None else found | done
    return found


def as_signal(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor that the core can read: detached, on the CPU."""
    return None if tensor is None else tensor.detach().cpu()
