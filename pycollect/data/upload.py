"""Copies between host and device: several tensors at once, and batches while others are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from pycollect._core import CudaError, SharedSlabPool, Slab
from pycollect.data.devices import Accelerator, Event, PartialUpload, accelerator
from pycollect.data.extras import with_extras, without_extras
from pycollect.data.layout import Key
from pycollect.data.slabs import to_tensordict
from pycollect.data.tensordicts import flatten, restore_nested
from pycollect.errors import warn_user

_ALIGNMENT = 64  # bytes; enough for any dtype, a device's widest loads, and a cache line


class Packing:
    """Layout of tensors in one block of bytes: shapes with dtypes (`forms`), and `offsets`."""

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
    """Copies `sources` to a device, with one copy of one block of pinned memory.

    Each `stage` reads the sources again. The memory of `mirrors`, the tensors on the device, stays
    the same.
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


Tensors = dict[Key, torch.Tensor]
Allocate = Callable[[int], npt.NDArray[np.uint8]]

MAX_IN_FLIGHT = 2
"""Maximum number of slabs with pending copies; beyond it, the host waits for the oldest."""

MIN_PART_BYTES = 256 << 10
"""Minimum size in bytes of a part that is sent before the rest of its slab."""

MAX_AHEAD = 4
"""Maximum number of batches on the device that the current stream has not reached yet.

Beyond it, the host waits for the stream. Otherwise a program that only queues work would fill the
device's memory with batches.
"""


class DeviceUploader:
    """Uploads the slabs of batches to a device.

    A slab is sent in one copy, or in several if `send` has already sent parts of it. The copy is
    concurrent to earlier work of the device's current stream. That stream waits for the copy, but
    the host does not. The slab is held until the host memory has been read, so that it is not
    overwritten before.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._in_flight: deque[tuple[object, Event]] = deque()  # owner of the memory, end of copy
        self._partial: WeakKeyDictionary[Slab, PartialUpload] = WeakKeyDictionary()
        self._handed_over: deque[Event] = deque()  # in the current stream, before each batch
        self._has_warned = False

    @property
    def device(self) -> torch.device:
        return self._accelerator.device

    def allocate(self, bytes: int) -> npt.NDArray[np.uint8]:
        """Return host memory for slabs that allows fast, asynchronous copies."""
        return self._accelerator.slab_memory(bytes)

    def allocate_once(self, bytes: int) -> npt.NDArray[np.uint8]:
        """Return such memory for a size that may not recur, from torch's pool of pinned memory."""
        memory: npt.NDArray[np.uint8] = self._accelerator.pinned([bytes], torch.uint8).numpy()
        return memory

    def pin(self, pool: SharedSlabPool) -> bool:
        """Pin the slabs that other processes write; return whether that succeeded.

        Warn the first time that the driver refuses.
        """
        try:
            return self._accelerator.pin(pool)
        except CudaError as error:
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    "the workers' shared memory could not be pinned, so each batch is copied once "
                    f"more on the host: {error}"
                )
            return False

    def send(self, slab: Slab, parts: Iterable[torch.Tensor]) -> None:
        """Send some parts of a slab, which is passed to `upload` later or dropped, in advance.

        The parts are contiguous, disjoint views that must not be written any more. Parts smaller
        than `MIN_PART_BYTES` are sent by `upload`.
        """
        large = [part for part in parts if part.nbytes >= MIN_PART_BYTES]
        if large and slab not in self._partial:
            self._retire()
            partial = self._accelerator.begin(slab.bytes)
            if partial is not None:
                self._partial[slab] = partial
        if slab in self._partial:
            host = torch.from_numpy(slab.array())
            for part in large:
                start = part.data_ptr() - host.data_ptr()
                span = slice(start, start + part.nbytes)
                self._accelerator.send(host, self._partial[slab], span)

    def upload(
        self,
        slab: Slab,
        tensors: Mapping[Key, torch.Tensor],
        finish: Callable[[Tensors], Tensors] | None = None,
    ) -> Tensors:
        """Return the tensors of a slab on the device, ready for its current stream."""
        self._retire()
        host = torch.from_numpy(slab.array())
        start = host.data_ptr()
        places = {key: (leaf.data_ptr() - start, leaf) for key, leaf in tensors.items()}
        return self._upload(slab, host, places, finish, self._partial.pop(slab, None))

    def gather(self, tensors: Mapping[Key, torch.Tensor]) -> Tensors:
        """Return tensors of the host, which are not in a slab, on the device.

        They are first copied into one block of pinned memory, so that one copy suffices.
        """
        self._retire()
        packing = Packing(tensors.values())
        host = self._accelerator.pinned([packing.bytes], torch.uint8)
        pairs = zip(packing.offsets, tensors.items(), strict=True)
        places = {key: (offset, leaf) for offset, (key, leaf) in pairs}
        for key, view in _views(host, places).items():
            view.copy_(tensors[key])
        return self._upload(host, host, places)

    def _upload(
        self,
        holder: object,
        host: torch.Tensor,
        places: Mapping[Key, tuple[int, torch.Tensor]],
        finish: Callable[[Tensors], Tensors] | None = None,
        partial: PartialUpload | None = None,
    ) -> Tensors:
        def lay_out(target: torch.Tensor) -> Tensors:
            views = _views(target, places)
            return views if finish is None else finish(views)

        result, copied, ready = self._accelerator.upload(host, lay_out, partial)
        self._in_flight.append((holder, copied))
        blocks = {leaf.untyped_storage().data_ptr(): leaf for leaf in result.values()}
        self._handed_over.append(self._accelerator.hand_over(blocks.values(), ready))
        return result

    def _retire(self) -> None:
        """Release slabs whose copies have ended; wait if too many copies or batches are pending."""
        if len(self._handed_over) >= MAX_AHEAD:
            self._handed_over.popleft().synchronize()
        while self._in_flight:
            _, copied = self._in_flight[0]
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                copied.synchronize()
            elif not copied.query():
                return
            self._in_flight.popleft()

    def close(self) -> None:
        """Wait for pending copies, and release their slabs."""
        while self._in_flight:
            self._in_flight[0][1].synchronize()
            self._in_flight.popleft()
        self._partial.clear()
        self._accelerator.drain()  # pending parts also hold their slabs


