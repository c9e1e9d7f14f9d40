"""Slab pools, tensors and TensorDicts of a slab, and the rows that one worker writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from pycollect._core import Memory, Placement, RolloutHeader, SharedSlabPool, Slab, SlabPool
from pycollect.data.layout import Key


def make_pool(
    placement: Placement,
    max_free: int,
    allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
) -> SlabPool:
    """Make a pool of slabs; with ``PYCOLLECT_POISON=1``, returned slabs are filled with 0xA5."""
    return SlabPool(placement, max_free, poisons(), allocate)


def make_shared_pool(placement: Placement, working: int, spare: int) -> SharedSlabPool:
    """Make a pool of slabs that other processes write; see :class:`SharedSlabPool`."""
    return SharedSlabPool(placement, working, spare, poisons())


def poisons() -> bool:
    """Return whether to overwrite returned memory, so that stale views are found."""
    return os.environ.get("PYCOLLECT_POISON") == "1"


def check_lease(slab: Slab, header: RolloutHeader) -> None:
    """Raise a RuntimeError if a rollout was not written during this lease of the memory.

    This detects a late writer, and a rollout of an earlier lease.
    """
    if header.generation != slab.generation:
        raise RuntimeError(
            f"rollout {header.sequence} of worker {header.worker}: expected generation "
            f"{slab.generation} of its slab, got {header.generation}; please report this"
        )


def slab_tensors(
    slab: Slab, batch_shape: Sequence[int], keys: Sequence[Key | None] | None = None
) -> dict[Key, torch.Tensor]:
    """Return the slab's leaves by key, as contiguous tensors `[*batch_shape, *frame]`.

    Each tensor keeps the slab alive. `keys` are the keys of the slab's leaves in their order;
    ``None`` omits a leaf. By default they are looked up in the layout, which takes longer than to
    make the tensors.
    """
    if keys is None:
        keys = [leaf.key for leaf in slab.placement.layout.leaves]
    tensors: dict[Any, torch.Tensor] = dict(
        zip(keys, slab.tensors(list(batch_shape), torch.Tensor), strict=True)
    )
    tensors.pop(None, None)
    return tensors


def to_tensordict(
    tensors: dict[Key, torch.Tensor],
    batch_shape: Sequence[int],
    device: torch.device | None = None,
    shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType({}),
) -> TensorDict:
    """Return a TensorDict of tensors, with a last batch dimension named "time".

    Args:
        tensors: Tensors by key path; the shape of each starts with `batch_shape`.
        batch_shape: [T], [P, T], [B, T] or [B, P, T].
        device: Value of ``td.device``.
        shapes: Batch dimensions of nested TensorDicts after `batch_shape`, by key.
    """
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        node = nested
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = tensor
    size = torch.Size(batch_shape)
    names: list[str | None] = [None] * (len(size) - 1)
    td = _tensordict(nested, size, device, [*names, "time"])
    for key in sorted(shapes, key=len):
        if (node := td.get(key, None)) is not None:
            names = td.names
            node.batch_size = torch.Size([*td.batch_size, *shapes[key]])
            node.names = [*names, *[None] * len(shapes[key])]
    return td


# Skips the validation of every entry, which costs more than the rest of a batch. It is private in
# tensordict, so the public constructor is the fallback; a test checks that both agree.
_new_unsafe = getattr(TensorDict, "_new_unsafe", TensorDict)


def _tensordict(
    source: dict[str, Any], size: torch.Size, device: torch.device | None, names: list[str | None]
) -> TensorDict:
    entries = {
        name: _tensordict(value, size, device, names) if isinstance(value, dict) else value
        for name, value in source.items()
    }
    td: TensorDict = _new_unsafe(entries, batch_size=size, device=device, names=list(names))
    return td


def unchecked_tensordict(
    entries: dict[str, torch.Tensor], like: TensorDict, device: Any = ...
) -> TensorDict:
    """Return an unchecked TensorDict of these entries with the batch size and names of `like`."""
    names = like.names
    td: TensorDict = _new_unsafe(
        entries,
        batch_size=like.batch_size,
        device=like.device if device is ... else device,
        names=names if any(names) else None,  # every `set` iterates over names
    )
    return td


def set_unchecked(td: TensorDict, name: str, value: Any) -> None:
    """Set an entry that is known to match the TensorDict's batch size and device.

    A checked `set` takes ten times as long. TorchRL's environments call the same private method.
    """
    td._set_str(name, value, inplace=False, validated=True, non_blocking=False)


MemoryAddress = tuple[int, int, int, int, int]
RowsAddress = tuple[MemoryAddress, int, int, int, str, int]
"""Memory, generation of its lease, workers, steps and order of the placement, and row."""

_MAX_MAPPINGS = 64


@dataclass(frozen=True)
class SlabRows:
    """The rows of a slab into which one worker writes its rollout."""

    slab: Slab
    row: int = 0  # index of the worker in the slab
    order: str = "stack"  # order of the slab's placement: "stack" or "time"

    @property
    def address(self) -> RowsAddress:
        """Address by which another process finds the rows, in shared memory."""
        slab = self.slab
        memory, placement = slab.memory.address, slab.placement
        assert memory is not None, "slab: expected one in shared memory"
        extent = placement.workers, placement.steps
        return (memory, slab.generation, *extent, self.order, self.row)

    def header(self) -> RolloutHeader:
        """Return the header of the rollout, after checking that it belongs to this lease."""
        header = self.slab.header(self.row)
        check_lease(self.slab, header)
        return header

    def tensors(
        self, envs: Sequence[int], keys: Sequence[Key | None], whole: bool = False
    ) -> dict[Key, torch.Tensor]:
        """Return views ``[*envs, T, *frame]`` of the rollout's leaves by key, maybe not contiguous.

        `envs` are the batch dimensions of the environments: (), (P,) or more. `keys` are the keys
        of the slab's leaves in their order; ``None`` omits a leaf. If `whole`, the cells after the
        end of the rollout are included.
        """
        placement = self.slab.placement
        steps = placement.steps if whole else self.slab.lengths(self.row)[0]
        extents = [placement.workers, placement.envs]
        if self.order == "time":
            extents.reverse()
        leaves = slab_tensors(self.slab, [*extents, placement.steps], keys)
        dim = 1 if self.order == "time" else 0
        return {
            key: (rows := leaf.select(dim, self.row)[:, :steps]).view(*envs, steps, *rows.shape[2:])
            for key, leaf in leaves.items()
        }


class MappedSlabs:
    """Maps slabs of another process by the addresses of their rows.

    Each slab is mapped only once, because mapping takes longer than filling a part of it.
    """

    def __init__(self) -> None:
        self._memory: dict[MemoryAddress, Memory] = {}
        self._placements: dict[tuple[int, int, str], Placement] = {}

    def rows(self, address: RowsAddress, rollout: Placement) -> SlabRows:
        """Return the rows at an address of `SlabRows.address`, of one rollout of a worker each.

        `rollout` has the slab's layout and environments. Raises SharedMemoryError if the other
        process has freed the memory.
        """
        memory_address, generation, workers, steps, order, row = address
        memory = self._memory.get(memory_address)
        if memory is None:
            memory = self._memory[memory_address] = Memory.attach(memory_address)
            if len(self._memory) > _MAX_MAPPINGS:
                del self._memory[next(iter(self._memory))]
        extents = (workers, steps, order)
        if extents not in self._placements:
            self._placements[extents] = Placement(
                rollout.layout, workers, rollout.envs, steps, order
            )
        return SlabRows(memory.slab(self._placements[extents], generation), row, order)
