"""Copy several tensors between host and device at once, because each copy has a fixed cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pycollect.data.devices import Accelerator

_ALIGNMENT = 64  # bytes; enough for any dtype, a device's widest loads, and a cache line


class Packing:
    """Layout of several tensors in one block of bytes.

    Attributes:
        forms: Shape and dtype of each tensor.
        offsets: Offset of each tensor in bytes.
        bytes: Size of the block in bytes.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.forms = forms_of(tensors)
        self.offsets: list[int] = []
        self.bytes = 0
        for shape, dtype in self.forms:
            self.offsets.append(-(-self.bytes // _ALIGNMENT) * _ALIGNMENT)
            self.bytes = self.offsets[-1] + shape.numel() * dtype.itemsize

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors in a block, as views."""
        pairs = zip(self.offsets, self.forms, strict=True)
        return tuple(view_at(block, offset, *form) for offset, form in pairs)


def forms_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each tensor."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def view_at(
    block: torch.Tensor, offset: int, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor that begins at byte `offset` of a block, as a view."""
    return block[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Send:
    """Copies tensors from the host to a device, with one copy of one block of pinned memory.

    Args:
        sources: Tensors on the host; each `stage` reads them again.
        accelerator: Accelerator of the device.
        device: The device.

    Attributes:
        mirrors: The tensors on the device; their memory stays the same.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], accelerator: Accelerator, device: torch.device
    ) -> None:
        packing = Packing(sources)
        self._sources = sources
        self._host = accelerator.pinned([packing.bytes], torch.uint8)
        self._block = torch.empty(packing.bytes, dtype=torch.uint8, device=device)
        self._staged = packing.views(self._host)
        self.mirrors = packing.views(self._block)

    def stage(self) -> None:
        """Copy the sources into the pinned memory. The previous copy must have ended."""
        for target, source in zip(self._staged, self._sources, strict=True):
            target.copy_(source)

    def send(self) -> None:
        """Copy the staged tensors to the device on the current stream."""
        self._block.copy_(self._host, non_blocking=True)


class Fetch:
    """Copies tensors from a device to the host, with one copy into one block of pinned memory.

    Each call reuses the memory.

    Args:
        accelerator: Accelerator of the device.
        device: The device.
    """

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device
        self._packing = Packing(())
        self._fetched: tuple[torch.Tensor, ...] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the tensors on the host, valid until the next call; wait for one event."""
        fetched = self.start(tensors)
        self.wait()
        return fetched

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Start the copy; return the tensors on the host, which are valid after `wait`."""
        if forms_of(tensors) != self._packing.forms:
            self._allocate(tensors)
        if len(tensors) == 1:
            self._fetched[0].copy_(tensors[0], non_blocking=True)
        elif tensors:
            for packed, tensor in zip(self._packed, tensors, strict=True):
                packed.copy_(tensor)
            self._host.copy_(self._block, non_blocking=True)
        return self._fetched

    def _allocate(self, tensors: Sequence[torch.Tensor]) -> None:
        packing = self._packing = Packing(tensors)
        self._host = self._accelerator.pinned([packing.bytes], torch.uint8)
        self._fetched = packing.views(self._host)
        if len(tensors) > 1:  # a single tensor is copied directly
            self._block = torch.empty(packing.bytes, dtype=torch.uint8, device=self._device)
            self._packed = packing.views(self._block)

    def wait(self) -> None:
        """Wait until the current stream has finished all queued work."""
        self._accelerator.mark(soon=True).synchronize()
