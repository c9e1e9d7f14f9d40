"""Torch's devices: whether they are there, their streams, events and pinned memory.

What this package asks of a device goes through here, by `torch.<device type>`, so that torch's
other accelerators are served where they have what CUDA has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pycollect import cuda
from pycollect._core import CudaEvent, SharedSlabPool, Upload, host_memory

CPU = torch.device("cpu")


def is_available(kind: str) -> bool:
    """Whether torch has devices of that type here."""
    return not why_not(torch.device(kind))


def named_device(name: str, value: Any) -> torch.device:
    """Return the device in an argument; raise ValueError if it is not a device."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{name}: expected a device, got {value!r} ({text})") from None


def check_here(name: str, device: torch.device) -> None:
    """Raise ValueError, with the reason, if the device in an argument is not available here."""
    if reason := why_not(device):
        raise ValueError(f"{name}: expected an available device, got {device}: {reason}")


def why_not(device: torch.device) -> str:
    """Return why a device is not available here; an empty string if it is."""
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
    """Where the device's global random generator stands, uint8 on the host; None for the CPU."""
    if device.type == "cpu":
        return None
    state: torch.Tensor = getattr(torch, device.type).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Put the device's global random generator there; None: leave it."""
    if state is not None:
        getattr(torch, device.type).set_rng_state(state, device)


def indexed(device: torch.device) -> torch.device:
    """The device as tensors on it name it: with its index, where it has one."""
    return device if device.type == "cpu" else torch.empty(0, device=device).device


def numbered(device: torch.device) -> torch.device:
    """The device with its index, which is the calling thread's current one where it names none.

    Other processes, and other threads, may have another current device.
    """
    module: Any = getattr(torch, device.type, None)
    if device.index is not None or not hasattr(module, "current_device") or device.type == "cpu":
        return device
    return torch.device(device.type, module.current_device())


class Event(Protocol):
    """A place in a stream of work on a device."""

    def query(self) -> bool:
        """Whether all before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait, on the host, until all before it is done."""
        ...


@dataclass
class Begun:
    """A slab of which parts are on their way to a device, or there.

    Attributes:
        target: of the whole slab, bytes.
        sent: the ranges that were sent, first and end, never all of it.
    """

    target: torch.Tensor
    sent: list[tuple[int, int]] = field(default_factory=list)

    def left(self) -> list[slice]:
        """What was not sent yet."""
        ends = [0, *(end for _, end in sorted(self.sent))]
        starts = [*(first for first, _ in sorted(self.sent)), len(self.target)]
        return [slice(*own) for own in zip(ends, starts, strict=True) if own[0] < own[1]]


class Accelerator(Protocol):
    """What uploads and crossings need of a device.

    Attributes:
        device: with its index.
    """

    device: torch.device

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, uninitialised, that the device reads and writes by itself."""
        ...

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        """The same, of exactly that size, for what is kept and used again."""
        ...

    def mark(self, soon: bool = False) -> Event:
        """The end of all work that was given to the current stream so far.

        Args:
            soon: The host is about to wait for it, and it is near: the thread may poll for a moment
                before it sleeps.
        """
        ...

    def begin(self, bytes: int) -> Begun | None:
        """Have a slab's place on the device, for `send`; None: it goes as a whole."""
        ...

    def send(self, host: torch.Tensor, begun: Begun, part: slice) -> None:
        """Copy that part of a slab beside the current stream; see `upload` for `host`."""
        ...

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        begun: Begun | None = None,
    ) -> tuple[dict[Any, torch.Tensor], Event, Event]:
        """Copy host memory to the device beside the current stream.

        Args:
            host: contiguous; asynchronous where it is pinned, to be left alone until the first
                event then.
            finish: what is made of the copy, on the copying stream.
            begun: what was sent of it already; None: nothing.

        Returns:
            What `finish` returned, the end of the copy, and the end of all.
        """
        ...

    def drain(self) -> None:
        """Wait for all copies that were asked for, and let the host memory go that they read."""
        ...

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: Event) -> Event:
        """Let the current stream use tensors of the copying one once they are ready.

        Returns:
            The end of what the current stream was given before.
        """
        ...

    def pin(self, pool: SharedSlabPool) -> bool:
        """Read shared slabs where they are from now on, as pinned memory; False: it cannot.

        Raises:
            CudaError: it should, but the driver refuses.
        """
        ...


