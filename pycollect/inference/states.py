"""Recurrent states beside the policy: on its device, one for each environment of a board."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from pycollect.inference.board import Board
from pycollect.policy import PolicyRunner

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MOST_INDEXES = 256  # kept on the device


class StatesBeside:
    """What a policy on another device passes on from call to call stays there.

    Workers keep their states on the board as ever, and there is what the policy returned last. An
    environment of which both are the same bits goes on from what is kept here. All others are read
    from the board, whatever the reason: a trajectory began, the answer was to a dummy or to a
    rollout that was given up, another worker has the row.

    Args:
        runner: of the call for all rows; its states are what is kept.
    """

    def __init__(self, board: Board, runner: PolicyRunner) -> None:
        self._kept = [state.current for state in runner.states]
        self._shown = [board.read[state.leaf.key] for state in runner.states]
        self._pairs = [
            (_bits(board.read[state.leaf.key]), _bits(board.written[state.next_key]))
            for state in runner.states
        ]
        rows, self._envs = self._shown[0].shape[:2]
        self._by_row = [own.view(rows, self._envs, *own.shape[1:]) for own in self._kept]
        self._answered = torch.zeros(rows, dtype=torch.bool)  # the board has what is kept
        bring = self._bring = runner.bring
        self._index_there = lru_cache(_MOST_INDEXES)(lambda rows: bring([torch.tensor(rows)])[0])

    def load(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Before a call for these rows: give it their states.

        Args:
            runner: that of the call.
        """
        index = torch.tensor(rows)
        begun = self._others(index)
        self._answered[index] = False  # until the answer is on the board
        if len(begun):
            values = [own.flatten(0, 1)[begun] for own in self._shown]
            there, *fresh = self._bring([begun, *values])
            for kept, value in zip(self._kept, fresh, strict=True):
                kept.index_copy_(0, there, value)
        if not self._are_kept(runner):
            there = self._index_there(tuple(rows))
            for own, state in zip(self._by_row, runner.states, strict=True):
                state.current.view(len(rows), *own.shape[1:]).copy_(own.index_select(0, there))

    def store(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """After it, when what it returned is on the board: keep what is to be passed on."""
        if not self._are_kept(runner):
            there = self._index_there(tuple(rows))
            for own, state in zip(self._by_row, runner.states, strict=True):
                own.index_copy_(0, there, state.current.view(len(rows), *own.shape[1:]))
        self._answered[list(rows)] = True

    def _are_kept(self, runner: PolicyRunner) -> bool:
        """Whether the runner reads and writes what is kept itself."""
        return runner.states[0].current is self._kept[0]

    def _others(self, index: torch.Tensor) -> torch.Tensor:
        """The environments of these rows of which the board has another state than is kept."""
        differ = ~self._answered[index, None].expand(-1, self._envs)
        for shown, answered in self._pairs:
            differ = differ | (shown[index] != answered[index]).any(-1)
        places = differ.nonzero()
        return index[places[:, 0]] * self._envs + places[:, 1]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, [rows, P, n]: NaN is equal to itself, -0.0 is not 0.0."""
    frame = values.shape[2:].numel()
    return values.view(*values.shape[:2], frame).view(_INTEGERS[values.itemsize])
