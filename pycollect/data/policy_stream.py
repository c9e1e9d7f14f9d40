"""A separate device stream for a policy, so that acting does not wait for the learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_HIGH_PRIORITY = -1  # kernels of this stream are scheduled before those of other streams


class PolicyStream:
    """The stream of the policy's device on which a collector makes all its steps.

    In each step, the host waits for the policy's actions. On the learner's stream, it would also
    wait for all work that the learner has queued, so the policy has a separate stream. Events order
    the two streams; the host does not wait for these events.

    - `collecting` makes the policy act after the work of the caller's current stream, such as an
      optimizer step. The current stream continues after the batch. With `concurrent`, the policy
      does not wait.
    - `ordered` is for writing weights or states that the policy reads. The policy's stream writes
      them after the current stream's work so far, and the current stream continues after them. If
      another thread calls the policy at that time, a part of that call may use new weights.

    Memory that is allocated inside these contexts belongs to the policy's stream. The caller's
    stream waits at the end of each batch, so it may use such memory; `hand_over` is for tensors
    that the caller keeps.

    Thread-safe. The current stream is that of the calling thread.

    Args:
        device: Device of the policy, with its index. Nothing happens on the CPU, and on devices
            without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._module: Any = getattr(torch, device.type, object)
        if device.type != "cpu" and hasattr(self._module, "Stream"):
            self._stream = self._module.Stream(device, priority=_HIGH_PRIORITY)
            self._stream.wait_stream(self._current())  # it initialized weights and states

    def _current(self) -> Any:
        return self._module.current_stream(self._device)

    def on_stream(self) -> AbstractContextManager[None]:
        """Run the block on the policy's stream."""
        if self._stream is None or self._current() == self._stream:
            return nullcontext()
        return self._on_stream()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        before = torch.device(self._device.type, self._module.current_device())
        with self._module.stream(self._stream), self._module.device(before):
            yield

    def collecting(self, concurrent: bool = False) -> AbstractContextManager[None]:
        """Run the block on the policy's stream; the current stream continues after it.

        Args:
            concurrent: Do not wait for the current stream's work so far (default: ``False``).
        """
        return nullcontext() if self._stream is None else self._run_ordered(not concurrent)

    def ordered(self) -> AbstractContextManager[None]:
        """Run the block on the policy's stream, in the order of the current stream's work."""
        return self.collecting()

    @contextmanager
    def _run_ordered(self, follows: bool) -> Iterator[None]:
        current = self._current()
        if follows:
            self._stream.wait_stream(current)
        try:
            with self._on_stream():
                yield
        finally:
            current.wait_stream(self._stream)

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream use and free tensors that were made on the policy's stream."""
        if self._stream is None:
            return
        current = self._current()
        current.wait_stream(self._stream)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(current)