class StreamAccelerator:
    """A device with streams, as CUDA's and XPU's are."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        self.device = indexed(device)
        self._stream = self._module.Stream(self.device)

    def pin(self, pool: SharedSlabPool) -> bool:
        """See :class:`Accelerator`; torch has no means for it."""
        return False

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Accelerator`."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        """See :class:`Accelerator`; torch may take more."""
        return _bytes_of(self.pinned([bytes], torch.uint8))

    def mark(self, soon: bool = False) -> Event:
        """See :class:`Accelerator`."""
        return self._record(self._module.current_stream(self.device), soon)

    def _record(self, stream: Any, soon: bool = False) -> Event:
        event: Event = stream.record_event()
        return event

    def begin(self, bytes: int) -> Begun | None:
        """See :class:`Accelerator`."""
        # Memory that is taken on the copying stream is used again in that stream's order, so that
        # the copy need not wait for what the current stream is doing.
        with self._module.stream(self._stream):
            return Begun(torch.empty(bytes, dtype=torch.uint8, device=self.device))

    def send(self, host: torch.Tensor, begun: Begun, part: slice) -> None:
        """See :class:`Accelerator`."""
        with self._module.stream(self._stream):
            self._copy(host[part], begun.target[part])
        begun.sent.append((part.start, part.stop))

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        begun: Begun | None = None,
    ) -> tuple[dict[Any, torch.Tensor], Event, Event]:
        """See :class:`Accelerator`."""
        begun = begun or self.begin(len(host))
        assert begun is not None, "begin: expected a place"
        with self._module.stream(self._stream):
            # Copies end in their order: the last one's end is that of all.
            copied = [self._copy(host[part], begun.target[part]) for part in begun.left()][-1]
            try:
                result = finish(begun.target)
            except BaseException:
                copied.synchronize()  # nobody will hold the host's memory any more
                raise
            return result, copied, self._record(self._stream)

    def _copy(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        """Have a copy made on the copying stream, which is the current one; its end."""
        target.copy_(host, non_blocking=True)
        return self._record(self._stream)

    def drain(self) -> None:
        """See :class:`Accelerator`."""
        self._stream.synchronize()

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: Event) -> Event:
        """See :class:`Accelerator`."""
        before = self.mark()
        current = self._module.current_stream(self.device)
        self._hold_back(current, ready)
        for tensor in tensors:
            tensor.record_stream(current)
        return before

    def _hold_back(self, stream: Any, event: Event) -> None:
        stream.wait_event(event)


class CudaAccelerator(StreamAccelerator):
    """A device of NVIDIA's: the core's Uploader makes the copies, on a stream of its own.

    Events are the core's, too: a thread that asks one of torch's ends the capture of a CUDA graph
    that another one has begun in torch's default mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.cuda
        self._uploader = cuda.Uploader(device)
        self.device = self._uploader.device
        self._stream = self._uploader.stream

    def pin(self, pool: SharedSlabPool) -> bool:
        """See :class:`Accelerator`."""
        pool.pin(self.device.index)
        return True

    def drain(self) -> None:
        """See :class:`Accelerator`."""
        self._uploader.wait()

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        """See :class:`Accelerator`; torch's pinned memory is rounded up to a power of two."""
        return host_memory(self.device.index, bytes).array()

    def _record(self, stream: Any, soon: bool = False) -> Event:
        return _CoreEvent(CudaEvent(self.device.index, stream.cuda_stream, soon))

    def _hold_back(self, stream: Any, event: Event) -> None:
        assert isinstance(event, _CoreEvent)
        event.own.hold_back(stream.cuda_stream)

    def _copy(self, host: torch.Tensor, target: torch.Tensor) -> Event:
        # The copying stream itself comes first to use the copy: casts are made there.
        return _CoreEvent(self._uploader.upload(host, target, self._stream))