def _views(memory: torch.Tensor, places: Mapping[Key, tuple[int, torch.Tensor]]) -> Tensors:
    """Return views of a block, each at an offset, with the shape and dtype of another tensor."""
    return {
        key: view_at(memory, offset, leaf.shape, leaf.dtype)
        for key, (offset, leaf) in places.items()
    }


class Uploads:
    """The uploaders of all devices to which batches are sent."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, DeviceUploader] = {}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(self._by_device)

    def to(self, device: torch.device) -> DeviceUploader:
        """Return the uploader of a device; make it if there is none."""
        if device not in self._by_device:
            self._by_device[device] = DeviceUploader(accelerator(device))
        return self._by_device[device]

    def uploader_for(self, place: torch.device) -> DeviceUploader | None:
        """Return the uploader of a device, or ``None`` for the CPU."""
        return None if place.type == "cpu" else self.to(place)

    def moved(
        self, td: TensorDictBase, place: torch.device, reported: torch.device | None
    ) -> TensorDictBase:
        """Return a TensorDict that is not in a slab on a device; `reported`: its ``td.device``."""
        if place.type == "cpu":
            return td
        uploader = self.to(place)
        dense, extras_batch = without_extras(td)
        leaves, nested = flatten(dense)
        size = tuple(td.batch_size)
        result: TensorDictBase = to_tensordict(uploader.gather(leaves), size, uploader.device)
        restore_nested(result, nested, size, len(size))
        result = with_extras(result, extras_batch)
        return result if reported is not None else result.clear_device_()

    def close(self) -> None:
        for uploader in self._by_device.values():
            uploader.close()
