"""Slabs as TensorDicts: the pools that lend them, one worker's rows, and views for the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """A pool of slabs; ``PYCOLLECT_POISON=1`` fills each with 0xA5 when it comes back.

    Args:
        allocate: gives the memory, see :class:`SlabPool`.
    """
    return SlabPool(placement, max_free, _poisons(), allocate)


def make_shared_pool(placement: Placement, working: int, spare: int) -> SharedSlabPool:
    """The same of slabs that other processes write; see :class:`SharedSlabPool`."""
    return SharedSlabPool(placement, working, spare, _poisons())


def _poisons() -> bool:
    return os.environ.get("PYCOLLECT_POISON") == "1"


def check_lease(slab: Slab, header: RolloutHeader) -> None:
    """Raise RuntimeError if a rollout was not written during this lease of the memory.

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
    """The slab's leaves by key: contiguous tensors `[*batch_shape, *frame]` that hold the slab.

    Args:
        keys: of the slab's leaves, in their order, None for one that is left out. Better told: to
            ask the layout for them takes longer than to make the tensors.
    """
    if keys is None:
        keys = [leaf.key for leaf in slab.placement.layout.leaves]
    tensors: dict[Any, torch.Tensor] = dict(
        zip(keys, slab.tensors(list(batch_shape), torch.Tensor), strict=True)
    )
    tensors.pop(None, None)
    return tensors


def leaf_sizes(slab: Slab) -> tuple[int, ...]:
    """The bytes of a slab cut where a leaf begins: headers, then each leaf with what pads it."""
    whole = slab.array()
    extents = (slab.placement.workers, slab.placement.envs, slab.placement.steps)
    base = whole.ctypes.data
    starts = {own.data_ptr() - base for own in slab.tensors(list(extents), torch.Tensor)}
    edges = sorted({0, *starts, whole.nbytes})
    return tuple(end - start for start, end in pairwise(edges))


def to_tensordict(
    tensors: dict[Key, torch.Tensor],
    batch_shape: Sequence[int],
    device: torch.device | None = None,
    shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType({}),
) -> TensorDict:
    """A TensorDict of those tensors whose last batch dimension is named "time".

    Args:
        tensors: by key path; each starts with `batch_shape`.
        batch_shape: [T], [P, T], [B, T] or [B, P, T].
        device: what ``td.device`` says.
        shapes: of nested TensorDicts, the batch dimensions behind `batch_shape`.
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
        _reshape(td, key, shapes[key])
    return td


def _reshape(td: TensorDict, key: Key, shape: tuple[int, ...]) -> None:
    node = td.get(key, None)
    if node is not None:
        names = td.names
        node.batch_size = torch.Size([*td.batch_size, *shape])
        node.names = [*names, *[None] * len(shape)]


# Skips the validation of every entry, which costs more than all the rest of a batch. Private in
# tensordict, so the public constructor stands behind it; a test holds both to the same result.
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
    """A TensorDict of tensors that are known to fit, of another one's batch size and names.

    Args:
        device: not given: the other's.
    """
    names = like.names
    td: TensorDict = _new_unsafe(
        entries,
        batch_size=like.batch_size,
        device=like.device if device is ... else device,
        names=names if any(names) else None,  # every `set` looks through names that there are
    )
    return td


def set_unchecked(td: TensorDict, name: str, value: Any) -> None:
    """Set an entry that is known to fit the TensorDict's batch size and device.

    To check it takes ten times as long. TorchRL's environments call the same private method.

    Raises:
        RuntimeError: it is locked.
    """
    td._set_str(name, value, inplace=False, validated=True, non_blocking=False)


MemoryAddress = tuple[int, int, int, int, int]
RowsAddress = tuple[MemoryAddress, int, int, int, str, int]
"""The memory, the generation of its lease; workers, steps and order of the placement; the row."""

_MAPPINGS_KEPT = 64


@dataclass(frozen=True)
class SlabRows:
    """The rows of a slab that one worker's rollout is written into.

    Attributes:
        order: of the slab's placement: "stack" or "time".
    """

    slab: Slab
    row: int = 0
    order: str = "stack"

    @property
    def address(self) -> RowsAddress:
        """What a worker in another process finds them by, of a slab in shared memory."""
        slab = self.slab
        memory, placement = slab.memory.address, slab.placement
        assert memory is not None, "slab: expected one in shared memory"
        extent = placement.workers, placement.steps
        return (memory, slab.generation, *extent, self.order, self.row)

    def header(self) -> RolloutHeader:
        """The checked header of the rollout that was written there, of this very lease."""
        header = self.slab.header(self.row)
        check_lease(self.slab, header)
        return header

    def tensors(
        self, envs: Sequence[int], keys: Sequence[Key | None], whole: bool = False
    ) -> dict[Key, torch.Tensor]:
        """The rollout's leaves by key, not contiguous in any order.

        Args:
            envs: the batch dimensions of the environments: (), (P,) or more.
            whole: with the cells behind the end of the rollout.

        Returns:
            ``[*envs, T, *frame]`` each, with T the steps that the rollout really has, or all.
        """
        placement = self.slab.placement
        steps = placement.steps if whole else self.slab.lengths(self.row)[0]
        extents = [placement.workers, placement.envs]
        if self.order == "time":
            extents.reverse()
        every = slab_tensors(self.slab, [*extents, placement.steps], keys)
        dim = 1 if self.order == "time" else 0
        return {
            key: (own := tensor.select(dim, self.row)[:, :steps]).view(*envs, steps, *own.shape[2:])
            for key, tensor in every.items()
        }


class MappedSlabs:
    """Slabs of another process, by their rows' addresses.

    Each is mapped once: to map it costs more than to fill a part of it.
    """

    def __init__(self) -> None:
        self._memory: dict[MemoryAddress, Memory] = {}
        self._placements: dict[tuple[int, int, str], Placement] = {}

    def rows(self, address: RowsAddress, own: Placement) -> SlabRows:
        """The rows that stand at an address.

        Args:
            own: of one rollout of the worker; its layout and environments are the slab's.

        Raises:
            SharedMemoryError: the other process has let its memory go.
        """
        where, generation, workers, steps, order, row = address
        memory = self._memory.get(where)
        if memory is None:
            memory = self._memory[where] = Memory.attach(where)
            if len(self._memory) > _MAPPINGS_KEPT:
                del self._memory[next(iter(self._memory))]
        form = (workers, steps, order)
        if form not in self._placements:
            self._placements[form] = Placement(own.layout, workers, own.envs, steps, order)
        return SlabRows(memory.slab(self._placements[form], generation), row, order)
