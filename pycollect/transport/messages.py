"""Requests and answers between driver and worker, and the interface of a hosted worker."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.data.compression import PackedBuffer
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.slabs import RowsAddress, SlabRows, leaf_sizes
from pycollect.data.weights import NO_WEIGHT_SPEC, Weights, WeightSpec
from pycollect.envs.registrations import Registered, program_registrations
from pycollect.errors import WorkerError
from pycollect.worker.generators import GeneratorState, NestState
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds


class HostedEnvs(Protocol):
    """The environments of a worker, as the driver sees them."""

    @property
    def num_envs(self) -> int:
        """Number of environments."""

    @property
    def num_seeds(self) -> int:
        """Number of seeds that a reset takes."""

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Batch dimensions of the environments; () for a single environment."""


class Hosted(Protocol):
    """Interface of the object that a host runs. One thread calls all its methods."""

    index: int
    version: int
    leaves: BatchLeaves
    steps: int
    placement: Placement
    post_collect_hook: Callable[[Any], Any] | None

    @property
    def env(self) -> HostedEnvs:
        """The worker's environments."""

    @property
    def weights(self) -> WeightSpec:
        """Layout of the policy's weights."""

    @property
    def device(self) -> torch.device:
        """Device of the environments."""

    @property
    def bounded(self) -> bool:
        """Whether the episodes are known to end."""

    @property
    def processes(self) -> int:
        """Number of own processes that collect for the worker; 0 if it collects itself."""

    @property
    def stacked(self) -> bool:
        """Whether a rollout has a leading dimension for the worker's own processes."""

    @property
    def stepped(self) -> int:
        """Number that grows with each step. May be read at any time."""

    def collect(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        random: bool,
        control: RolloutControl,
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


Buffer = npt.NDArray[np.uint8]

_COMPRESS = "compress"  # name of the argument, for errors


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker, from which any process can build it.

    The policy is not part of it: workers share one pickled copy.

    Attributes:
        builds_policy: Whether the policy is passed as a factory.
        hides_gpus: Whether to hide all GPUs from the worker's process.
        role: Name of the process if it is no worker of a collector.
        team: Function that makes an object which collects with processes of its own, one for each
            item of `entry`. It takes this spec and the pickled policy. `env_kwargs` may be a list
            of the same length. ``None``: the worker collects itself.
        registered: Environments that the program has registered.
    """

    index: int
    entry: Any
    env_kwargs: Any
    options: WorkerOptions
    incarnation: int = 0
    builds_policy: bool = False
    hides_gpus: bool = False
    team: Callable[[WorkerSpec, bytes], Hosted] | None = None
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
        num_seeds: Number of seeds that a reset takes.
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
    pid: int
    node: str
    bounded: bool
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


def plain_report(report: RolloutReport) -> tuple[Any, ...]:
    """Return a report in the form in which it is sent: a plain tuple.

    Pickling classes, once per rollout, takes ten times as long.

    Raises:
        TypeError: An extra does not pickle; the error names it.
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
    frames, version, episodes, seconds, stepped, slow_paths, extras, generators, *of_team = plain
    return RolloutReport(
        frames,
        version,
        episodes,
        WorkerSeconds(*seconds),
        stepped,
        slow_paths,
        None if extras is None else Lazy(extras),
        None if generators is None else Lazy(generators),
        *of_team,
    )


def packed_slab(slab: Slab) -> PackedBuffer:
    """Compress a slab's bytes, leaf by leaf."""
    return PackedBuffer.of(slab.array(), leaf_sizes(slab), _COMPRESS)


def opened_slab(buffer: Buffer | PackedBuffer) -> Buffer:
    """Return a rollout's bytes, decompressed if necessary."""
    return buffer.open(_COMPRESS) if isinstance(buffer, PackedBuffer) else buffer


@dataclass(frozen=True)
class ErrorReport:
    """An exception that is sent to the caller.

    Attributes:
        pickled: The pickled exception, or ``None`` if it does not survive pickling.
    """

    pickled: bytes | None
    text: str
    remote_traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Return the report of the exception that is being handled."""
        _explain_missing_name(error)
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:  # its __reduce__ or __init__ may raise anything
            pickled = None
        return cls(pickled, text, traceback.format_exc())

    @property
    def original(self) -> BaseException:
        """The raised exception, or a RuntimeError with its text if it cannot be unpickled."""
        error = self._loaded() or RuntimeError(self.text)
        error.__cause__ = RuntimeError(f"raised in another process:\n{self.remote_traceback}")
        return error

    def _loaded(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:  # its class exists only in the other process
            return None
        return error

    def rebuild(self, spec: WorkerSpec) -> BaseException:
        """Return the exception with a WorkerError as its cause, or that WorkerError itself.

        Args:
            spec: Specification of the worker that raised the exception.
        """
        failure = WorkerError(
            f"{spec.name} raised {self.text}\n{self.remote_traceback}",
            spec.index,
            spec.incarnation,
            self.remote_traceback,
        )
        error = self._loaded()
        if error is None:
            return failure
        error.__cause__ = failure
        return error


def _explain_missing_name(error: BaseException) -> None:
    """Explain a NameError that was raised in a function pickled without its module."""
    if type(error) is not NameError or error.__traceback__ is None:
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    if module is None or vars(module) is not frame.f_globals:
        error.args = (
            f"{error}: the class or function that uses this name is defined in the script or "
            "inside a function, so it was pickled without the name. Define it at the top level "
            "of a module that workers can import, or import the name inside the method",
        )


class Build(NamedTuple):
    """Make the environments and call the policy once as a test. The answer is a WorkerInfo.

    Attributes:
        filters_warnings: Whether to hide import warnings; see `import_warnings`.
        spec: Pickled WorkerSpec.
        policy: Pickled policy or policy factory, in the form of the channel.
    """

    filters_warnings: bool
    spec: bytes
    policy: Any


class Collect(NamedTuple):
    """Collect one rollout. The answer is its plain report, and its bytes if it has no rows.

    Attributes:
        number: Number of the request, which `Stop` refers to.
        random: Whether to take random actions instead of the policy's.
        min_steps: Minimum number of steps, even if the rollout is stopped.
        rows: Rows to write into. ``None``: the bytes are part of the answer, compressed if
            configured.
        weights: Newer weights, which a channel without published weights sends with the request.
    """

    number: int
    random: bool
    min_steps: int
    rows: RowsAddress | None = None
    serial: int = 0
    version: int = 0
    weights: Any = None


class Run(NamedTuple):
    """Call ``function(worker, *arguments)``. The answer is its pickled result.

    Attributes:
        call: Pickled tuple of the function and the arguments.
    """

    call: bytes


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
        version: Policy version at the time of the request. The worker does not receive it.
    """

    random: bool
    rows: SlabRows | None = None
    min_steps: int = 1
    version: int = 0


@dataclass(frozen=True)
class Rollout:
    """A rollout that has arrived: its report and its bytes.

    Attributes:
        buffer: Read-only bytes; ``None`` if the worker wrote into the rows of its request.
    """

    report: RolloutReport
    buffer: Buffer | None
