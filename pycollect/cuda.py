"""CUDA by the core's own means: whether it is there, and copies to a device.

Nothing here needs a CUDA toolkit: the core opens the driver's library when it is first asked.
"""

from __future__ import annotations

from typing import Any

import torch

from pycollect._core import CudaError, Registration, Slab, Upload, cuda_why_not
from pycollect._core import Uploader as _Uploader

__all__ = ["CudaError", "Registration", "Upload", "Uploader", "available", "why_not"]


def available() -> bool:
    """Whether there is a driver of NVIDIA's and at least one device."""
    return not why_not()


def why_not() -> str:
    """Why CUDA cannot be used here; empty where it can.

    The answer is found once per process. ``PYCOLLECT_CUDA_LIBRARY`` names another library than
    libcuda.so.1, for tests.
    """
    return cuda_why_not()


def is_torchs() -> bool:
    """Whether torch's CUDA is the one that was found here, and not AMD's by the same name."""
    return torch.version.cuda is not None and available()


class Uploader:
    """Copies pinned host memory to a device, beside what host and device do meanwhile.

    Copies run on a stream of their own, in the order in which they are asked for. The stream that
    uses a copy waits for it; the host does not. A source is held until its copy is complete on the
    host, so that a slab goes back to its pool only when it can be written again. Thread-safe.

    Args:
        device: "cuda", "cuda:1", ...; the current one where no index is given.

    Attributes:
        device: with its index.
        stream: of the copies.

    Raises:
        ValueError: not a CUDA device, or there is no such one.
        CudaError: CUDA is not available, with the reason.
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
        """Device memory, uninitialised, that an upload may write without waiting for anything.

        It is torch's, taken for the copies' stream: what used the memory before is behind on that
        stream, or torch has waited for it.

        Args:
            shape: of the tensor.
            dtype: likewise.

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
        """Have `source` copied to `target`.

        Args:
            source: contiguous host memory, a slab's or a tensor's; pinned or registered, or the
                driver copies it on the host first. Held until the copy is complete on the host.
            target: contiguous, on this device, of as many bytes; from `empty`, or see `after`.
            stream: who uses `target`: its work from now on waits for the copy, and torch does not
                use the memory again before that work is done. Default: the current stream.
            after: the copy waits for what this stream was given so far, for a `target` that is
                still in use there.

        Returns:
            The copy: ``done()``, ``wait()``, ``hold_back(stream)``.

        Raises:
            ValueError: `source` or `target` is not as told.
            CudaError: the driver refuses.
        """
        data: Any = source.array() if isinstance(source, Slab) else source
        if target.device != self.device or not target.is_contiguous():
            raise ValueError(
                f"target: expected a contiguous tensor on {self.device}, got one on "
                f"{target.device} with strides {target.stride()}"
            )
        if data.nbytes != target.nbytes:
            raise ValueError(
                f"target: expected {data.nbytes} bytes, as source has, got {target.nbytes}"
            )
        user = torch.cuda.current_stream(self.device) if stream is None else stream
        target.record_stream(user)
        return self._core.upload(
            data,
            target.data_ptr(),
            user.cuda_stream,
            None if after is None else after.cuda_stream,
        )

    def release_finished(self) -> int:
        """Let go of the sources of complete copies; return how many copies are under way."""
        return self._core.release_finished()

    def wait(self) -> None:
        """Sleep until all copies are complete."""
        self._core.wait()
