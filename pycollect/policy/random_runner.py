"""Random actions as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.envs.base import EnvBatch
from pycollect.envs.random_actions import ActionSampler
from pycollect.layout import Key, torch_dtype


class RandomRunner:
    """Draws the actions of a whole rollout at once: drawing one by one costs more than a policy.

    Args:
        env: its action space and number of envs.
        rng: one generator, or one per env; a fresh one if None. May be set anew between rollouts.
        outputs: what is recorded; keys other than the actions are zeros (as `init_random_frames`
            needs, with the policy's `outputs`). None: the actions.

    Offers what a PolicyRunner does, see there.
    """

    slow_path = False
    reuses_memory = False
    inputs: tuple[Key, ...] = ()
    states: tuple[Any, ...] = ()
    is_init: torch.Tensor | None = None

    def __init__(
        self,
        env: EnvBatch,
        rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
        outputs: tuple[Leaf, ...] | None = None,
    ) -> None:
        self.rng = np.random.default_rng() if rng is None else rng
        self.outputs = env.action if outputs is None else outputs
        self._sampler = ActionSampler(env.action_space, env.num_envs, env.batched)
        self._batch = (env.num_envs,) if env.batched else ()
        places = {leaf.key: place for place, leaf in enumerate(env.action)}
        self._places = [places.get(leaf.key) for leaf in self.outputs]
        self._steps = 0
        self._rows: list[tuple[torch.Tensor, ...]] = []

    def refresh(self, steps: int) -> None:
        """Draw the actions of the next `steps` steps; what was left of earlier ones is dropped."""
        arrays = self._sampler.draw(steps, self.rng)
        columns = [
            self._zeros(leaf, steps) if place is None else torch.from_numpy(arrays[place]).unbind(0)
            for leaf, place in zip(self.outputs, self._places, strict=True)
        ]
        self._steps = steps
        self._rows = list(zip(*columns, strict=True))
        self._rows.reverse()

    def act(self) -> tuple[torch.Tensor, ...]:
        """The next step's actions, in memory of their own, and zeros for other outputs."""
        if not self._rows:
            self.refresh(max(self._steps, 1))
        return self._rows.pop()

    def _zeros(self, leaf: Leaf, steps: int) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros((*self._batch, *leaf.shape), dtype=torch_dtype(leaf.dtype))
        return (zeros,) * steps
