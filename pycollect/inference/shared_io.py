"""Shared memory for the observations of workers and the outputs of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycollect._core import Layout, Leaf, Memory, Placement
from pycollect.data.layout import Key
from pycollect.data.slabs import slab_tensors

_READ, _WRITTEN = "read", "written"
ANSWER = Leaf(("_pycollect_answer",), "int64", (1,))
"""If states stay with the policy, number of the answer that an environment continues from.

Workers carry it from step to step like a state. It is 0 if the states in shared memory apply.
"""


@dataclass(frozen=True)
class IOLayout:
    """Layout of a SharedIO: a slab of one step with a row per client; can be pickled.

    Attributes:
        read: Leaves that workers write and the policy reads.
        written: Leaves that the policy writes.
        rows: Maximum number of clients.
        envs: Number of environments of each client, P.
    """

    read: tuple[Leaf, ...]
    written: tuple[Leaf, ...]
    rows: int
    envs: int

    def _placement(self) -> Placement:
        leaves = [
            Leaf((side, *leaf.key), leaf.dtype, leaf.shape)
            for side, leaves_of_side in ((_READ, self.read), (_WRITTEN, self.written))
            for leaf in leaves_of_side
        ]
        return Placement(Layout(leaves), self.rows, self.envs, 1)

    @property
    def bytes(self) -> int:
        """Number of bytes of shared memory."""
        return self._placement().bytes


class SharedIO:
    """Shared memory that this process created or attached.

    Attributes:
        read: Tensors ``[rows, P, *frame]`` that workers write, by key; one row is contiguous.
        written: Tensors ``[rows, P, *frame]`` that the policy writes, by key.
    """

    def __init__(self, layout: IOLayout, memory: Memory) -> None:
        slab = memory.slab(layout._placement(), 0)
        tensors = slab_tensors(slab, [layout.rows, layout.envs])
        self.read = _side(tensors, _READ)
        self.written = _side(tensors, _WRITTEN)

    @staticmethod
    def shared(layout: IOLayout) -> tuple[SharedIO, Memory]:
        """Create shared memory; return it with its Memory, which has an address."""
        memory = Memory.share(layout.bytes)
        return SharedIO(layout, memory), memory


def rows_of(
    tensors: dict[Key, torch.Tensor], row: int, batch: Sequence[int]
) -> dict[Key, torch.Tensor]:
    """Return one client's row of each tensor, ``[P, *frame]``, or ``[*frame]`` without a batch."""
    return {key: tensor[row] if batch else tensor[row, 0] for key, tensor in tensors.items()}


def _side(tensors: dict[Key, torch.Tensor], side: str) -> dict[Key, torch.Tensor]:
    return {key[1:]: tensor for key, tensor in tensors.items() if key[0] == side}
