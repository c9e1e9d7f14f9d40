"""What a host runs: a worker that collects, or an inference server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.checks import built_policy
from pycollect.data.frame import BatchLeaves
from pycollect.data.generators import GeneratorState
from pycollect.data.weights import Weights, WeightSpec
from pycollect.transport.spec import WorkerSpec
from pycollect.worker.options import PRE
from pycollect.worker.report import RolloutReport
from pycollect.worker.worker import Worker


class HostedServer(ABC):
    """Base class of a hosted inference server: a :class:`Hosted` without environments.

    It lets the code that starts, calls, updates and ends workers do the same with servers.
    """

    num_envs = num_seeds = 0
    batch_size: tuple[int, ...] = ()
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
        """Layout of the policy's weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @abstractmethod
    def wait(self) -> None:
        """Sleep until a client asks, for a short time at most."""

    @abstractmethod
    def serve(self, load_newest: Callable[[], int]) -> None:
        """Serve the waiting clients.

        Args:
            load_newest: Loads the newest weights and returns their version. It must be called after
                the requests were read, so that a client gets all weights that were sent before it
                asked.
        """

    @abstractmethod
    def load_weights(self, weights: Weights) -> None:
        """Load weights that apply from the next call of `serve`."""

    @abstractmethod
    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Derive all random numbers from this root from now on."""

    def collect(
        self, slab: Slab, row: int, policy_version: int, random: bool, control: RolloutControl
    ) -> RolloutReport:
        """Raise NotImplementedError: a server collects nothing."""
        raise NotImplementedError("a worker without environments collects nothing")

    def set_hook(self, name: str, hook: Any) -> None:  # noqa: B027 (optional)
        """Do nothing: a server has no hooks."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:  # noqa: B027 (optional)
        """Do nothing: a server is seeded again instead."""

    def reset(self) -> None:  # noqa: B027 (optional)
        """Do nothing: a server has no environments."""

    def set_share(self, frames: int) -> None:  # noqa: B027 (optional)
        """Do nothing: a server collects no frames."""

    def generator_state(self) -> GeneratorState | None:
        """Return ``None``: a server has no generator state to save."""
        return None

    def close(self) -> None:  # noqa: B027 (optional)
        """Do nothing: a server holds nothing to close."""


class SingleWorker(Worker):
    """A Worker that runs in a process of its own.

    Args:
        spec: Specification of the worker.
        policy: Pickled policy or policy factory.

    Attributes:
        version: Version of the worker's weights; set before the driver calls a function with it.
    """

    version = 0

    def __init__(self, spec: WorkerSpec, policy: bytes) -> None:
        policy_or_factory = cloudpickle.loads(policy)
        self.post_collect_hook: Callable[[Any], Any] | None = spec.options.post_collect_hook
        super().__init__(
            spec.index,
            spec.entry,
            spec.env_kwargs,
            built_policy(policy_or_factory) if spec.builds_policy else policy_or_factory,
            spec.options,
            spec.incarnation,
        )

    @property
    def processes(self) -> int:
        """Number of the worker's own processes: 0."""
        return 0

    @property
    def stacked(self) -> bool:
        """Whether a rollout has a dimension for the worker's own processes: ``False``."""
        return False

    def set_hook(self, name: str, hook: Any) -> None:
        """Set a hook that applies from the next rollout."""
        if name == PRE:
            self.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def close(self) -> None:
        """Close the post-collect hook, if it can be closed, and the environments."""
        close = getattr(self.post_collect_hook, "close", None)
        try:
            if close is not None:
                close()
        finally:
            super().close()
