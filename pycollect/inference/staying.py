"""What a policy returns and no worker reads: it stays on the policy's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from pycollect.batch.layout import Key
from pycollect.batch.room import Rooms
from pycollect.inference.board import Board


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

    Those without one find it on the board, as all that the policy returns.

    Args:
        rooms: that there are.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._written: dict[Key, torch.Tensor] = {}
        self._called: Sequence[int] = ()

    def use(self, board: Board, keys: Sequence[Key]) -> None:
        """These leaves of that board are what stays; once, before the first call."""
        self._written = {key: board.written[key] for key in keys}
        self._cells = board.cells

    def call_for(self, rows: Sequence[int]) -> None:
        """The next call is for these rows of the board, in their order."""
        self._called = rows

    def take(self, outputs: Sequence[torch.Tensor]) -> None:
        """Write what the policy returned, which lies on its device."""
        rows = self._called
        values = {
            key: out.view(len(rows), *board.shape[1:]).to(board.dtype)
            for (key, board), out in zip(self._written.items(), outputs, strict=True)
        }
        for run in _runs(rows, self._cells[list(rows), 0].tolist()):
            own = {key: value[run.first : run.end] for key, value in values.items()}
            if run.number == 0:
                on_board = slice(rows[run.first], rows[run.end - 1] + 1)
                for key, value in own.items():
                    self._written[key][on_board].copy_(value)
            elif room := self._rooms.get(run.number):  # else its batch was dropped
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
