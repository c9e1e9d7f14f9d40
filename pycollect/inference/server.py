"""The server's end of central inference: requests, and which of them share a call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.nn.probabilistic import set_interaction_type

from pycollect._core import Memory, ServerSlots
from pycollect.data.devices import CPU, indexed
from pycollect.data.policy_stream import PolicyStream
from pycollect.data.weights import PolicyVersion, Weights, device_of, load_weights, moved_to
from pycollect.errors import is_interrupt
from pycollect.inference.group import Group, ServedPolicy
from pycollect.inference.messages import Joined, Joining
from pycollect.inference.options import InferenceOptions, ServerSettings
from pycollect.policy.calling import GraphPool
from pycollect.transport.messages import ErrorReport
from pycollect.transport.shared_value import pack, unpack
from pycollect.worker.generators import Generators


@dataclass(eq=False)
class Seat:
    """A worker, or a group of its environments, as the server knows it.

    Attributes:
        number: of its slot.
        part: which group of the worker's environments it is.
        table: index of its table. A reference to the table, which holds seats, would be a cycle.
        place: its index at that table.
        group: in which it has a row, once it has joined.
        kept: what a long answer lies in, until the next one.
    """

    number: int
    part: int
    table: int
    place: int
    group: Group | None = None
    kept: Memory | None = None


class Together(NamedTuple):
    """Those whom one call of the policy is for.

    Attributes:
        places: of their seats, which all have a row in that group.
        numbers: of their slots.
    """

    group: Group
    places: list[int]
    numbers: list[int]


class Table:
    """Seats whose questions are answered together, in one call of the policy or in a few.

    Args:
        seats: that are expected at first.
    """

    def __init__(self, policy: ServedPolicy, options: InferenceOptions, seats: int) -> None:
        self._policy, self._options = policy, options
        self._expected = seats  # that have not joined yet
        self._groups: list[Group] = []
        self._held_since: float | None = None  # somebody waits for others since then
        self._called: tuple[Sequence[Seat], list[Together]] = ([], [])  # the last time

    def refresh(self) -> None:
        """Look whether the policy has changed, before the next calls."""
        for group in self._groups:
            group.refresh()

    def join(self, seat: Seat, joining: Joining) -> Joined:
        """Give a seat its row, beside those that need the same."""
        needs, place = joining.needs, seat.place
        self._called = ([], [])
        if seat.group is not None and not seat.group.needs.are(needs):
            seat.group.leave(place)
        fitting = (own for own in self._groups if own.needs.are(needs))
        group = next((own for own in fitting if own.has_room(place)), None)
        if group is None:
            group = Group(self._policy, needs, max(self._expected, 1), joining.first)
            self._groups.append(group)
        if seat.group is None:
            self._expected -= 1
        seat.group = group
        return group.join(place)

    @property
    def patience(self) -> float | None:
        """Seconds until those who are held back are served in any case; None: there are none."""
        timeout, since = self._options.server_timeout, self._held_since
        if since is None or timeout is None:
            return None
        return max(since + timeout - time.monotonic(), 0.0)

    def lacking(self, asking: Sequence[Seat], owing: int) -> int:
        """How many more have to ask before these are served, at least; 0: they need not wait.

        Args:
            owing: workers that may ask, or do.
        """
        least = self._options.min_batch_size
        if least is None:  # then a table's seats are all of one part
            return max(owing - len(asking), 0)
        together = max(Counter(seat.part for seat in asking).values(), default=0)
        return int(together < owing and _envs(asking) < least)

    def holds_back(self, lacking: int) -> bool:
        """Whether those who ask wait for others, of whom so many are lacking."""
        if not lacking:
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = time.monotonic()
        if self.patience != 0.0:
            return True
        self._held_since = None
        return False

    def awaited(self, lacking: int, owing: int) -> int:
        """How many more have to ask before one is to look again, at least.

        Once it is known whether those who ask wait.
        """
        options = self._options
        if options.min_batch_size is not None:
            return 1  # who may be enough
        if options.server_timeout is not None and self._held_since is None:
            return 1  # whose time begins when it is seen
        return lacking or owing  # who is served asks again

    def calls(self, asking: Sequence[Seat]) -> Sequence[Together]:
        """Who is served by one call, and who by the next one; mostly as the last time."""
        if asking != self._called[0]:
            self._called = (asking, list(self._calls(asking)))
        return self._called[1]

    def _calls(self, asking: Sequence[Seat]) -> Iterator[Together]:
        most = self._options.max_batch_size
        for group in {id(seat.group): seat.group for seat in asking}.values():
            assert group is not None, "slot: expected a seat that has joined"
            seats = [seat for seat in asking if seat.group is group]
            count = len(seats) if most is None else max(most // group.needs.env.num_envs, 1)
            for begin in range(0, len(seats), count):
                own = seats[begin : begin + count]
                yield Together(group, [s.place for s in own], [s.number for s in own])


def _envs(seats: Sequence[Seat]) -> int:
    """Environments of these workers."""
    return sum(seat.group.needs.env.num_envs for seat in seats if seat.group is not None)


_OWN_STREAM = 2**32 - 1  # of random numbers: workers have those of their ids


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
        self._exploration = settings.exploration
        self._slots, self._parts = slots, settings.groups
        self._version = PolicyVersion()
        self._stream = PolicyStream(CPU)
        device = settings.device
        there = indexed(device or device_of(policy) or CPU)
        self.policy = moved_to(policy, there)
        told = device is not None
        self._served = ServedPolicy(self.policy, there, told, graphs=GraphPool())
        self._generators: Generators | None = None
        self._seats: list[Seat] = []
        self._tables = _tables(settings, self._served)
        self._turn = 0  # which table is to be served next

    @property
    def device(self) -> torch.device:
        """Where the policy is called."""
        return self._served.device

    def count_by(self, version: PolicyVersion) -> None:
        """Frames carry that version of the policy, as it is when it is called."""
        self._version = version

    def call_on(self, stream: PolicyStream) -> None:
        """Call the policy on that stream, whatever the calling thread's current one is."""
        self._stream = stream

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into what is called, in place."""
        load_weights(self.policy, weights)

    def seed(self, root: int, *place: int) -> None:
        """From now on, what the policy draws comes from a stream of its own.

        Args:
            place: tells it from other servers of the same workers; none for the first one.
        """
        sequence = np.random.SeedSequence(root, spawn_key=(_OWN_STREAM, *place))
        self._generators = Generators(sequence, self._served.device)

    def refresh(self) -> None:
        """Look whether the policy has changed, before the next calls."""
        with self._stream.on_stream():
            for table in self._tables:
                table.refresh()

    def serve(self, owing: int | None = None) -> int:
        """Call the policy for those who wait, unless they wait for others.

        Returns how many more have to ask before there is anything to be done, at least 1.

        Args:
            owing: workers that were asked for something and have not answered yet; None: nobody
                knows, it may be all.
        """
        owing = len(self._slots) // self._parts if owing is None else owing
        if len(self._tables) == 1:
            return max(self._serve_at(self._tables[0], self._asking(), owing), 1)
        # A worker asks at one table after the other. So who is seen at a table now has asked before
        # at the one whose turn is before it, which is looked at later.
        *before, newest = [self._asking() for _ in self._tables]
        turns = [(self._turn + later) % len(self._tables) for later in range(len(self._tables))]
        awaited = []
        for turn, look in zip(turns, (newest, *reversed(before)), strict=True):
            table = self._tables[turn]
            asking = [seat for seat in look if seat.table == turn and seat in newest]
            awaited.append(self._serve_at(table, asking, owing))
        return max(min(awaited), 1)

    def _serve_at(self, table: Table, asking: Sequence[Seat], owing: int) -> int:
        """Serve those who ask at a table, or have them wait; returns how many more have to ask."""
        lacking = table.lacking(asking, owing)
        if asking and not table.holds_back(lacking):
            for together in table.calls(asking):
                self._call(together)
            self._turn = (self._tables.index(table) + 1) % len(self._tables)
        return table.awaited(lacking, owing)

    def _asking(self) -> list[Seat]:
        """Those who ask what is to be done; who comes to a table is given a row.

        A seat that asks and never joined here had joined a server that is gone. So is its worker.
        """
        slots = self._slots
        asking = slots.asking()
        self._seat_all()
        for number in slots.with_message():
            asking.remove(number)
            question = slots.question(number)
            if question is not None:
                self._join(self._seats[number], question)
        return [seat for number in asking if (seat := self._seats[number]).group is not None]

    def _seat_all(self) -> None:
        """Workers come while others are served."""
        for own in range(len(self._seats), len(self._slots)):
            tables = len(self._tables)
            self._seats.append(Seat(own, own % self._parts, own % tables, own // tables))

    @property
    def patience(self) -> float | None:
        """Seconds until those who are held back are served in any case; None: there are none."""
        each = [own for table in self._tables if (own := table.patience) is not None]
        return min(each, default=None)

    def _join(self, seat: Seat, question: bytes) -> None:
        """Take in a worker that asks for that."""
        answer: Joined | ErrorReport
        try:
            joining: Joining = unpack(question)
            with self._settings():
                answer = self._tables[seat.table].join(seat, joining)
        except Exception as error:  # raised where the worker is built
            if is_interrupt(error):
                raise
            answer = ErrorReport.of(error)
        self._answer(seat, answer)

    def _call(self, together: Together) -> None:
        version = self._version.number  # before: new weights may come meanwhile
        with self._settings():  # which are left when the workers step already
            try:
                together.group.call(together.places)
            except Exception as error:  # raised in each of these workers
                if is_interrupt(error):
                    raise
                report = ErrorReport.of(error)
                for number in together.numbers:
                    self._answer(self._seats[number], report)
            else:
                self._slots.answer_all(together.numbers, version)

    def _answer(self, seat: Seat, value: Joined | ErrorReport) -> None:
        message, seat.kept = pack(value, ServerSlots.BYTES)
        self._slots.answer(seat.number, message)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """The stream, the interaction type and the random generators of the policy.

        They are the program's, whose other threads have them back before this one sleeps.
        """
        generators = self._generators
        with (
            self._stream.on_stream(),
            torch.no_grad(),
            set_interaction_type(self._exploration),
            nullcontext() if generators is None else generators.active(),
        ):
            yield


def _tables(settings: ServerSettings, policy: ServedPolicy) -> list[Table]:
    """One; or, where a call waits for all workers, one for each group of their environments.

    So all workers' first groups are served while their second ones step, and a seed decides what
    the policy draws; where nobody is waited for, a call is for whichever there are.

    Two tables cannot deadlock: a worker that waits for its first group has asked for both groups,
    and one that waits for its second group has asked for that. If all wait, the second table is
    complete.
    """
    options, parts = settings.options, settings.groups
    tables = parts if options.min_batch_size is None else 1
    seats = settings.workers * parts // tables
    return [Table(policy, options, seats) for _ in range(tables)]
