"""Where episodes end and what was earned, from flags and rewards of any number and shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch

from pycollect._core import Leaf

Rows: TypeAlias = tuple[torch.Tensor, ...]
"""The tensors of a step, [*frame] each, or [P, *frame] for a batch."""


def make_ended(places: Sequence[int], rows: tuple[int, ...]) -> Callable[[Rows], Any]:
    """What tells of each env whether any of its flags is set: that ends its trajectory.

    Args:
        places: of the flags in `Rows`.
        rows: (P,), or () for one env.
    """
    if not rows:
        return lambda values: any(_any_of_one(values[place]) for place in places)

    def ended(values: Rows) -> torch.Tensor:
        return reduce(torch.logical_or, [_any(values[place], rows[0]) for place in places])

    return ended


def _any_of_one(flag: torch.Tensor) -> bool:
    return bool(flag.item() if flag.numel() == 1 else flag.any())


def _any(flag: torch.Tensor, envs: int) -> torch.Tensor:
    return flag.reshape(envs) if flag.numel() == envs else flag.reshape(envs, -1).any(1)


def make_total(rewards: Sequence[Leaf], first: int, rows: tuple[int, ...]) -> Callable[[Rows], Any]:
    """What gives the sum of each env's rewards, over all keys and agents.

    Args:
        rewards: their leaves.
        first: the place of the first one in `Rows`.
    """
    places = range(first, first + len(rewards))
    nothing = torch.zeros(rows)
    if not rewards:
        return lambda values: nothing
    if len(rewards) == 1 and torch.Size(rewards[0].shape).numel() == 1:
        return lambda values: values[first]
    envs = rows[0] if rows else 1
    shape = rows or (1,)
    return lambda values: sum(
        values[place].reshape(envs, -1).sum(1, dtype=torch.float64).reshape(shape)
        for place in places
    )
