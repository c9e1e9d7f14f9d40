"""A worker's specification, the requests to it and its answers, and what runs in its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.generators import GeneratorState, NestState
from pycollect.data.slabs import RowsAddress, SlabRows
from pycollect.data.weights import Weights, WeightSpec
from pycollect.envs.gymnasium_support import Registered, program_registrations
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds

Buffer = npt.NDArray[np.uint8]


class Hosted(Protocol):
    """Interface of the object that a host runs. One thread calls all its methods.

    Some methods do nothing by default, for an object without environments.
    """

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
        return None

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed and reset all environments and generators."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:
        """Reset all environments and restore the state of the random generators."""
        return None

    def reset(self) -> None:
        """Reset all environments."""
        return None

    def set_share(self, frames: int) -> None:
        """Set the number of frames per rollout."""
        return None

    def generator_state(self) -> GeneratorState | NestState | None:
        """Return the state of the random generators, or ``None`` if there is nothing to save."""
        return None

    def close(self) -> None:
        """Close the environments."""
        return None


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

    The policy is not part of it: workers share one pickled copy. Without a `maker`, the worker
    collects itself. A `maker` makes the hosted object from this spec and the pickled policy: a nest
    of processes, one for each item of `entry` (and of `env_kwargs`, if that is a list), or an
    inference server.
    """

    index: int
    entry: Any
    env_kwargs: Any
    options: WorkerOptions
    incarnation: int = 0
    builds_policy: bool = False  # whether the policy is passed as a factory
    hides_gpus: bool = False  # whether to hide all GPUs from the worker's process
    maker: Callable[[WorkerSpec, bytes], Hosted] | None = None
    role: str = ""  # name of the process if it is no worker of a collector
    registered: Registered = field(default_factory=program_registrations)  # environments

    @property
    def with_own_policy(self) -> WorkerSpec:
        """Specification if the worker calls a copy of the policy instead of a server's client.

        Two groups of environments gain time only while another process calls the policy.
        """
        return replace(self, options=replace(self.options, env_groups=1))

    @property
    def name(self) -> str:
        return self.role or f"worker {self.index}"


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker that was built."""

    leaves: BatchLeaves
    num_envs: int
    num_seeds: int  # number of seeds that a reset takes
    batch_size: tuple[int, ...]  # batch dimensions of the environments; () for a single environment
    steps: int
    pid: int = 0
    node: str = ""
    bounded: bool = False  # whether the episodes are known to end
    weights: WeightSpec = field(default_factory=WeightSpec)
    device: torch.device = CPU
    processes: int = 0  # own processes that collect for the worker; 0: it collects itself
    stacked: bool = False  # whether a rollout has a leading dimension for these processes
    warnings: tuple[str, ...] = ()  # warnings for the user, which only the driver can show

    @property
    def frames(self) -> int:
        """Frames of one full rollout."""
        return self.num_envs * self.steps

    @cached_property
    def placement(self) -> Placement:
        """Layout of one rollout in memory. Created on first use, because it does not pickle."""
        return Placement(self.leaves.layout(), 1, self.num_envs, self.steps)


class Build(NamedTuple):
    """Make the environments and call the policy once as a test. The answer is a WorkerInfo."""

    filters_warnings: bool  # whether to hide import warnings; see `errors`
    spec: bytes
    policy: Any  # pickled policy or policy factory, in the form of the channel


class Collect(NamedTuple):
    """Collect one rollout. The answer is its plain report, and its bytes if it has no rows."""

    number: int  # number of the request, which `Stop` refers to
    random: bool  # whether to take random actions instead of the policy's
    min_steps: int  # minimum number of steps, even if the rollout is stopped
    version: int  # policy version at the time of the request
    rows: RowsAddress | None = None  # rows to write into; without, the answer has the bytes
    serial: int = 0
    weights_version: int = 0
    weights: Any = None  # newer ones, if the channel publishes none; Ray fetches no nested values


class Run(NamedTuple):
    """Call ``function(worker, *arguments)``. The answer is its pickled result."""

    call: bytes  # pickled tuple of the function and the arguments


class Resize(NamedTuple):
    """Set the number of frames per rollout. The answer is the new WorkerInfo."""

    frames: int


class GetSteps(NamedTuple):
    """Answer with a number that grows while the worker makes progress."""


class Close(NamedTuple):
    """Close the environments. No request follows."""


class Stop(NamedTuple):
    """Stop the rollouts of all requests up to this number after their current step."""

    number: int


class SetWeights(NamedTuple):
    """Use these weights from the next rollout on, if they are the newest by their serial number."""

    serial: int
    version: int
    weights: Any


class SetHook(NamedTuple):
    """Use this pickled hook from the next rollout on."""

    name: str
    serial: int
    hook: Any


class End(NamedTuple):
    """Kill the worker's process at once."""


Queued: TypeAlias = Build | Collect | Run | Resize | GetSteps | Close
"""A request that is answered after all earlier ones."""

Request: TypeAlias = Queued | Stop | SetWeights | SetHook | End
"""A request to a worker. Only calls send the last four, which skip the queue, as `GetSteps` may."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request for one rollout.

    Attributes:
        random: Whether to take random actions instead of the policy's.
        rows: Rows that the worker writes into. They stay in use until the rollout arrives, even if
            the request is dropped or the process ends. ``None``: the rollout arrives as bytes and
            gets its rows then.
        min_steps: Minimum number of steps, even if the rollout is stopped.
        version: Policy version at the time of the request.
    """

    random: bool
    rows: SlabRows | None = None
    min_steps: int = 1
    version: int = 0


@dataclass(frozen=True)
class Rollout:
    """A rollout that has arrived: its report and its bytes."""

    report: RolloutReport
    buffer: Buffer | None  # read-only bytes; ``None`` if the worker wrote into its request's rows


def plain_report(report: RolloutReport) -> tuple[Any, ...]:
    """Return a report in the form in which it is sent: a plain tuple.

    Pickling classes, once per rollout, takes ten times as long. A TypeError names an extra that
    does not pickle.
    """
    packed = (report.extras, report.generators)
    return (
        *report[:3],
        tuple(report.seconds),
        report.stepped,
        report.slow_paths,
        *(None if lazy is None else lazy.pickled for lazy in packed),
        report.sources,
        dict(report.lost),
        report.restarts,
    )


def unpacked_report(plain: tuple[Any, ...]) -> RolloutReport:
    """Return the report from the tuple of `plain_report`.

    The generator states stay pickled, because they are rarely read.
    """
    frames, version, episodes, seconds, stepped, slow_paths, extras, generators, *of_nest = plain
    return RolloutReport(
        frames,
        version,
        episodes,
        WorkerSeconds(*seconds),
        stepped,
        slow_paths,
        None if extras is None else Lazy(extras),
        None if generators is None else Lazy(generators),
        *of_nest,
    )
