"""Batches on their way to a device: one copy each, while the batch before is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from pycollect._core import CudaError, SharedSlabPool, Slab
from pycollect.data.devices import Accelerator, Begun, Event, accelerator
from pycollect.data.extras import with_extras, without_extras
from pycollect.data.layout import Key
from pycollect.data.slabs import to_tensordict
from pycollect.data.tensordicts import flatten, refuse, restore_nested
from pycollect.data.transfer import Packing, view_at
from pycollect.errors import warn_user

Tensors = dict[Key, torch.Tensor]
Allocate = Callable[[int], npt.NDArray[np.uint8]]

MOST_IN_FLIGHT = 2
"""Slabs whose copies may be under way; past that, the host waits for the oldest."""

LEAST_PART = 256 << 10
"""Bytes of a leaf that one worker writes, from which on they travel by themselves."""

MOST_AHEAD = 4
"""Batches that may wait on the device for the stream that uses them. Past that, the host waits for
the stream: one that queues work without end would fill the device's memory with batches.
"""


class DeviceUploader:
    """Carries the slabs of batches to a device.

    The slab goes in one copy, or as far as it was sent before in several, beside the device's
    current stream, which waits for it without holding the host up: what the stream was given before
    goes on meanwhile. A slab is held until
    its copy has ended on the host's side, so that nobody writes into it before.

    Args:
        accelerator: of the device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._in_flight: deque[tuple[object, Event]] = deque()  # what holds the memory
        self._begun: WeakKeyDictionary[Slab, Begun] = WeakKeyDictionary()
        self._handed_over: deque[Event] = deque()  # where the current stream got each batch
        self._has_warned = False

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._accelerator.device

    def allocate(self, bytes: int) -> npt.NDArray[np.uint8]:
        """Host memory for slabs, of which copies run at the bus's speed and beside other work."""
        return self._accelerator.slab_memory(bytes)

    def allocate_once(self, bytes: int) -> npt.NDArray[np.uint8]:
        """The same for a size that may not come again: torch keeps it, rounded up, and lends it to
        whoever fits.
        """
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
        """Have parts of a slab travel before the rest of it is there.

        Args:
            slab: that `upload` is to be called with, or that is dropped.
            parts: contiguous views of it, apart from each other and never all of it. They are not
                written any more; those below `LEAST_PART` bytes wait for the rest.
        """
        large = [own for own in parts if own.nbytes >= LEAST_PART]
        if large and slab not in self._begun:
            self._retire()
            begun = self._accelerator.begin(slab.bytes)
            if begun is not None:
                self._begun[slab] = begun
        if slab in self._begun:
            host = torch.from_numpy(slab.array())
            for own in large:
                at = own.data_ptr() - host.data_ptr()
                self._accelerator.send(host, self._begun[slab], slice(at, at + own.nbytes))

    def upload(
        self,
        slab: Slab,
        tensors: Mapping[Key, torch.Tensor],
        finish: Callable[[Tensors], Tensors] | None = None,
    ) -> Tensors:
        """The tensors of a slab on the device, ready for its current stream.

        Args:
            slab: not to be written any more by the caller.
            tensors: contiguous views of it.
            finish: what becomes of them there, casts for one, before they are used.
        """
        self._retire()
        host = torch.from_numpy(slab.array())
        start = host.data_ptr()
        places = {key: (own.data_ptr() - start, own) for key, own in tensors.items()}
        return self._upload(slab, host, places, finish, self._begun.pop(slab, None))

    def gather(self, tensors: Mapping[Key, torch.Tensor]) -> Tensors:
        """Tensors of the host that lie in no slab, on the device: side by side in pinned memory
        first, they go in one copy, as a slab does.
        """
        self._retire()
        packing = Packing(tensors.values())
        host = self._accelerator.pinned([packing.bytes], torch.uint8)
        pairs = zip(packing.offsets, tensors.items(), strict=True)
        places = {key: (at, own) for at, (key, own) in pairs}
        for key, view in _views(host, places).items():
            view.copy_(tensors[key])
        return self._upload(host, host, places)

    def _upload(
        self,
        holder: object,
        host: torch.Tensor,
        places: Mapping[Key, tuple[int, torch.Tensor]],
        finish: Callable[[Tensors], Tensors] | None = None,
        begun: Begun | None = None,
    ) -> Tensors:
        def lay_out(target: torch.Tensor) -> Tensors:
            views = _views(target, places)
            return views if finish is None else finish(views)

        result, copied, ready = self._accelerator.upload(host, lay_out, begun)
        self._in_flight.append((holder, copied))
        blocks = {own.untyped_storage().data_ptr(): own for own in result.values()}
        self._handed_over.append(self._accelerator.hand_over(blocks.values(), ready))
        return result

    def _retire(self) -> None:
        """Let slabs go whose copies have ended; wait where too many copies, or batches, wait."""
        if len(self._handed_over) >= MOST_AHEAD:
            self._handed_over.popleft().synchronize()
        while self._in_flight:
            _, copied = self._in_flight[0]
            if len(self._in_flight) >= MOST_IN_FLIGHT:
                copied.synchronize()
            elif not copied.query():
                return
            self._in_flight.popleft()

    def close(self) -> None:
        """Wait for the copies that are under way, and let their slabs go."""
        while self._in_flight:
            self._in_flight[0][1].synchronize()
            self._in_flight.popleft()
        self._begun.clear()
        self._accelerator.drain()  # parts hold their slabs, too


def _views(memory: torch.Tensor, places: Mapping[Key, tuple[int, torch.Tensor]]) -> Tensors:
    """Tensors in that memory, of bytes, each at its offset and of another one's form."""
    return {key: view_at(memory, at, own.shape, own.dtype) for key, (at, own) in places.items()}


class Uploads:
    """What brings batches to each device that they go to."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, DeviceUploader] = {}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where batches are known to go."""
        return tuple(self._by_device)

    def to(self, device: torch.device) -> DeviceUploader:
        """What brings them to that device, one for all."""
        if device not in self._by_device:
            self._by_device[device] = DeviceUploader(accelerator(device))
        return self._by_device[device]

    def uploader_for(self, place: torch.device) -> DeviceUploader | None:
        """What brings batches to that place; None: batches lie there already, on the CPU."""
        return None if place.type == "cpu" else self.to(place)

    def moved(
        self, td: TensorDictBase, place: torch.device, reported: torch.device | None
    ) -> TensorDictBase:
        """A TensorDict that lies in no slab, at its place.

        Args:
            reported: what ``td.device`` is to say.

        Raises:
            TypeError: an entry that is neither a strided tensor nor one of the extras.
        """
        if place.type == "cpu":
            return td
        uploader = self.to(place)
        dense, parcel = without_extras(td)
        leaves, nested, others = flatten(dense)
        refuse(others)
        size = tuple(td.batch_size)
        there: TensorDictBase = to_tensordict(uploader.gather(leaves), size, uploader.device)
        restore_nested(there, nested, size, len(size))
        if parcel:
            there = with_extras(there, parcel)
        return there if reported is not None else there.clear_device_()

    def close(self) -> None:
        """Wait for what is under way."""
        for batches in self._by_device.values():
            batches.close()
