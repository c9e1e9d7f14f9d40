"""CUDA availability, and copies from host memory to a device.

No CUDA toolkit is needed: the core opens the driver's library at the first call.
"""

from __future__ import annotations

from typing import Any

import torch

from pycollect._core import CudaError, Registration, Slab, Upload, cuda_why_not
from pycollect._core import Uploader as _Uploader

__all__ = ["CudaError", "Registration", "Upload", "Uploader", "available", "why_not"]


def available() -> bool:
    """Return whether an NVIDIA driver and at least one device are present."""
    return not why_not()


def why_not() -> str:
    """Return the reason why CUDA is not available here; an empty string if it is.

    The answer is determined once per process. For tests, ``PYCOLLECT_CUDA_LIBRARY`` replaces
    libcuda.so.1.
    """
    return cuda_why_not()


def is_torchs() -> bool:
    """Return whether torch uses the CUDA that was found here, and not AMD's ROCm."""
    return torch.version.cuda is not None and available()


class Uploader:
    """Copy pinned host memory to a device while host and device do other work.

    Copies run on their own stream, in the order of the calls. The stream that uses a copy waits for
    it; the host does not. A source is held until the host has seen its copy complete, so a slab
    returns to its pool only when it can be written again. Thread-safe.

    Args:
        device: A CUDA device: "cuda", "cuda:1", ... Without an index, the current device is used.

    Attributes:
        device: The device, with its index.
        stream: The stream of the copies.

    Raises:
        ValueError: If `device` is not a CUDA device or does not exist.
        CudaError: If CUDA is not available; the message has the reason.
    """

    def __init__(self, device: torch.device | str) -> None:
        place = torch.device(device)
        if place.type != "cuda":
            raise ValueError(f"device: expected a CUDA device, got {str(device)!r}")
        if reason := why_not():
            raise CudaError(f"CUDA is not available: {reason}")
        index = torch.cuda.current_device() if place.index is None else place.index
        self.device = torch.device("cuda", index)
        self._core = _Uploader(index)
        self.stream: Any = torch.cuda.ExternalStream(self._core.stream, self.device)  # type: ignore[no-untyped-call]

    def empty(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized device memory that an upload can write without waiting.

        torch allocates the memory for the stream of the copies. Earlier users of the memory precede
        the copy on this stream, or torch has waited for them.

        Args:
            shape: Shape of the tensor.
            dtype: Data type of the tensor.

        Returns:
            A tensor on `device`.
        """
        with torch.cuda.stream(self.stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def upload(
        self,
        source: Slab | torch.Tensor,
        target: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
        after: torch.cuda.Stream | None = None,
    ) -> Upload:
        """Start a copy of `source` to `target`.

        Args:
            source: A slab or a tensor with contiguous host memory. If it is neither pinned nor
                registered, the driver first copies it on the host. It is held until the copy is
                complete on the host.
            target: A contiguous tensor on this device with the same number of bytes. Allocate it
                with `empty`, or see `after`.
            stream: The stream that uses `target`: its later work waits for the copy, and torch does
                not reuse the memory before this work is done. Defaults to ``None``: the current
                stream.
            after: The copy waits for the work queued on this stream so far. Pass it if that work
                still uses `target`. Defaults to ``None``: the copy does not wait.

        Returns:
            The copy, with the methods ``done()``, ``wait()`` and ``hold_back(stream)``.

        Raises:
            ValueError: If `source` or `target` is not as described.
            CudaError: If the driver refuses the copy.
        """
        data: Any = source.array() if isinstance(source, Slab) else source
        if target.device != self.device or not target.is_contiguous():
            raise ValueError(
                f"target: expected a contiguous tensor on {self.device}, got one on "
                f"{target.device} with strides {target.stride()}"
            )
        if data.nbytes != target.nbytes:
            raise ValueError(
                f"target: expected {data.nbytes} bytes, the size of source, got {target.nbytes}"
            )
        user = torch.cuda.current_stream(self.device) if stream is None else stream
        target.record_stream(user)
        return self._core.upload(
            data, target.data_ptr(), user.cuda_stream, None if after is None else after.cuda_stream
        )

    def release_finished(self) -> int:
        """Release the sources of completed copies and return the number of copies in progress."""
        return self._core.release_finished()

    def wait(self) -> None:
        """Sleep until all copies are complete."""
        self._core.wait()
