"""Recurrent states on the policy's device, one for each environment of a SharedIO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from pycollect.inference.shared_io import ANSWER, SharedIO
from pycollect.policy.runner import PolicyRunner

_MOST_INDEXES = 256  # cached on the device
_NONE = -1  # no answer has this number


class ServerStates:
    """Keeps recurrent states on the policy's device from call to call.

    Answers are numbered, and each environment sends the number of the answer that it continues
    from. If that is its last answer, its states are kept here. Otherwise they are read from shared
    memory: a trajectory has started, a step was interrupted, or the last actions were random.

    Args:
        io: The shared memory.
        runner: Runner of the call for all rows, whose states are kept.
    """

    def __init__(self, io: SharedIO, runner: PolicyRunner) -> None:
        self._kept = [state.current for state in runner.states]
        self._sent = [io.read[state.leaf.key] for state in runner.states]
        self._asked, self._answered = (side[ANSWER.key] for side in (io.read, io.written))
        rows, self._envs = self._asked.shape[:2]
        self._by_row = [kept.view(rows, self._envs, *kept.shape[1:]) for kept in self._kept]
        self._number = 0  # number of the last answer
        self._last = torch.full_like(self._asked, _NONE)
        send = self._send = runner.send
        self._device_index = lru_cache(_MOST_INDEXES)(lambda rows: send([_index(rows)])[0])

    def load(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Copy the states of the call's rows to the runner before the call.

        If this call or a later step is interrupted, the next call reads the states from shared
        memory.

        Args:
            rows: Rows of the call.
            runner: Runner of the call.
        """
        index = _index(rows)
        others = self._asked[index] != self._last[index]
        self._last[index] = _NONE  # until the answer is written
        if others.any():
            self._read(index, others)
        if not self._are_kept(runner):
            device_index = self._device_index(tuple(rows))
            for kept, state in zip(self._by_row, runner.states, strict=True):
                value = kept.index_select(0, device_index)
                state.current.view_as(value).copy_(value)

    def _read(self, index: torch.Tensor, others: torch.Tensor) -> None:
        """Read the states of the marked environments (``[rows, P, 1]``) from shared memory."""
        places = others.squeeze(-1).nonzero()
        envs = index[places[:, 0]] * self._envs + places[:, 1]
        values = [sent.flatten(0, 1)[envs] for sent in self._sent]
        device_envs, *device_values = self._send([envs, *values])
        for kept, value in zip(self._kept, device_values, strict=True):
            kept.index_copy_(0, device_envs, value)

    def store(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Keep the new states of the call's rows after its outputs were written."""
        if not self._are_kept(runner):
            device_index = self._device_index(tuple(rows))
            for kept, state in zip(self._by_row, runner.states, strict=True):
                value = state.current.view(len(rows), *kept.shape[1:])
                kept.index_copy_(0, device_index, value)
        self._number += 1
        self._last[list(rows)] = self._number
        self._answered[list(rows)] = self._number

    def _are_kept(self, runner: PolicyRunner) -> bool:
        """Return whether the runner reads and writes the kept states themselves."""
        return runner.states[0].current is self._kept[0]


def _index(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, device="cpu")
