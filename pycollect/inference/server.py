"""The server's end of central inference: who asks, and which of them one call is for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict.nn.probabilistic import set_interaction_type

from pycollect._core import Memory, ServerSlots
from pycollect.batch.weights import Weights, device_of, load_weights, placed, weights_from
from pycollect.devices import CPU, indexed
from pycollect.engines.messages import ErrorReport
from pycollect.engines.processes.wire import pack, unpack
from pycollect.inference.group import Group, ServedPolicy
from pycollect.inference.messages import Joined, Joining
from pycollect.inference.options import ServerSettings
from pycollect.stream.version import PolicyVersion
from pycollect.worker.generators import Generators

_OWN_STREAM = 2**32 - 1  # of random numbers: workers have those of their ids


@dataclass
class _Seat:
    """A worker, as the server knows it.

    Attributes:
        number: of its slot.
        group: in which it has a row, once it has joined.
        kept: what a long answer lies in, until the next one.
    """

    number: int
    group: Group | None = None
    kept: Memory | None = None


class InferenceServer:
    """Calls one policy for all workers that wait for it. For one thread at a time.

    Args:
        policy: in any of the accepted forms; where it is to be called elsewhere than it lies, a
            copy of it is called.
        slots: through which workers ask.
        is_ours: nobody else has the policy: a factory made it.

    Attributes:
        policy: what is called.
    """

    def __init__(
        self,
        settings: ServerSettings,
        policy: Any,
        slots: ServerSlots,
        is_ours: bool = False,
    ) -> None:
        self.is_ours = is_ours
        self._options, self._exploration = settings.options, settings.exploration
        self._slots, self._workers = slots, settings.workers
        self._version = PolicyVersion()
        device = settings.device
        there = indexed(device or device_of(policy) or CPU)
        self.policy = placed(policy, there)
        self._served = ServedPolicy(self.policy, there, told=device is not None)
        self._generators: Generators | None = None
        self._seats: list[_Seat] = []
        self._groups: list[Group] = []
        self._held_since: float | None = None  # somebody waits for others since then

    @property
    def device(self) -> torch.device:
        """Where the policy is called."""
        return self._served.device

    def count_by(self, version: PolicyVersion) -> None:
        """Frames carry that version of the policy, as it is when it is called."""
        self._version = version

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into what is called, in place."""
        load_weights(weights_from(self.policy), weights)

    def seed(self, root: int, *place: int) -> None:
        """From now on, what the policy draws comes from a stream of its own.

        Args:
            place: tells it from other servers of the same workers; none for the first one.
        """
        sequence = np.random.SeedSequence(root, spawn_key=(_OWN_STREAM, *place))
        self._generators = Generators(sequence, self._served.device)

    def refresh(self) -> None:
        """Look whether the policy has changed, before the next calls."""
        for group in self._groups:
            group.refresh()

    def serve(self, owing: int | None = None) -> None:
        """Call the policy for those who wait, unless they wait for others.

        Args:
            owing: workers that were asked for something and have not answered yet; None: nobody
                knows, it may be all.
        """
        owing = len(self._slots) if owing is None else owing
        asking = [self._seat(number) for number in self._slots.asking()]
        stepping = [seat for seat in asking if not self._joins(seat) and seat.group is not None]
        if not stepping or self._holds_back(stepping, owing):
            return
        self._held_since = None
        for group in {id(seat.group): seat.group for seat in stepping}.values():
            assert group is not None, "slot: expected a worker that has joined"
            for part in self._parts(group, [own for own in stepping if own.group is group]):
                self._call(group, part)

    def _seat(self, number: int) -> _Seat:
        """That of a slot; workers come while others are served."""
        while number >= len(self._seats):
            self._seats.append(_Seat(len(self._seats)))
        return self._seats[number]

    @property
    def patience(self) -> float | None:
        """Seconds until those who are held back are served in any case; None: there are none."""
        timeout, since = self._options.server_timeout, self._held_since
        if since is None or timeout is None:
            return None
        return max(since + timeout - time.monotonic(), 0.0)

    def _holds_back(self, stepping: Sequence[_Seat], owing: int) -> bool:
        """Whether these wait for others that may come."""
        least = self._options.min_batch_size
        if len(stepping) >= owing or (least is not None and _envs(stepping) >= least):
            return False
        if self._held_since is None:
            self._held_since = time.monotonic()
        return self.patience != 0.0

    def _parts(self, group: Group, seats: Sequence[_Seat]) -> Iterator[Sequence[_Seat]]:
        """Those whom one call is for, each."""
        most = self._options.max_batch_size
        count = len(seats) if most is None else max(most // group.needs.env.num_envs, 1)
        for begin in range(0, len(seats), count):
            yield seats[begin : begin + count]

    def _joins(self, seat: _Seat) -> bool:
        """Take in a worker that asks for that; return whether it did.

        One that asks for more and never joined here had joined a server that is gone. So is it.
        """
        question = self._slots.question(seat.number)
        if not question:
            return False
        answer: Joined | ErrorReport
        try:
            joining: Joining = unpack(question)
            with self._settings():
                answer = self._joined(seat, joining)
        except Exception as error:  # raised where the worker is built
            answer = ErrorReport.of(error)
        self._answer(seat, answer)
        return True

    def _joined(self, seat: _Seat, joining: Joining) -> Joined:
        if seat.group is not None and not seat.group.needs.are(joining.needs):
            seat.group.leave(seat.number)
        fitting = (own for own in self._groups if own.needs.are(joining.needs))
        group = next((own for own in fitting if own.has_room(seat.number)), None)
        if group is None:
            rows = max(self._workers - sum(own.group is not None for own in self._seats), 1)
            group = Group(self._served, joining.needs, rows, joining.first)
            self._groups.append(group)
        seat.group = group
        return group.join(seat.number)

    def _call(self, group: Group, seats: Sequence[_Seat]) -> None:
        version = self._version.number  # before: new weights may come meanwhile
        try:
            with self._settings():
                group.call([seat.number for seat in seats])
        except Exception as error:  # raised in each of these workers
            report = ErrorReport.of(error)
            for seat in seats:
                self._answer(seat, report)
            return
        for seat in seats:
            self._slots.answer(seat.number, note=version)

    def _answer(self, seat: _Seat, value: Joined | ErrorReport) -> None:
        message, seat.kept = pack(value, ServerSlots.BYTES)
        self._slots.answer(seat.number, message)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """The interaction type and the random generators of the policy."""
        generators = self._generators
        with (
            torch.no_grad(),
            set_interaction_type(self._exploration),
            nullcontext() if generators is None else generators.active(),
        ):
            yield


def _envs(seats: Sequence[_Seat]) -> int:
    """Environments of these workers."""
    return sum(seat.group.needs.env.num_envs for seat in seats if seat.group is not None)
