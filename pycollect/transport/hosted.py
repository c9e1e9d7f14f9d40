"""Objects that a host runs: a worker that collects, or an inference server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.data.frame import BatchLeaves
from pycollect.data.weights import Weights, WeightSpec
from pycollect.policy.runner import build
from pycollect.transport.messages import WorkerSpec
from pycollect.worker.generators import GeneratorState
from pycollect.worker.options import PRE
from pycollect.worker.report import RolloutReport
from pycollect.worker.worker import Worker


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
    stacked = False
    stepped = 0
    version = 0
    post_collect_hook: Callable[[Any], Any] | None = None
    index: int
    placement: Placement

    @property
    @abstractmethod
    def weights(self) -> WeightSpec:
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


class SingleWorker(Worker):
    """A Worker that collects in a process of its own.

    Args:
        spec: what it is made from.
        policy: pickled, or its factory.

    Attributes:
        version: of the weights that it has, when it is asked.
    """

    version = 0

    def __init__(self, spec: WorkerSpec, policy: bytes) -> None:
        given = cloudpickle.loads(policy)
        self.post_collect_hook: Callable[[Any], Any] | None = spec.options.post_collect_hook
        super().__init__(
            spec.index,
            spec.entry,
            spec.env_kwargs,
            build(given) if spec.builds_policy else given,
            spec.options,
            spec.incarnation,
        )

    @property
    def processes(self) -> int:
        """None of its own."""
        return 0

    @property
    def stacked(self) -> bool:
        """There are none."""
        return False

    def set_hook(self, name: str, hook: Any) -> None:
        """A hook, from the next rollout on."""
        if name == PRE:
            self.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def close(self) -> None:
        """Close the hook and the environments."""
        close = getattr(self.post_collect_hook, "close", None)
        try:
            if close is not None:
                close()
        finally:
            super().close()
