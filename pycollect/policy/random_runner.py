"""Random actions as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import Leaf
from pycollect.envs.base import EnvBatch
from pycollect.layout import Key, torch_dtype


class RandomRunner:
    """Draws the actions of a whole rollout at once: drawing one by one costs more than a policy.

    Where the env's sampler cannot draw ahead, it is asked before each step.

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
    through_env: tuple[Leaf, ...] = ()
    is_init: torch.Tensor | None = None
    step_count: torch.Tensor | None = None

    def __init__(
        self,
        env: EnvBatch,
        rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
        outputs: tuple[Leaf, ...] | None = None,
    ) -> None:
        self.rng = np.random.default_rng() if rng is None else rng
        self.outputs = env.action if outputs is None else outputs
        self._sampler = env.action_sampler()
        self._batch = (env.num_envs,) if env.batched else ()
        places = {leaf.key: place for place, leaf in enumerate(env.action)}
        self._places = [places.get(leaf.key) for leaf in self.outputs]
        self.extra_outputs = env.action_extras
        self.said = env.draw_extras
        self._steps = 1
        self._rows: list[tuple[torch.Tensor, ...]] = []

    def refresh(self, steps: int) -> None:
        """The next `steps` steps are to come; what was drawn earlier and is left is dropped."""
        self._steps = max(steps, 1) if self._sampler.ahead else 1
        self._rows = []

    def forget(self) -> None:
        """Random actions note nothing for the next one."""

    def act(self) -> tuple[torch.Tensor, ...]:
        """The next step's actions, in memory of their own, and zeros for other outputs."""
        if not self._rows:
            self._draw(self._steps)
        return self._rows.pop()

    def _draw(self, steps: int) -> None:
        arrays = self._sampler.draw(steps, self.rng)
        columns = [
            self._zeros(leaf, steps) if place is None else _rows(arrays[place], leaf)
            for leaf, place in zip(self.outputs, self._places, strict=True)
        ]
        self._rows = list(zip(*columns, strict=True)) if columns else [()] * steps
        self._rows.reverse()

    def _zeros(self, leaf: Leaf, steps: int) -> tuple[torch.Tensor, ...]:
        shape = (*self._batch, *leaf.shape)
        zeros = torch.zeros(shape, dtype=torch_dtype(leaf.dtype), device="cpu")
        return (zeros,) * steps


def _rows(actions: npt.NDArray[Any], leaf: Leaf) -> tuple[torch.Tensor, ...]:
    """A tensor per step; a policy's leaf may have another dtype than what was drawn."""
    return torch.from_numpy(actions).to(torch_dtype(leaf.dtype)).unbind(0)
