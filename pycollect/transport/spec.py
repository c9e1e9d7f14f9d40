"""A worker's specification and description, and the interface of what runs in its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.generators import GeneratorState, NestState
from pycollect.data.weights import NO_WEIGHT_SPEC, Weights, WeightSpec
from pycollect.envs.registrations import Registered, program_registrations
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import RolloutReport


class Hosted(Protocol):
    """Interface of the object that a host runs. One thread calls all its methods."""

    index: int
    version: int
    leaves: BatchLeaves
    batch_size: tuple[int, ...]
    placement: Placement
    post_collect_hook: Callable[[Any], Any] | None

    def info(self) -> WorkerInfo:
        """Return a description of it, without its process."""

    @property
    def stepped(self) -> int:
        """Number that grows with each step. May be read at any time."""

    @property
    def serve(self) -> Callable[[Callable[[], int]], None] | None:
        """Function that serves the clients of an inference server once; ``None`` for a worker.

        It sleeps for a short time at most. Its argument loads the newest weights and returns their
        version.
        """

    def collect(
        self, slab: Slab, row: int, policy_version: int, random: bool, control: RolloutControl
    ) -> RolloutReport:
        """Collect one rollout into a row of a slab."""

    def load_weights(self, weights: Weights) -> None:
        """Load weights that apply from the next rollout."""

    def set_hook(self, name: str, hook: Any) -> None:
        """Set a hook that applies from the next rollout."""

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed and reset all environments and generators."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:
        """Reset all environments and restore the state of the random generators."""

    def reset(self) -> None:
        """Reset all environments."""

    def set_share(self, frames: int) -> None:
        """Set the number of frames per rollout."""

    def generator_state(self) -> GeneratorState | NestState | None:
        """Return the state of the random generators, or ``None`` if there is nothing to save."""

    def close(self) -> None:
        """Close the environments."""


def set_seed(worker: Hosted, seeds: Sequence[int], root: int) -> None:
    """Seed and reset all environments and generators of a worker."""
    worker.set_seed(seeds, root)


def resume(worker: Hosted, state: GeneratorState | NestState, seeds: Sequence[int]) -> None:
    """Reset all environments of a worker and restore the state of its random generators."""
    worker.resume(state, seeds)


def reset(worker: Hosted) -> None:
    """Reset all environments of a worker."""
    worker.reset()


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker, from which any process can build it.

    The policy is not part of it: workers share one pickled copy.

    Attributes:
        builds_policy: Whether the policy is passed as a factory.
        hides_gpus: Whether to hide all GPUs from the worker's process.
        role: Name of the process if it is no worker of a collector.
        maker: Function that makes the hosted object from this spec and the pickled policy: a
            nest of processes, one for each item of `entry` (and of `env_kwargs`, if that is a
            list), or an inference server. ``None``: a worker that collects itself.
        registered: Environments that the program has registered.
    """

    index: int
    entry: Any
    env_kwargs: Any
    options: WorkerOptions
    incarnation: int = 0
    builds_policy: bool = False
    hides_gpus: bool = False
    maker: Callable[[WorkerSpec, bytes], Hosted] | None = None
    role: str = ""
    registered: Registered = field(default_factory=program_registrations)

    @property
    def with_own_policy(self) -> WorkerSpec:
        """Specification if the worker calls a copy of the policy instead of a server's client.

        Two groups of environments gain time only while another process calls the policy.
        """
        return replace(self, options=replace(self.options, env_groups=1))

    @property
    def name(self) -> str:
        """Name of the worker in messages."""
        return self.role or f"worker {self.index}"


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker that was built.

    Attributes:
        num_envs: Number of environments.
        num_seeds: Number of seeds that a reset takes.
        batch_size: Batch dimensions of the environments; () for a single environment.
        bounded: Whether the episodes are known to end.
        weights: Layout of the policy's weights.
        device: Device of the environments.
        processes: Number of own processes that collect for the worker; 0 if it collects itself.
        stacked: Whether a rollout has a leading dimension for these processes.
        warnings: Warnings for the user, which only the driver can show.
    """

    leaves: BatchLeaves
    num_envs: int
    num_seeds: int
    batch_size: tuple[int, ...]
    steps: int
    pid: int = 0
    node: str = ""
    bounded: bool = False
    weights: WeightSpec = NO_WEIGHT_SPEC
    device: torch.device = CPU
    processes: int = 0
    stacked: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        """Frames of one full rollout."""
        return self.num_envs * self.steps

    @cached_property
    def placement(self) -> Placement:
        """Layout of one rollout in memory. Created on first use, because it does not pickle."""
        return Placement(self.leaves.layout(), 1, self.num_envs, self.steps)
