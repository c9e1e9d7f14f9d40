"""Torch devices: availability, streams, events and pinned memory.

All device operations of this package go through this module. They use `torch.<device type>`, so
that accelerators other than CUDA also work if torch provides the same functions for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pycollect import cuda
from pycollect._core import CudaEvent, SharedSlabPool, Upload, host_memory

CPU = torch.device("cpu")


def is_available(kind: str) -> bool:
    """Return whether torch has an available device of a type."""
    return not why_not(torch.device(kind))


def named_device(name: str, value: Any) -> torch.device:
    """Return an argument as a device; raise a ValueError if it is not one."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{name}: expected a device, got {value!r} ({text})") from None


def check_available(name: str, device: torch.device) -> None:
    """Raise a ValueError, with the reason, if the device in an argument is not available."""
    if reason := why_not(device):
        raise ValueError(f"{name}: expected an available device, got {device}: {reason}")


def why_not(device: torch.device) -> str:
    """Return why a device is not available, or an empty string if it is available."""
    if device.type == "cpu":
        return ""
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "is_available"):
        return f"torch cannot store data on devices of type {device.type!r}"
    if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not module.is_available():
        return f"torch {torch.__version__} found no {device.type} device with a driver"
    count = module.device_count()
    if device.index is not None and device.index >= count:
        return f"the number of {device.type} devices is {count}"
    return ""


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of a device's global random generator, uint8 on the host.

    Return ``None`` for the CPU.
    """
    if device.type == "cpu":
        return None
    state: torch.Tensor = getattr(torch, device.type).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Set the state of a device's global random generator; do nothing for ``None``."""
    if state is not None:
        getattr(torch, device.type).set_rng_state(state, device)


def indexed(device: torch.device) -> torch.device:
    """Return the device as tensors report it: with its index, except for the CPU."""
    return device if device.type == "cpu" else torch.empty(0, device=device).device


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index, by default that of the thread's current device.

    Other processes and threads may have another current device.
    """
    module: Any = getattr(torch, device.type, None)
    if device.index is not None or not hasattr(module, "current_device") or device.type == "cpu":
        return device
    return torch.device(device.type, module.current_device())


class Event(Protocol):
    """A point in a stream of work on a device."""

    def query(self) -> bool:
        """Return whether all earlier work of the stream is done."""

    def synchronize(self) -> None:
        """Wait on the host until all earlier work of the stream is done."""


@dataclass
class PartialUpload:
    """A slab that has been uploaded in part."""

    target: torch.Tensor  # bytes of the whole slab on the device
    sent: list[tuple[int, int]] = field(default_factory=list)  # ranges sent; never the whole slab

    def left(self) -> list[slice]:
        """Return the ranges that were not sent yet."""
        ends = [0, *(end for _, end in sorted(self.sent))]
        starts = [*(first for first, _ in sorted(self.sent)), len(self.target)]
        gaps = zip(ends, starts, strict=True)
        return [slice(first, end) for first, end in gaps if first < end]


class _Done:
    """An event that is always done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Accelerator:
    """Operations of a device that uploads and transfers need.

    This class is for a device without streams in torch: every copy is synchronous, and no memory is
    pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # the device, with its index

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized pinned host memory, which the device accesses directly."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned host memory for slabs that are reused; torch may allocate more."""
        array: npt.NDArray[np.uint8] = self.pinned([bytes], torch.uint8).numpy()
        return array

    def mark(self, soon: bool = False) -> Event:
        """Return an event after all work that is queued on the current stream.

        Args:
            soon: Whether the host will wait for the event soon and only briefly, so that the thread
                may poll before it sleeps (default: ``False``).
        """
        module: Any = getattr(torch, self.device.type)
        module.synchronize()
        return _Done()

    def begin(self, bytes: int) -> PartialUpload | None:
        """Allocate a slab's memory on the device for `send`; ``None`` if parts are unsupported."""
        return None

    def send(self, host: torch.Tensor, partial: PartialUpload, part: slice) -> None:
        """Copy a part of a slab, concurrently to the current stream; see `upload` for `host`."""
        raise NotImplementedError

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        partial: PartialUpload | None = None,
    ) -> tuple[dict[Any, torch.Tensor], Event, Event]:
        """Copy host memory to the device, concurrently to the current stream.

        Args:
            host: Contiguous memory. If it is pinned, the copy is asynchronous, and the memory must
                not be written before the first event.
            finish: Makes the result from the copy, on the copying stream.
            partial: The parts that were already sent. Defaults to ``None``: no part.

        Returns:
            The result of `finish`, an event at the end of the copy, and an event at the end of
            `finish`.
        """
        result = finish(host.to(self.device))
        return result, _Done(), _Done()

    def drain(self) -> None:
        """Wait for all requested copies, and release the host memory that they read."""

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: Event) -> Event:
        """Let the current stream use tensors after `ready`; return an event of its prior work."""
        return _Done()

    def pin(self, pool: SharedSlabPool) -> bool:
        """Pin the memory of shared slabs; return ``False`` if the device does not support it."""
        return False


