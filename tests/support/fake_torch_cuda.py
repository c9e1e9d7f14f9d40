"""The parts of `torch.cuda` that uploads use, over the fake driver in this process.

Device memory is host memory of torch's CPU tensors, whichever device is requested. Streams belong
to the fake driver and events are the core's, so their order and waits follow its calls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycollect import cuda
from pycollect._core import Memory, Registration
from pycollect.data.devices import CPU, CudaAccelerator

DEVICE = torch.device("cuda", 0)


class Driver:
    """The fake driver; calls run by name, with a current context."""

    def __init__(self) -> None:
        self.fake = ctypes.CDLL(os.environ["PYCOLLECT_CUDA_LIBRARY"])
        self.fake.fake_cuda_log.restype = ctypes.c_char_p
        self._context = ctypes.c_void_p()
        self._forgotten = 0

    def __call__(self, name: str, *arguments: Any) -> int:
        if not self._context:
            assert self.fake.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) == 0
        assert self.fake.cuCtxPushCurrent_v2(self._context) == 0
        result: int = getattr(self.fake, name)(*arguments)
        assert self.fake.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0
        return result

    def log(self, name: str = "cu") -> list[str]:
        """Return the calls since `forget` with this prefix."""
        calls = self.fake.fake_cuda_log().decode().splitlines()[self._forgotten :]
        return [call for call in calls if call.startswith(name)]

    def forget(self) -> None:
        """Clear the log."""
        self._forgotten += len(self.log(""))


driver = Driver()


class Stream:
    """A stream with this number; 0 is the learner's."""

    current: Stream

    def __init__(self, number: int, device: torch.device = DEVICE) -> None:
        self.cuda_stream, self.device = number, device


@contextmanager
def _made_current(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Pinned:
    """Torch's pinned memory: shared memory that is never unregistered."""

    def __init__(self) -> None:
        self._registrations: list[Registration] = []

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape)
        memory = Memory.share(max(size.numel() * dtype.itemsize, 1))
        self._registrations.append(Registration(memory, 0))
        return torch.from_numpy(memory.array())[: size.numel() * dtype.itemsize].view(dtype)


def install() -> CudaAccelerator:
    """Replace torch's CUDA by the fake one; return the accelerator that collectors will use."""
    plain_empty, pinned = torch.empty, Pinned()

    def empty(
        shape: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False
    ) -> Any:
        return pinned.empty(shape, dtype) if pin_memory else plain_empty(shape, dtype=dtype)

    Stream.current = Stream(0)
    for name, value in {
        "ExternalStream": Stream,
        "stream": _made_current,
        "current_stream": lambda _=None: Stream.current,
    }.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = None  # batches are CPU tensors, which the CUDA kernel cannot split
    torch.empty = empty  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    from pycollect.api import arguments as device_arguments
    from pycollect.data import upload

    assert cuda.available()
    accelerator = CudaAccelerator(DEVICE)
    accelerator._uploader.device = CPU
    device_arguments.check_available = lambda *_: None
    device_arguments.with_index = lambda own: own
    upload.accelerator = lambda _: accelerator  # type: ignore[assignment]
    return accelerator
