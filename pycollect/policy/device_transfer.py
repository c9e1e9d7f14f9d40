"""A policy on another device than the environment's data: what crosses, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycollect.data.devices import Accelerator, Event, accelerator
from pycollect.data.layout import Key
from pycollect.data.transfer import Fetch, Send
from pycollect.policy.calling import CapturedWork, GraphPool
from pycollect.policy.program.compile import Act


class Crossing:
    """Carries a policy's inputs to its device, and its outputs to where they are recorded.

    Nothing but these crosses. Where one side is the CPU, a step waits once, for one event, when the
    outputs have been asked for; what crosses goes through pinned memory, in one copy each way.

    Args:
        there: the policy's device.
        home: where outputs are recorded and environments take their actions.
        told: the caller named the policy's device.

    Attributes:
        shown: what ``td.device`` says to a policy that is given a TensorDict.
    """

    def __init__(self, there: torch.device, home: torch.device, told: bool = False) -> None:
        self.there, self.home = there, home
        self.shown = there if told or there.type != "cpu" else None
        self._send: Send | None = None  # of the inputs on the host
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []  # mirrors, and what they mirror
        self._accelerator: Accelerator | None = None
        self._fetch: Fetch | None = None
        self._kept: list[tuple[int, torch.Tensor]] = []  # places among the outputs, and where to
        self._carried: Event | None = None  # the end of the copies from pinned memory
        if there.type != "cpu":
            self.uses(accelerator(there))

    def uses(self, accelerator: Accelerator) -> None:
        """Cross to and from that device."""
        self._accelerator = accelerator
        self._fetch = Fetch(accelerator, self.there) if self.home.type == "cpu" else None

    @property
    def is_apart(self) -> bool:
        """Whether the policy lies elsewhere than what it returns is recorded."""
        return self.there != self.home

    def keep(self, places: Mapping[int, torch.Tensor]) -> None:
        """From now on a step also writes its outputs at these places there, for the next one.

        Args:
            places: tensors on the policy's device, by the place among what `act` returns.
        """
        self._kept = list(places.items())

    def is_needed(self, inputs: Iterable[torch.Tensor]) -> bool:
        """Whether the policy, or anything that it is given, lies elsewhere than the rest."""
        return self.is_apart or not all(map(self._is_there, inputs))

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.there

    def over(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of its own on the policy's device."""
        return tensor.detach().to(self.there, copy=True)

    def bring(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of tensors of the host on the policy's device, in one copy by its current stream.

        Nobody waits: torch lends the pinned memory again only when the copy has ended.
        """
        assert self._accelerator is not None, "bring: expected a policy on another device"
        send = Send(tensors, self._accelerator, self.there)
        send.stage()
        send.send()
        return send.mirrors

    def mirrors(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Tensors on the policy's device that `around` keeps equal to these.

        Those that are there already stand for themselves.
        """
        away = list({id(own): own for own in tensors.values() if not self._is_there(own)}.values())
        staged = [own for own in away if self._is_staged(own)]
        others = [own for own in away if not self._is_staged(own)]
        self._send = None
        if staged and self._accelerator is not None:
            self._send = Send(staged, self._accelerator, self.there)
        self._others = [(torch.empty_like(own, device=self.there), own) for own in others]
        copies = [] if self._send is None else list(self._send.mirrors)
        copies += [mirror for mirror, _ in self._others]
        by_source = {id(own): copy for own, copy in zip((*staged, *others), copies, strict=True)}
        return {key: by_source.get(id(source), source) for key, source in tensors.items()}

    def _is_staged(self, source: torch.Tensor) -> bool:
        """Whether it goes through pinned memory."""
        return source.device.type == "cpu" and self._accelerator is not None

    @property
    def can_capture(self) -> bool:
        """Whether a step from the host to a device and back can be one graph."""
        return self._fetch is not None and not self._others

    def captured(self, act: Act, warmup: int = 2, pool: GraphPool | None = None) -> Act:
        """As `around`, all that the device does captured as one graph: inputs over, `act`, outputs
        back. Only where `can_capture`.

        Args:
            warmup: steps before it is captured, at least one.
            pool: as of `CapturedWork`.
        """
        fetch, inputs = self._fetch, self._send
        assert fetch is not None, "captured: expected outputs that go to the host"

        def step() -> tuple[torch.Tensor, ...]:
            if inputs is not None:
                inputs.send()
            outputs = act()
            rooms = fetch.start(outputs)
            self._keep(outputs)
            return rooms

        work = CapturedWork(step, self.there, max(warmup, 1), pool)

        def act_there() -> tuple[torch.Tensor, ...]:
            if inputs is not None:
                inputs.stage()
            rooms: tuple[torch.Tensor, ...] = work()
            fetch.wait()
            return rooms

        return act_there

    def around(self, act: Act) -> Act:
        """`act` over the mirrors, its outputs at home: valid until the next call."""

        def act_there() -> tuple[torch.Tensor, ...]:
            self._carry()
            return self.back(act())

        return act_there

    def _carry(self) -> None:
        """Bring the inputs over. Pinned memory is written again when its last copy has ended."""
        if self._carried is not None:
            self._carried.synchronize()
        if self._send is not None:
            self._send.stage()
            self._send.send()
        for mirror, source in self._others:
            mirror.copy_(source)
        # Where outputs are fetched, they are waited for, and so are the inputs before them.
        if self._accelerator is not None and self._fetch is None:
            self._carried = self._accelerator.mark(soon=True) if self._send is not None else None

    def back(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs at home, when the device has come to them."""
        if self._fetch is None:
            rooms = tuple(out.to(self.home, non_blocking=True) for out in outputs)
            self._keep(outputs)
            return rooms
        rooms = self._fetch.start(outputs)
        self._keep(outputs)
        self._fetch.wait()
        return rooms

    def _keep(self, outputs: Sequence[torch.Tensor]) -> None:
        """Write what is kept, once all outputs are on their way: they may share its memory."""
        for place, target in self._kept:
            target.copy_(outputs[place])