class StreamAccelerator(Accelerator):
    """A device with streams, such as CUDA or XPU."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        self.device = indexed(device)
        self._stream = self._module.Stream(self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def mark(self, soon: bool = False) -> Event:
        return self._record(self._module.current_stream(self.device), soon)

    def _record(self, stream: Any, soon: bool = False) -> Event:
        event: Event = stream.record_event()
        return event

    def begin(self, bytes: int) -> PartialUpload | None:
        # Memory that is allocated on the copying stream is reused in the order of that stream, so
        # the copy need not wait for the current stream.
        with self._module.stream(self._stream):
            return PartialUpload(torch.empty(bytes, dtype=torch.uint8, device=self.device))

    def send(self, host: torch.Tensor, partial: PartialUpload, part: slice) -> None:
        with self._module.stream(self._stream):
            self._copy(host[part], partial.target[part])
        partial.sent.append((part.start, part.stop))

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        partial: PartialUpload | None = None,
    ) -> tuple[dict[Any, torch.Tensor], Event, Event]:
        partial = partial or self.begin(len(host))
        assert partial is not None, "begin: expected memory on the device"
        with self._module.stream(self._stream):
            # Copies end in order, so the last event is the end of all copies.
            copied = [self._copy(host[part], partial.target[part]) for part in partial.left()][-1]
            try:
                result = finish(partial.target)
            except BaseException:
                copied.synchronize()  # the caller may free the host memory after the error
                raise
            return result, copied, self._record(self._stream)

    def _copy(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy on the copying stream, which is current; return an event at its end."""
        target.copy_(host, non_blocking=True)
        return self._record(self._stream)

    def drain(self) -> None:
        self._stream.synchronize()

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: Event) -> Event:
        before = self.mark()
        current = self._module.current_stream(self.device)
        self._wait_event(current, ready)
        for tensor in tensors:
            tensor.record_stream(current)
        return before

    def _wait_event(self, stream: Any, event: Event) -> None:
        stream.wait_event(event)


class CudaAccelerator(StreamAccelerator):
    """An NVIDIA device: the core's Uploader makes the copies on a separate stream.

    Events also come from the core. A query of a torch event would end the capture of a CUDA graph
    that another thread has begun in torch's default mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.cuda
        self._uploader = cuda.Uploader(device)
        self.device = self._uploader.device
        self._stream = self._uploader.stream

    def pin(self, pool: SharedSlabPool) -> bool:
        pool.pin(self.device.index)
        return True

    def drain(self) -> None:
        self._uploader.wait()

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        # torch's pinned memory would be rounded up to a power of two.
        return host_memory(self.device.index, bytes).array()

    def _record(self, stream: Any, soon: bool = False) -> Event:
        return _CoreEvent(CudaEvent(self.device.index, stream.cuda_stream, soon))

    def _wait_event(self, stream: Any, event: Event) -> None:
        assert isinstance(event, _CoreEvent)
        event.core.hold_back(stream.cuda_stream)

    def _copy(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        # The copying stream is the first to use the copy, because it makes casts.
        return _CoreEvent(self._uploader.upload(host, target, self._stream))


class _CoreEvent:
    """An event or an upload of the core as an `Event`."""

    def __init__(self, core: CudaEvent | Upload) -> None:
        self.core = core

    def query(self) -> bool:
        return self.core.done()

    def synchronize(self) -> None:
        self.core.wait()


_accelerators: dict[torch.device, Accelerator] = {}


def accelerator(device: torch.device) -> Accelerator:
    """Return the process-wide accelerator of an available device.

    A device without an index means torch's current device.
    """
    device = indexed(device)
    if device not in _accelerators:
        _accelerators[device] = _kind_of(device)(device)
    return _accelerators[device]


def _kind_of(device: torch.device) -> Callable[[torch.device], Accelerator]:
    if device.type == "cpu" or not hasattr(getattr(torch, device.type), "Stream"):
        return Accelerator
    return CudaAccelerator if device.type == "cuda" and cuda.is_torchs() else StreamAccelerator


@dataclass(frozen=True)
class Devices:
    """Requested devices of one worker; ``None`` if a device was not requested."""

    default: torch.device | None = None  # the argument `device`, the default of the others
    storing: torch.device | None = None
    env: torch.device | None = None
    policy: torch.device | None = None

    @property
    def reported(self) -> torch.device | None:
        """Value of ``td.device`` of a batch."""
        agreed = self.env if self.env == self.policy else None
        return self.storing or self.default or agreed

    @property
    def batch_device(self) -> torch.device | None:
        """Device of batches, or ``None`` for the environment's device."""
        return self.storing or self.default or self.env

    @property
    def env_device(self) -> torch.device | None:
        """Device of an environment that does not choose one itself."""
        return self.env or self.default

    @property
    def policy_device(self) -> torch.device | None:
        """Device of the policy, or ``None``."""
        return self.policy or self.default

    @property
    def worker_types(self) -> frozenset[str]:
        """Types of the devices that the worker itself uses."""
        devices = (self.env_device, self.policy_device)
        return frozenset(device.type for device in devices if device is not None)
