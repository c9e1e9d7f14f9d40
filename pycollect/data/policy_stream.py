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
    for everything that the learner has queued, too. So the policy has another stream, and events
    order the two. The host waits for none of these events.

    - `collecting`: the policy acts after the caller's current stream (an optimizer's step, for
      example), which goes on after the batch. Beside a learner the policy waits for nothing.
    - `between`: for writing weights or states that the policy reads. The policy's stream writes
      them after the current stream's work so far, and the current stream continues after them. In
      another thread's call of the policy, weights written meanwhile may be new for a part of it.

    Memory that is taken within belongs to the policy's stream. The caller's stream waits at the end
    of each batch, so it may use such memory; `hand_over` is for tensors that it keeps.

    Thread-safe. The current stream is that of the calling thread.

    Args:
        device: of the policy, with its index. On the CPU, and on devices without streams, nothing
            happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: Any = None
        self._module: Any = getattr(torch, device.type, object)
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
        return self.collecting()

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
