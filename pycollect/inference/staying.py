"""What a policy returns and no worker reads: it stays on the policy's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from pycollect.batch.layout import Key
from pycollect.batch.room import Rooms
from pycollect.inference.board import Board
from pycollect.policy import PolicyRunner


class _Run(NamedTuple):
    """Rows of a call that follow each other on the board, and in a room, at the same step.

    Attributes:
        first, end: which rows of the call.
        number: of the room; 0: there is none.
        row, env, step: of the first one's cell there.
    """

    first: int
    end: int
    number: int
    row: int
    env: int
    step: int


class Staying:
    """Where it goes: each row of a board tells its cell in a room, or that it has none.

    Those without one find what the policy returned on the board, as all else. States that it read
    they carry there themselves.

    Args:
        rooms: that there are.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._written: dict[Key, torch.Tensor] = {}
        self._read: set[Key] = set()  # states
        self._runs: Sequence[_Run] = ()
        self._rows: Sequence[int] = ()

    def use(self, board: Board, runner: PolicyRunner) -> None:
        """What that runner leaves there is on that board else; once, before the first call."""
        outputs = {leaf.key for leaf in runner.outputs}
        self._written = {leaf.key: board.written[leaf.key] for leaf in runner.staying}
        self._read = {own.leaf.key for own in runner.states} - outputs
        self._cells = board.cells

    def call_for(self, rows: Sequence[int]) -> None:
        """The next call is for these rows of the board, in their order."""
        self._rows = rows
        self._runs = list(_runs(rows, self._cells[list(rows), 0].tolist()))

    def take(self, outputs: Sequence[torch.Tensor]) -> None:
        """Write what the policy returned, which lies on its device."""
        values = {
            key: out.view(len(self._rows), *own.shape[1:]).to(own.dtype)
            for (key, own), out in zip(self._written.items(), outputs, strict=True)
        }
        self._write(values)
        for run in self._runs:
            if run.number == 0:
                on_board = slice(self._rows[run.first], self._rows[run.end - 1] + 1)
                for key, value in values.items():
                    self._written[key][on_board].copy_(value[run.first : run.end])

    def take_read(self, states: Mapping[Key, torch.Tensor]) -> None:
        """Write the states that the policy is going to read, ``[rows, P, *frame]`` there."""
        self._write({key: value for key, value in states.items() if key in self._read})

    def _write(self, values: Mapping[Key, torch.Tensor]) -> None:
        """Write it to the rooms that there are."""
        for run in self._runs:
            if run.number and (room := self._rooms.get(run.number)):  # else its batch was dropped
                own = {key: value[run.first : run.end] for key, value in values.items()}
                room.write(own, run.row, run.env, run.step)


def _runs(rows: Sequence[int], cells: Sequence[list[int]]) -> Iterator[_Run]:
    """The rows of a call in as few runs as possible.

    Args:
        cells: of each.
    """
    places = list(zip(rows, cells, strict=True))
    starts = [at for at in range(1, len(rows)) if not _follows(places[at], places[at - 1])]
    for first, end in pairwise([0, *starts, len(rows)]):
        yield _Run(first, end, *cells[first])


def _follows(own: tuple[int, list[int]], before: tuple[int, list[int]]) -> bool:
    """Whether what belongs to one row belongs behind that of the other."""
    (row, (number, *cell)), (last, (last_number, last_worker, *rest)) = own, before
    if number == 0:
        return last_number == 0 and row == last + 1
    return [number, *cell] == [last_number, last_worker + 1, *rest]
