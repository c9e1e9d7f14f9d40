"""Several tensors between the host and a device as one copy, since each copy has a fixed cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pycollect.data.devices import Accelerator

_ALIGNMENT = 64  # of any dtype's items, of a device's widest loads, and of a cache line


class Packing:
    """How tensors lie one behind the other in one block of bytes.

    Attributes:
        forms: their shapes and dtypes.
        offsets: where each begins.
        bytes: of the block.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.forms = forms_of(tensors)
        self.offsets: list[int] = []
        self.bytes = 0
        for shape, dtype in self.forms:
            self.offsets.append(-(-self.bytes // _ALIGNMENT) * _ALIGNMENT)
            self.bytes = self.offsets[-1] + shape.numel() * dtype.itemsize

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors in such a block."""
        return tuple(
            view_at(block, at, *form) for at, form in zip(self.offsets, self.forms, strict=True)
        )


def forms_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Their shapes and dtypes."""
    return [(own.shape, own.dtype) for own in tensors]


def view_at(block: torch.Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at that byte of a block of bytes."""
    return block[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Send:
    """Brings tensors of the host to a device: one copy from one block of pinned memory.

    Args:
        sources: on the host; read again by each `stage`.
        there: the device.

    Attributes:
        mirrors: their copies there, in memory that stays the same.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], accelerator: Accelerator, there: torch.device
    ) -> None:
        packing = Packing(sources)
        self._sources = sources
        self._host = accelerator.pinned([packing.bytes], torch.uint8)
        self._block = torch.empty(packing.bytes, dtype=torch.uint8, device=there)
        self._rooms = packing.views(self._host)
        self.mirrors = packing.views(self._block)

    def stage(self) -> None:
        """Read the sources, on the host. The copy before must have ended."""
        for room, source in zip(self._rooms, self._sources, strict=True):
            room.copy_(source)

    def send(self) -> None:
        """Have what was staged copied by the current stream."""
        self._block.copy_(self._host, non_blocking=True)


class Fetch:
    """Brings tensors from a device to the host: one copy into one block of pinned memory.

    The memory is used again each time.

    Args:
        there: the device.
    """

    def __init__(self, accelerator: Accelerator, there: torch.device) -> None:
        self._accelerator, self._there = accelerator, there
        self._packing = Packing(())
        self._rooms: tuple[torch.Tensor, ...] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, valid until the next call; waits once, for one event."""
        rooms = self.ask(tensors)
        self.wait()
        return rooms

    def ask(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Where the tensors will be on the host once `wait` has returned."""
        if forms_of(tensors) != self._packing.forms:
            self._make_rooms(tensors)
        if len(tensors) == 1:
            self._rooms[0].copy_(tensors[0], non_blocking=True)
        elif tensors:
            for packed, own in zip(self._packed, tensors, strict=True):
                packed.copy_(own)
            self._host.copy_(self._block, non_blocking=True)
        return self._rooms

    def _make_rooms(self, tensors: Sequence[torch.Tensor]) -> None:
        packing = self._packing = Packing(tensors)
        self._host = self._accelerator.pinned([packing.bytes], torch.uint8)
        self._rooms = packing.views(self._host)
        if len(tensors) > 1:  # one alone is copied from where it lies
            self._block = torch.empty(packing.bytes, dtype=torch.uint8, device=self._there)
            self._packed = packing.views(self._block)

    def wait(self) -> None:
        """Wait until the current stream has done what it was given."""
        self._accelerator.mark(soon=True).synchronize()