class _CoreEvent:
    """An event of the core's, or the end of one of its copies, as an event of torch's."""

    def __init__(self, own: CudaEvent | Upload) -> None:
        self.own = own

    def query(self) -> bool:
        return self.own.done()

    def synchronize(self) -> None:
        self.own.wait()


class _Done:
    """The event of what is done when it is asked for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class PlainAccelerator:
    """A device of which torch shows no streams: every copy is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Accelerator`; ordinary memory here."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        """See :class:`Accelerator`; ordinary memory here."""
        return _bytes_of(self.pinned([bytes], torch.uint8))

    def mark(self, soon: bool = False) -> Event:
        """See :class:`Accelerator`; the end has come when this returns."""
        module: Any = getattr(torch, self.device.type)
        module.synchronize()
        return _Done()

    def begin(self, bytes: int) -> Begun | None:
        """See :class:`Accelerator`."""
        return None

    def send(self, host: torch.Tensor, begun: Begun, part: slice) -> None:
        """See :class:`Accelerator`; nothing is begun here."""

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        begun: Begun | None = None,
    ) -> tuple[dict[Any, torch.Tensor], Event, Event]:
        """See :class:`Accelerator`."""
        result = finish(host.to(self.device))
        return result, _Done(), _Done()

    def drain(self) -> None:
        """See :class:`Accelerator`; no copy is under way here."""

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: Event) -> Event:
        """See :class:`Accelerator`; nobody can tell the end here without waiting for it."""
        return _Done()

    def pin(self, pool: SharedSlabPool) -> bool:
        """See :class:`Accelerator`."""
        return False


def _bytes_of(memory: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = memory.numpy()
    return array


_accelerators: dict[torch.device, Accelerator] = {}


def accelerator(device: torch.device) -> Accelerator:
    """The accelerator of a device that is there; one for the whole process.

    Without an index it is the present one's.
    """
    device = indexed(device)
    if device not in _accelerators:
        _accelerators[device] = _kind_of(device)(device)
    return _accelerators[device]


def _kind_of(device: torch.device) -> Callable[[torch.device], Accelerator]:
    if device.type == "cpu" or not hasattr(getattr(torch, device.type), "Stream"):
        return PlainAccelerator
    return CudaAccelerator if device.type == "cuda" and cuda.is_torchs() else StreamAccelerator


@dataclass(frozen=True)
class Devices:
    """Where the parts of one worker are to lie; None where nobody told.

    Attributes:
        default: `device`, for what the others do not say.
        storing: batches.
        env: environments.
        policy: the policy.
    """

    default: torch.device | None = None
    storing: torch.device | None = None
    env: torch.device | None = None
    policy: torch.device | None = None

    @property
    def reported(self) -> torch.device | None:
        """What ``td.device`` of a batch says."""
        agreed = self.env if self.env == self.policy else None
        return self.storing or self.default or agreed

    @property
    def batch_device(self) -> torch.device | None:
        """Where batches are to lie; None: where the environment does."""
        return self.storing or self.default or self.env

    @property
    def env_device(self) -> torch.device | None:
        """Where the environment is to lie that says nothing itself."""
        return self.env or self.default

    @property
    def policy_device(self) -> torch.device | None:
        """Where the policy is to lie."""
        return self.policy or self.default

    @property
    def of_stepping(self) -> Devices:
        """Those of a worker whose policy is called elsewhere."""
        return replace(self, policy=None)

    @property
    def of_worker(self) -> frozenset[str]:
        """The types of the devices that a worker itself works with."""
        return frozenset(
            own.type for own in (self.env_device, self.policy_device) if own is not None
        )
