"""The policy's device: copies between it and the environments' device, and its own stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pycollect.data.devices import Accelerator, Event, accelerator
from pycollect.data.layout import Key
from pycollect.data.upload import Fetch, Send
from pycollect.policy.calling import CapturedWork, GraphPool
from pycollect.policy.program.compile import Act


class DeviceTransfer:
    """Copy a policy's inputs to its device, and its outputs to the device that records them.

    If one of the devices is the CPU, tensors go through pinned memory, in one copy each way. A step
    then waits for a single event, after all copies of outputs were requested.

    Args:
        output_device: Device on which outputs are recorded and environments take actions.
        explicit_device: The caller has passed the policy's device (default: ``False``).

    Attributes:
        tensordict_device: Value of ``td.device`` for a policy that takes a TensorDict.
    """

    def __init__(
        self, device: torch.device, output_device: torch.device, explicit_device: bool = False
    ) -> None:
        self.device, self.output_device = device, output_device
        self.tensordict_device = device if explicit_device or device.type != "cpu" else None
        self._send: Send | None = None  # copies the inputs on the host
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []  # mirrors and their sources
        self._accelerator: Accelerator | None = None
        self._fetch: Fetch | None = None
        self._stored: list[tuple[int, torch.Tensor]] = []  # places of outputs and their targets
        self._inputs_sent: Event | None = None  # end of the copies from pinned memory
        if device.type != "cpu":
            self.use(accelerator(device))

    def use(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._fetch = Fetch(accelerator, self.device) if self.output_device.type == "cpu" else None

    @property
    def is_separate(self) -> bool:
        """Whether the policy's device differs from the device of recorded outputs."""
        return self.device != self.output_device

    def store_outputs(self, places: Mapping[int, torch.Tensor]) -> None:
        """Also write outputs by position to these tensors, which the next step reads."""
        self._stored = list(places.items())

    def is_needed(self, inputs: Iterable[torch.Tensor]) -> bool:
        """Return whether any input or output has to be copied between devices."""
        return self.is_separate or not all(map(self._is_on_device, inputs))

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, copy=True)

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return copies of host tensors on the policy's device, made by one copy.

        The copy is queued on the device's current stream, without waiting for it. Torch reuses the
        pinned memory only after the copy has ended.
        """
        assert self._accelerator is not None, "send: expected a policy on another device"
        send = Send(tensors, self._accelerator, self.device)
        send.stage()
        send.send()
        return send.mirrors

    def mirrors(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return tensors on the policy's device that `wrap` and `capture` keep equal to these.

        A tensor that is on the policy's device already is returned itself.
        """
        by_id = {id(source): source for source in tensors.values()}
        remote = [source for source in by_id.values() if not self._is_on_device(source)]
        staged = [source for source in remote if self._is_staged(source)]
        others = [source for source in remote if not self._is_staged(source)]
        self._send = None
        if staged and self._accelerator is not None:
            self._send = Send(staged, self._accelerator, self.device)
        self._others = [(torch.empty_like(source, device=self.device), source) for source in others]
        copies = [] if self._send is None else list(self._send.mirrors)
        copies += [mirror for mirror, _ in self._others]
        pairs = zip((*staged, *others), copies, strict=True)
        by_source = {id(source): copy for source, copy in pairs}
        return {key: by_source.get(id(source), source) for key, source in tensors.items()}

    def _is_staged(self, source: torch.Tensor) -> bool:
        """Return whether copies of the tensor go through pinned memory."""
        return source.device.type == "cpu" and self._accelerator is not None

    @property
    def can_capture(self) -> bool:
        """Whether a step and its copies between host and device can be one graph."""
        return self._fetch is not None and not self._others

    def capture(self, act: Act, warmup: int = 2, pool: GraphPool | None = None) -> Act:
        """Return `act` as `wrap` does, with the copies of inputs and outputs in one CUDA graph.

        Requires `can_capture`. `act` calls the policy on the mirrors of its inputs; for `pool` see
        `CapturedWork`. At least one step, `warmup`, precedes the capture.
        """
        fetch, inputs = self._fetch, self._send
        assert fetch is not None, "capture: expected outputs that go to the host"

        def step() -> tuple[torch.Tensor, ...]:
            if inputs is not None:
                inputs.send()
            outputs = act()
            fetched = fetch.start(outputs)
            self._store(outputs)
            return fetched

        work = CapturedWork(step, self.device, max(warmup, 1), pool)

        def act_on_device() -> tuple[torch.Tensor, ...]:
            if inputs is not None:
                inputs.stage()
            fetched: tuple[torch.Tensor, ...] = work()
            fetch.wait()
            return fetched

        return act_on_device

    def wrap(self, act: Act) -> Act:
        """Return `act` with copies of its inputs before, and of its outputs after each call.

        The outputs are on the output device, and valid until the next call.
        """

        def act_on_device() -> tuple[torch.Tensor, ...]:
            self._send_inputs()
            return self.fetch(act())

        return act_on_device

    def _send_inputs(self) -> None:
        """Copy the inputs to the policy's device, after the last copy from pinned memory ended."""
        if self._inputs_sent is not None:
            self._inputs_sent.synchronize()
        if self._send is not None:
            self._send.stage()
            self._send.send()
        for mirror, source in self._others:
            mirror.copy_(source)
        # To fetch outputs, a step waits for the device, so the copies of its inputs have ended.
        if self._accelerator is not None and self._fetch is None:
            self._inputs_sent = (
                self._accelerator.mark(soon=True) if self._send is not None else None
            )

    def fetch(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs on the output device; wait for them if it is the CPU."""
        if self._fetch is None:
            fetched = tuple(out.to(self.output_device, non_blocking=True) for out in outputs)
            self._store(outputs)
            return fetched
        fetched = self._fetch.start(outputs)
        self._store(outputs)
        self._fetch.wait()
        return fetched

    def _store(self, outputs: Sequence[torch.Tensor]) -> None:
        """Store outputs for the next step, after all copies of outputs were queued.

        Outputs may share memory with the targets, so they must be copied first.
        """
        for place, target in self._stored:
            target.copy_(outputs[place])


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
