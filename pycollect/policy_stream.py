"""A stream of its own for a policy whose process may train it, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_FIRST = -1  # priority of a stream: its kernels are scheduled before those of usual streams


class PolicyStream:
    """The stream of the policy's device that all of a collector's steps are given to.

    Each step of a policy waits, on the host, for its actions. On the learner's stream it would wait
    for everything that the learner has queued, too. So the policy has another stream, and the two
    are ordered by events, which the host does not wait for:

    - `collecting` makes the policy wait for what the caller's current stream was given before, as
      optimizer steps, and that stream wait for the policy at the end of the batch. A thread that
      collects beside a learner makes it wait for nothing: see `between`.
    - `between` is for writing weights or states that the policy reads. The writes are given to the
      policy's stream: they come after the current stream's work and between two of the policy's
      kernels, and the current stream goes on after them.

    Memory that is taken within belongs to the policy's stream. Since the caller's stream waits at
    the end of each batch, it may use such memory; `hand_over` is for tensors that it keeps.

    Thread-safe. The current stream is that of the calling thread.

    Args:
        device: of the policy, with its index. On the CPU, and on devices without streams, nothing happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type, None)
        self._own: Any = None
        if device.type != "cpu" and hasattr(self._module, "Stream"):
            self._own = self._module.Stream(device, priority=_FIRST)
            self._own.wait_stream(self._current())  # where weights and states were initialized

    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def apart(self) -> AbstractContextManager[None]:
        """Give the work within to the policy's stream."""
        if self._own is None or self._current() == self._own:
            return nullcontext()
        return self._apart()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        before = torch.device(self._device.type, self._module.current_device())
        with self._module.stream(self._own), self._module.device(before):
            yield

    def collecting(self, beside_learner: bool = False) -> AbstractContextManager[None]:
        """Give the work within to the policy's stream; the current stream goes on after it.

        Args:
            beside_learner: The policy does not wait for the current stream.
        """
        return nullcontext() if self._own is None else self._ordered(not beside_learner)

    def between(self) -> AbstractContextManager[None]:
        """Give the work within to the policy's stream, after the current stream's work so far; the
        current stream goes on after it.
        """
        return nullcontext() if self._own is None else self._ordered(True)

    @contextmanager
    def _ordered(self, follows: bool) -> Iterator[None]:
        current = self._current()
        if follows:
            self._own.wait_stream(current)
        try:
            with self._apart():
                yield
        finally:
            current.wait_stream(self._own)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream use and free tensors that were made on the policy's stream."""
        if self._own is None:
            return
        current = self._current()
        current.wait_stream(self._own)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(current)
