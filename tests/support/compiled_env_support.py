"""Environments behind the table of `python_env.h`, written in Python: no compiler is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

FORM = 1
_RESET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_STEP = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
    *[ctypes.c_void_p] * 3,
)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Table(ctypes.Structure):
    _fields_ = [("environments", ctypes.c_void_p), ("reset", _RESET), ("step", _STEP)]


class Frame(NamedTuple):
    """One step, as the environment saw it."""

    root: list[int]
    action: float
    after: list[int]
    reward: float
    terminated: bool
    truncated: bool


class LoggedEnvs:
    """Observe seed, episode and step; episode e of environment p has p + e + 1 steps.

    Attributes:
        log: the frames of each environment, in order.
        seeds: the most recent seeds.
    """

    form = FORM
    observation: Sequence[tuple[Any, str, Any]] = ((("observation",), "int64", (3,)),)
    action: Sequence[tuple[Any, str, Any]] = ((("action",), "float32", ()),)
    action_space: Any = None
    raises_at: float | None = None

    def __init__(self, envs: int = 3, *, each_seeded: bool = True) -> None:
        self.num_envs = envs
        self.each_seeded = each_seeded
        self.log: list[list[Frame]] = [[] for _ in range(envs)]
        self.seeds: list[int] = [0] * envs
        self.closed = 0
        self._error: Exception | None = None
        self._now = np.zeros((envs, 3), np.int64)
        self._now[:, 1] = -1
        self._functions = _RESET(self._reset), _STEP(self._step)
        self._table = _Table(None, *self._functions)

    def __pycollect_env__(self) -> tuple[Any, ...]:
        name = ctypes.c_char_p(b"pycollect.env_table")
        self._name = name
        table = _capsule(ctypes.addressof(self._table), name, None)
        seeds = self.num_envs if self.each_seeded else 1
        return self.form, "9.8.7", table, self.num_envs, seeds, self.observation, self.action

    def _seed(self, seeds: list[int]) -> None:
        self.seeds = seeds if self.each_seeded else seeds * self.num_envs
        self._now[:, 1] = -1

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self.closed += 1

    def _reset(self, _: Any, mask: int, observations: Any) -> int:
        rows = np.flatnonzero(_seen(mask, np.uint8, self.num_envs))
        self._now[rows, 0] = np.array(self.seeds)[rows]
        self._now[rows, 1] += 1
        self._now[rows, 2] = 0
        _seen(observations[0], np.int64, self.num_envs, 3)[rows] = self._now[rows]
        return 1

    def _step(
        self, _: Any, actions: Any, observations: Any, rewards: int, ends: int, cuts: int
    ) -> int:
        envs = self.num_envs
        action = _seen(actions[0], np.float32, envs)
        shown = _seen(observations[0], np.int64, envs, 3)
        assert shown.tolist() == self._now.tolist()  # no other code writes this memory
        if self.raises_at is not None and (action >= self.raises_at).any():
            self._error = OverflowError(f"{action.max()} is too large")
            return 0
        reward, end, cut = (
            _seen(address, kind, envs)
            for address, kind in ((rewards, np.float64), (ends, np.uint8), (cuts, np.uint8))
        )
        before = self._now.copy()
        self._now[:, 2] += 1
        shown[:] = self._now
        reward[:] = action * 2 + self._now[:, 2]
        over = self._now[:, 2] == np.arange(envs) + self._now[:, 1] + 1
        end[:], cut[:] = over & (self._now[:, 1] % 2 == 0), over & (self._now[:, 1] % 2 == 1)
        columns = (before, action, self._now, reward, end != 0, cut != 0)
        for p, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            self.log[p].append(Frame(*row))
        return 1


class DiscreteEnvs(LoggedEnvs):
    action = ((("action",), "int64", ()),)
    action_space = spaces.Discrete(2)

    def _step(self, _: Any, actions: Any, *rest: Any) -> int:
        chosen = _seen(actions[0], np.int64, self.num_envs)
        assert ((chosen == 0) | (chosen == 1)).all()
        as_float = chosen.astype(np.float32)
        address = (ctypes.c_void_p * 1)(as_float.ctypes.data)
        return super()._step(_, address, *rest)


def _seen(address: int, kind: Any, *shape: int) -> npt.NDArray[Any]:
    count = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * count).from_address(address), kind).reshape(shape)


def chosen(observation: torch.Tensor) -> torch.Tensor:
    """Return an action that encodes its observation."""
    return (observation[:, 0] % 97 + 100 * observation[:, 1] + observation[:, 2]).float()


def frames_of(batch: Any) -> list[list[Frame]]:
    """Return the frames of a batch [P, T] by environment."""
    columns = (
        batch["observation"],
        batch["action"],
        batch["next", "observation"],
        batch["next", "reward"].squeeze(-1),
        batch["next", "terminated"].squeeze(-1),
        batch["next", "truncated"].squeeze(-1),
    )
    return [
        [Frame(*row) for row in zip(*(column[p].tolist() for column in columns), strict=True)]
        for p in range(len(batch))
    ]
