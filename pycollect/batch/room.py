"""Rooms: tensors on a device for what of a batch is made there, beside the slab with the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from pycollect._core import Placement
from pycollect.batch.layout import Key, is_delivered


class Room:
    """Leaves of one batch on a device, in the order in which its slab has them.

    Attributes:
        number: by which those are told of it who fill it.
        tensors: ``[B, P, T, *frame]`` by key, or ``[P, B, T, *frame]`` where workers follow each
            other along time. They are made when they are first written.
    """

    def __init__(self, number: int, placement: Placement, order: str) -> None:
        self.number = number
        self.tensors: dict[Key, torch.Tensor] = {}
        workers, self._along_time = placement.workers, order == "time"
        self._keys = {leaf.key for leaf in placement.layout.leaves if is_delivered(leaf.key)}
        envs = placement.envs
        lead = (envs, workers) if self._along_time else (workers, envs)
        self._extents = (*lead, placement.steps)

    def write(
        self, values: Mapping[Key, torch.Tensor], row: int, first_env: int, step: int
    ) -> None:
        """Write one step of some environments, by work that is given to the current stream.

        Args:
            values: ``[workers, envs, *frame]`` each, on the device; those that the batch will not
                have are left out.
            row: of the first of these workers.
            first_env: of these environments.
        """
        for key, value in values.items():
            if key not in self._keys:
                continue
            if key not in self.tensors:
                shape = (*self._extents, *value.shape[2:])
                self.tensors[key] = torch.empty(shape, dtype=value.dtype, device=value.device)
            workers, envs = value.shape[:2]
            rows = self._by_worker(self.tensors[key])[row : row + workers]
            rows[:, first_env : first_env + envs, step].copy_(value)

    def filled(self, ids: torch.Tensor) -> dict[Key, torch.Tensor]:
        """The tensors of a batch that is complete; uncollected cells are zeros.

        Args:
            ids: of trajectories, the batch's leaf on the host; -1 where nothing was collected.
        """
        empty = (ids.flatten() < 0).nonzero().squeeze(-1)
        for tensor in self.tensors.values():
            if len(empty) and tensor.numel():
                cells = tensor.view(ids.numel(), -1).view(torch.uint8)
                cells[empty.to(tensor.device)] = 0
        frame = len(self._extents)
        return {
            key: tensor.view(*ids.shape, *tensor.shape[frame:])
            for key, tensor in self.tensors.items()
        }

    def copy_to(self, batch: Mapping[Key, torch.Tensor], rows: Sequence[int]) -> None:
        """Copy these workers' rows to the batch's own leaves, once it is `filled`."""
        for key, tensor in self.tensors.items():
            own, target = (self._by_worker(at) for at in (tensor, batch[key].view_as(tensor)))
            for row in rows:
                target[row].copy_(own[row])

    def _by_worker(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self._along_time else tensor


class Rooms:
    """The rooms of batches that are still to come. Each is there as long as somebody holds it.

    Args:
        device: on which they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers = count(1)
        self._rooms: WeakValueDictionary[int, Room] = WeakValueDictionary()

    def open(self, placement: Placement, order: str) -> Room:
        """A new one, for a batch whose slab is placed so."""
        room = Room(next(self._numbers), placement, order)
        self._rooms[room.number] = room
        return room

    def get(self, number: int) -> Room | None:
        """The one of that number; None once nobody wants its batch any more."""
        return self._rooms.get(number)
