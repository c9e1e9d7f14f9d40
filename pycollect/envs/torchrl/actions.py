"""Random actions from a TorchRL env's own specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.envs.base import Sampler
from pycollect.envs.spaces import Array


class SpecSampler(Sampler):
    """Draws one step at a time, on the current state, from torch's global generator.

    Args:
        leaves: of the action.
        draw_one: gives one step's actions, [*action] or [P, *action], newly allocated.
    """

    ahead = False

    def __init__(
        self, leaves: tuple[Leaf, ...], draw_one: Callable[[], tuple[torch.Tensor, ...]]
    ) -> None:
        self.leaves = leaves
        self._draw_one = draw_one

    def draw(
        self, steps: int, rng: np.random.Generator | Sequence[np.random.Generator]
    ) -> tuple[Array, ...]:
        """One step's actions; `rng` is not used: specs draw from torch's global generator."""
        return tuple(action.numpy()[np.newaxis] for action in self._draw_one())
