"""Recurrent states beside the policy: on its device, one for each environment of a board."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from pycollect.inference.shared_io import ANSWER, Board
from pycollect.policy.runner import PolicyRunner

_MOST_INDEXES = 256  # kept on the device
_NONE = -1  # the number of no answer


class StatesBeside:
    """What a policy on another device passes on from call to call stays there.

    Answers are numbered, and an environment shows the number of the one that it goes on from. Of
    the last one, the states are kept here. All others are read from the board: a trajectory began,
    a step was given up, or it was random actions that they follow from.

    Args:
        runner: of the call for all rows; its states are what is kept.
    """

    def __init__(self, board: Board, runner: PolicyRunner) -> None:
        self._kept = [state.current for state in runner.states]
        self._shown = [board.read[state.leaf.key] for state in runner.states]
        self._asked, self._answered = (side[ANSWER.key] for side in (board.read, board.written))
        rows, self._envs = self._asked.shape[:2]
        self._by_row = [own.view(rows, self._envs, *own.shape[1:]) for own in self._kept]
        self._number = 0  # of the last answer
        self._last = torch.full_like(self._asked, _NONE)
        bring = self._bring = runner.send
        self._index_there = lru_cache(_MOST_INDEXES)(lambda rows: bring([_index(rows)])[0])

    def load(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Before a call for these rows: give it their states.

        If this call or a later step is interrupted, the next call reads the states from the board.

        Args:
            runner: that of the call.
        """
        index = _index(rows)
        others = self._asked[index] != self._last[index]
        self._last[index] = _NONE  # until the answer is on the board
        if others.any():
            self._read(index, others)
        if not self._are_kept(runner):
            there = self._index_there(tuple(rows))
            for own, state in zip(self._by_row, runner.states, strict=True):
                value = own.index_select(0, there)
                state.current.view_as(value).copy_(value)

    def _read(self, index: torch.Tensor, others: torch.Tensor) -> None:
        """Read the states of the marked environments (``[rows, P, 1]``) from the board."""
        places = others.squeeze(-1).nonzero()
        from_board = index[places[:, 0]] * self._envs + places[:, 1]
        values = [own.flatten(0, 1)[from_board] for own in self._shown]
        there, *fresh = self._bring([from_board, *values])
        for kept, value in zip(self._kept, fresh, strict=True):
            kept.index_copy_(0, there, value)

    def store(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """After it, when what it returned is on the board: keep what is to be passed on."""
        if not self._are_kept(runner):
            there = self._index_there(tuple(rows))
            for own, state in zip(self._by_row, runner.states, strict=True):
                own.index_copy_(0, there, state.current.view(len(rows), *own.shape[1:]))
        self._number += 1
        self._last[list(rows)] = self._number
        self._answered[list(rows)] = self._number

    def _are_kept(self, runner: PolicyRunner) -> bool:
        """Whether the runner reads and writes what is kept itself."""
        return runner.states[0].current is self._kept[0]


def _index(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, device="cpu")
