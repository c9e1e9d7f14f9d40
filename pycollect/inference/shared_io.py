"""The memory through which observations come to a policy elsewhere, and its outputs come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycollect._core import Layout, Leaf, Memory, Placement
from pycollect.data.layout import Key
from pycollect.data.slabs import slab_tensors

_READ, _WRITTEN = "read", "written"
ANSWER = Leaf(("_pycollect_answer",), "int64", (1,))
"""Where states lie beside the policy: the number of the answer that an environment goes on from. It
is carried from step to step as a state is; 0 where its states are those on the board."""


@dataclass(frozen=True)
class BoardForm:
    """What lies on a board: a slab of one step, with a row per worker; pickles.

    Attributes:
        read: leaves that workers write and the policy reads.
        written: leaves that it writes.
        rows: workers that have room.
        envs: P of each.
    """

    read: tuple[Leaf, ...]
    written: tuple[Leaf, ...]
    rows: int
    envs: int

    def _placement(self) -> Placement:
        leaves = [
            Leaf((side, *leaf.key), leaf.dtype, leaf.shape)
            for side, own in ((_READ, self.read), (_WRITTEN, self.written))
            for leaf in own
        ]
        return Placement(Layout(leaves), self.rows, self.envs, 1)

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self._placement().bytes


class Board:
    """A board that this process made, or attached.

    Attributes:
        read, written: ``[rows, P, *frame]`` by key; one worker's row is contiguous.
    """

    def __init__(self, form: BoardForm, memory: Memory) -> None:
        slab = memory.slab(form._placement(), 0)
        tensors = slab_tensors(slab, [form.rows, form.envs])
        self.read = _side(tensors, _READ)
        self.written = _side(tensors, _WRITTEN)

    @staticmethod
    def shared(form: BoardForm) -> tuple[Board, Memory]:
        """A new one, and its memory, which has an address."""
        memory = Memory.share(form.bytes)
        return Board(form, memory), memory


def rows_of(
    tensors: dict[Key, torch.Tensor], row: int, batch: Sequence[int]
) -> dict[Key, torch.Tensor]:
    """One worker's row of each, ``[*frame]`` where it is no batch, else ``[P, *frame]``."""
    return {key: own[row] if batch else own[row, 0] for key, own in tensors.items()}


def _side(tensors: dict[Key, torch.Tensor], side: str) -> dict[Key, torch.Tensor]:
    return {key[1:]: tensor for key, tensor in tensors.items() if key[0] == side}
