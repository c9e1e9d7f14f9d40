"""One worker's rows of a slab, and how another process is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycollect._core import Memory, Placement, RolloutHeader, Slab
from pycollect.batch.layout import Key
from pycollect.batch.slab_views import check_lease, slab_tensors

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
