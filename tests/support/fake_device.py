"""A fake device: it uses host memory and runs each copy when it is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pycollect._core import SharedSlabPool
from pycollect.data.devices import PartialUpload
from pycollect.policy.device import DeviceTransfer

DEVICE = torch.device("cuda", 0)


class FakeEvent:
    """An event that is done once the preceding work is done."""

    def __init__(self, device: FakeDevice, work: list[Callable[[], object]]) -> None:
        self.device, self.work, self.done = device, work, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.device.log.append("host waits")
        if self.device.is_lost:
            raise RuntimeError("the device is lost")
        self.device.interrupts -= 1
        if self.device.interrupts == 0:
            raise KeyboardInterrupt
        self.device.run(self)


class FakeDevice:
    """An accelerator that delays its copies and logs its operations.

    Attributes:
        log: "copy", "host waits" and "stream waits", in order.
        lazy: run copies when they are waited for; otherwise run them immediately.
    """

    def __init__(self, lazy: bool = True) -> None:
        self.device = DEVICE
        self.lazy = lazy
        self.log: list[str] = []
        self.fails: Exception | None = None
        self.is_lost = False
        self.interrupts = 0  # number of waits until the host is interrupted; 0: never
        self._events: deque[FakeEvent] = deque()
        self._rooms: list[torch.Tensor] = []  # pinned memory, kept to reserve its addresses

    def note_copies(self, patch: pytest.MonkeyPatch) -> None:
        """Log all further asynchronous copies from and to pinned memory, with their bytes.

        Entries look like "up 12" or "down 8". These copies run immediately.
        """
        plain = torch.Tensor.copy_

        def copied(own: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
            if non_blocking:
                at = source.data_ptr()
                is_up = any(0 <= at - room.data_ptr() < len(room) for room in self._rooms)
                self.log.append(f"{'up' if is_up else 'down'} {own.nbytes}")
            return plain(own, source)

        patch.setattr(torch.Tensor, "copy_", copied)

    @property
    def copies(self) -> list[str]:
        """Logged copies from and to pinned memory."""
        return [entry for entry in self.log if entry.startswith(("up", "down"))]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.log.append(f"pinned {tuple(shape)}")
        room = torch.empty(torch.Size(shape).numel() * dtype.itemsize + 64, dtype=torch.uint8)
        start = -room.data_ptr() % 64
        self._rooms.append(room)
        return room[start : room.numel() - 64 + start].view(dtype).view(tuple(shape))

    def slab_memory(self, bytes: int) -> npt.NDArray[np.uint8]:
        memory: npt.NDArray[np.uint8] = self.pinned([bytes], torch.uint8).numpy()
        return memory

    def mark(self, soon: bool = False) -> FakeEvent:
        event = FakeEvent(self, [])
        self._events.append(event)
        if not self.lazy:
            self.run(event)
        return event

    def begin(self, bytes: int) -> PartialUpload | None:
        return PartialUpload(torch.full([bytes], 0xEE, dtype=torch.uint8))

    def send(self, host: torch.Tensor, partial: PartialUpload, part: slice) -> None:
        self.log.append("part")
        event = FakeEvent(self, [lambda: partial.target[part].copy_(host[part])])
        self._events.append(event)
        partial.sent.append((part.start, part.stop))
        if not self.lazy:
            self.run(event)

    def upload(
        self,
        host: torch.Tensor,
        finish: Callable[[torch.Tensor], dict[Any, torch.Tensor]],
        partial: PartialUpload | None = None,
    ) -> tuple[dict[Any, torch.Tensor], FakeEvent, FakeEvent]:
        if self.fails is not None:
            raise self.fails
        self.log.append("copy")
        partial = partial or self.begin(len(host))
        assert partial is not None
        target, left = partial.target, partial.left()
        result = finish(target)

        def make() -> None:
            for part in left:
                target[part].copy_(host[part])
            for key, value in finish(target).items():
                result[key].copy_(value)

        event = FakeEvent(self, [make])
        self._events.append(event)
        if not self.lazy:
            self.run(event)
        return result, event, event

    def drain(self) -> None:
        self.run()

    def hand_over(self, tensors: Iterable[torch.Tensor], ready: FakeEvent) -> FakeEvent:
        before = self.mark()
        list(tensors)
        self.log.append("stream waits")
        return before

    def pin(self, pool: SharedSlabPool) -> bool:
        return False

    def run(self, last: FakeEvent | None = None) -> None:
        """Run all pending work up to this event, or all of it if `last` is ``None``."""
        while self._events:
            event = self._events.popleft()
            for work in event.work:
                work()
            event.done = True
            if event is last:
                return


class Elsewhere(DeviceTransfer):
    """Treat the policy's device as distinct from the CPU, although both share memory."""

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return False


def place_policies_on(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, kind: type[DeviceTransfer] = Elsewhere
) -> None:
    """Place every policy of this process on the device, but none of its environments."""

    def transfer(
        device_of_policy: torch.device, outputs: torch.device, explicit: bool = False
    ) -> DeviceTransfer:
        own = kind(device_of_policy, outputs)
        own.use(device)
        return own

    monkeypatch.setattr("pycollect.policy.runner.DeviceTransfer", transfer)
