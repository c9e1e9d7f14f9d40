"""Recurrent states beside the policy: on its device, one for each environment of a board."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from pycollect.inference.board import ANSWER, Board
from pycollect.inference.staying import Staying
from pycollect.policy import PolicyRunner

_MOST_INDEXES = 256  # kept on the device
_NONE = -1  # the number of no answer


class StatesBeside:
    """What a policy on another device passes on from call to call stays there.

    Answers are numbered, and an environment shows the number of the one that it goes on from. Of
    the last one, the states are kept here. Of the one before, to which an environment goes back
    whose step was given up, they are on the board or, where they are not written there, kept, too.
    All others are read from the board: a trajectory began, or it was random actions that they
    follow from.

    Args:
        runner: of the call for all rows; its states are what is kept.
        staying: to which they are given; None: they are all written on the board.
    """

    def __init__(self, board: Board, runner: PolicyRunner, staying: Staying | None) -> None:
        self._keys = [state.leaf.key for state in runner.states]
        self._kept = [state.current for state in runner.states]
        self._shown = [board.read[state.leaf.key] for state in runner.states]
        self._asked, self._answered = (side[ANSWER.key] for side in (board.read, board.written))
        rows, self._envs = self._asked.shape[:2]
        self._by_row = [own.view(rows, self._envs, *own.shape[1:]) for own in self._kept]
        self._number = 0  # of the last answer
        self._last = self._none()
        self._staying = staying
        self._before = [] if staying is None else [own.clone() for own in self._by_row]
        self._last_but_one = self._none()
        bring = self._bring = runner.bring
        self._index_there = lru_cache(_MOST_INDEXES)(lambda rows: bring([_index(rows)])[0])

    def _none(self) -> torch.Tensor:
        return torch.full_like(self._asked, _NONE)

    def load(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Before a call for these rows: give it their states.

        Wherever it is interrupted, they are there for the next call: what is kept has a number only
        while it is whole.

        Args:
            runner: that of the call.
        """
        index = _index(rows)
        asked = self._asked[index]
        self._go_back(index, asked)
        keeps = self._are_kept(runner)
        if not keeps or self._staying is not None:
            read = self._of(rows, self._by_row)
        if not keeps:
            for value, state in zip(read, runner.states, strict=True):
                state.current.view_as(value).copy_(value)
        if self._staying is not None:
            self._staying.take_read(dict(zip(self._keys, read, strict=True)))
            self._last_but_one[index] = _NONE
            self._put(rows, self._before, read)
            self._last_but_one[index] = _numbers(asked)
        self._last[index] = _NONE  # until the answer is on the board

    def _go_back(self, index: torch.Tensor, asked: torch.Tensor) -> None:
        """Have what is kept of these rows be what their environments go on from."""
        other = asked != self._last[index]
        if not other.any():
            return
        before = other & (asked == self._last_but_one[index])
        from_board = self._envs_at(index, other & ~before)
        if len(from_board):
            values = [own.flatten(0, 1)[from_board] for own in self._shown]
            there, *fresh = self._bring([from_board, *values])
            for kept, value in zip(self._kept, fresh, strict=True):
                kept.index_copy_(0, there, value)
        if len(from_before := self._envs_at(index, before)):
            there = self._bring([from_before])[0]
            for kept, own in zip(self._kept, self._before, strict=True):
                kept.index_copy_(0, there, own.flatten(0, 1).index_select(0, there))
        self._last[index] = _numbers(asked)

    def _envs_at(self, index: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Which environments of all are those that are chosen, ``[rows, P, 1]``, of these rows."""
        places = chosen.squeeze(-1).nonzero()
        return index[places[:, 0]] * self._envs + places[:, 1]

    def store(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """After it, when what it returned is on the board: keep what is to be passed on."""
        if not self._are_kept(runner):
            self._put(rows, self._by_row, [state.current for state in runner.states])
        self._number += 1
        self._last[list(rows)] = self._number
        self._answered[list(rows)] = self._number

    def show(self, row: int) -> None:
        """Write to a row of the board the states that its environments go on from."""
        index, asked = _index([row]), self._asked[[row]]
        self._go_back(index, asked)
        for own, shown in zip(self._by_row, self._shown, strict=True):
            shown[row].copy_(own[row])

    def _of(self, rows: Sequence[int], kept: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What is kept of these rows; all of them are the tensors themselves."""
        if len(rows) == len(self._last):
            return kept
        there = self._index_there(tuple(rows))
        return [own.index_select(0, there) for own in kept]

    def _put(
        self, rows: Sequence[int], kept: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Keep these values of these rows."""
        for own, value in zip(kept, values, strict=True):
            if len(rows) == len(self._last):
                own.copy_(value.view_as(own))
            else:
                there = self._index_there(tuple(rows))
                own.index_copy_(0, there, value.view(len(rows), *own.shape[1:]))

    def _are_kept(self, runner: PolicyRunner) -> bool:
        """Whether the runner reads and writes what is kept itself."""
        return runner.states[0].current is self._kept[0]


def _numbers(asked: torch.Tensor) -> torch.Tensor:
    """Those of the answers that are kept; what was read from the board has none."""
    return torch.where(asked == 0, _NONE, asked)


def _index(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, device="cpu")
