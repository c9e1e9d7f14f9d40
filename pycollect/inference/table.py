"""Who is served together: all workers, or the same group of the environments of each of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycollect._core import Memory
from pycollect.inference.group import Group, ServedPolicy
from pycollect.inference.messages import Joined, Joining
from pycollect.inference.options import InferenceOptions


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
