"""A worker that collects nothing: it serves the others, whenever nobody asks it anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.weight_slab import WeightForm
from pycollect.batch.weights import Weights
from pycollect.worker.generators import GeneratorState
from pycollect.worker.report import RolloutReport


class NoEnvs:
    """See :class:`RolloutEnvs`."""

    num_envs = 0
    num_seeds = 0
    batch_size = ()


class ServingWorker(ABC):
    """A RolloutWorker, see there, without environments.

    So whatever starts, asks, updates and ends workers does the same for it.
    """

    env = NoEnvs()
    leaves = BatchLeaves((), ())
    steps = 0
    bounded = False
    processes = 0
    beside = False
    stepped = 0
    version = 0
    post_collect_hook: Callable[[Any], Any] | None = None
    index: int
    placement: Placement

    @property
    @abstractmethod
    def weights(self) -> WeightForm:
        """Form of the policy's weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they lie."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until somebody wants to be served, a moment at the most."""

    @abstractmethod
    def serve(self, version: int) -> None:
        """Serve whoever waits.

        Args:
            version: of the weights that it has.
        """

    @abstractmethod
    def seat(self, worker: int) -> bytes:
        """What stands for it in the worker of that id, pickled: its policy.

        Only one that was not told where its workers ask is asked for it. Who takes a worker's place
        has its seat, too.
        """

    @abstractmethod
    def load_weights(self, weights: Weights) -> None:
        """New weights, from the next call of `serve` on."""

    @abstractmethod
    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """What it draws follows from that root from now on."""

    def collect(
        self, slab: Slab, row: int, policy_version: int, random: bool, control: RolloutControl
    ) -> RolloutReport:
        """Nobody asks for it."""
        raise NotImplementedError("a worker without environments collects nothing")

    def set_hook(self, name: str, hook: Any) -> None:  # noqa: B027 (nobody has to)
        """There is nothing to hook."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:  # noqa: B027 (nobody has to)
        """It is seeded anew instead."""

    def reset(self) -> None:  # noqa: B027 (nobody has to)
        """There is nothing to reset."""

    def set_share(self, frames: int) -> None:  # noqa: B027 (nobody has to)
        """It has none."""

    def generator_state(self) -> GeneratorState | None:
        """None that would have to be kept."""
        return None

    def close(self) -> None:  # noqa: B027 (nobody has to)
        """There is nothing to close."""
