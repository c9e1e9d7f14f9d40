"""What collects in a worker's process: a Worker, or processes that are one to the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.weight_slab import WeightForm
from pycollect.batch.weights import Weights
from pycollect.worker.generators import GeneratorState, TeamState
from pycollect.worker.report import RolloutReport


class RolloutEnvs(Protocol):
    """The environments of a worker, as far as the driver has to know them."""

    @property
    def num_envs(self) -> int:
        """How many there are."""

    @property
    def num_seeds(self) -> int:
        """How many they are reset with."""

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Their batch dimensions: () for one that is no batch."""


class RolloutWorker(Protocol):
    """Collects rollouts when asked. Whoever hosts it calls all of it in one thread."""

    index: int
    version: int
    leaves: BatchLeaves
    steps: int
    placement: Placement
    post_collect_hook: Callable[[Any], Any] | None

    @property
    def env(self) -> RolloutEnvs:
        """Its environments."""

    @property
    def weights(self) -> WeightForm:
        """Form of the policy's weights."""

    @property
    def device(self) -> torch.device:
        """Where its environments lie."""

    @property
    def bounded(self) -> bool:
        """Whether its episodes are known to end."""

    @property
    def processes(self) -> int:
        """How many of its own collect for it; 0: it does so itself."""

    @property
    def beside(self) -> bool:
        """Whether these are stacked in a rollout, each a part of its own."""

    @property
    def stepped(self) -> int:
        """Grows with each step. May be asked at any time."""

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool,
        control: RolloutControl,
    ) -> RolloutReport:
        """One rollout into that row of a slab."""

    def load_weights(self, weights: Weights) -> None:
        """New weights, from the next rollout on."""

    def set_hook(self, name: str, hook: Any) -> None:
        """A hook, from the next rollout on."""

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed and reset everything."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:
        """Reset everything, and go on with generators that stood so."""

    def reset(self) -> None:
        """Reset all environments."""

    def set_share(self, frames: int) -> None:
        """Collect that many frames per rollout from now on."""

    def generator_state(self) -> GeneratorState | TeamState | None:
        """Where its generators stand; None if it has none of its own."""

    def close(self) -> None:
        """Close the environments."""
