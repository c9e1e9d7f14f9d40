"""Messages to a worker and back, what a host runs, and inherited settings of a process."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import queues, sharedctypes, synchronize
from typing import Any, Protocol

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import Placement, RolloutControl, Slab
from pycollect.data.compression import PackedBuffer
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.slabs import SlabRows, leaf_sizes
from pycollect.data.weights import NO_WEIGHT_SPEC, Weights, WeightSpec
from pycollect.envs.registrations import Registered, program_registrations
from pycollect.errors import WorkerError
from pycollect.worker.generators import GeneratorState, NestState
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds

_SHARED = (
    sharedctypes.SynchronizedBase,
    synchronize.SemLock,
    synchronize.Condition,
    synchronize.Event,
    queues.Queue,
    queues.SimpleQueue,
)


def is_inherited(value: Any) -> bool:
    """Whether it is to be shared with a process, not copied into it."""
    return isinstance(value, _SHARED) or any(
        kind.__name__ == "EnvCreator" and kind.__module__ == "torchrl.envs.env_creator"
        for kind in type(value).__mro__
    )


def pickled_apart(value: Any) -> tuple[bytes, tuple[Any, ...]]:
    """The value, pickled, and what of it is inherited: to be arguments of the process."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), tuple(pickler.inherited)


def unpickled(data: bytes, inherited: Sequence[Any] = ()) -> Any:
    """The value again, from what `pickled_apart` or cloudpickle gave."""
    return _Unpickler(io.BytesIO(data), inherited).load()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc] # has no types
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.inherited: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not is_inherited(value):
            return None
        for place, other in enumerate(self.inherited):
            if other is value:
                return place
        self.inherited.append(value)
        return len(self.inherited) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, inherited: Sequence[Any]) -> None:
        super().__init__(file)
        self._inherited = inherited

    def persistent_load(self, place: int) -> Any:
        return self._inherited[place]


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
    def weights(self) -> WeightSpec:
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
    def stacked(self) -> bool:
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

    def generator_state(self) -> GeneratorState | NestState | None:
        """Where its generators stand; None if it has none of its own."""

    def close(self) -> None:
        """Close the environments."""


Buffer = npt.NDArray[np.uint8]

_COMPRESS = "compress"  # the argument


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made from, in any process.

    Attributes:
        builds_policy: what comes beside it is a factory, not the policy itself. Either is pickled
            apart, since workers share it.
        hides_gpus: its process is not to see any.
        role: what it is, where it is no worker of a collector.
        team: makes what collects there, of this spec and the pickled policy: processes of its own,
            one for each item of `entry`; `env_kwargs` may be a list of as many. None: it collects
            itself.
        registered: registrations of environments by the program.
    """

    index: int
    entry: Any
    env_kwargs: Any
    options: WorkerOptions
    incarnation: int = 0
    builds_policy: bool = False
    hides_gpus: bool = False
    team: Callable[[WorkerSpec, bytes], RolloutWorker] | None = None
    role: str = ""
    registered: Registered = field(default_factory=program_registrations)

    @property
    def name(self) -> str:
        """It, in words."""
        return self.role or f"worker {self.index}"


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker turned out to be once it was built.

    Attributes:
        num_seeds: how many its environments are reset with.
        bounded: its episodes are known to end.
        weights: Form of the policy's weights.
        device: where its environments lie.
        processes: how many of its own collect for it; 0: it does so itself.
        stacked: these are stacked in a rollout, each a part of its own.
        warnings: what the user is to be told, which only the driver can.
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
        """Where the leaves of one rollout lie. Made once, by whoever asks: it does not pickle."""
        return Placement(self.leaves.layout(), 1, self.num_envs, self.steps)


def plain_report(report: RolloutReport) -> tuple[Any, ...]:
    """A report as it travels; TypeError that names an extra that does not pickle.

    As plain tuples: to pickle classes, once per rollout, takes ten times as long.
    """
    packed = (report.extras, report.generators)
    return (
        *report[:3],
        tuple(report.seconds),
        report.stepped,
        report.slow_paths,
        *(None if own is None else own.pickled for own in packed),
        report.sources,
        dict(report.lost),
        report.restarts,
    )


def unpacked_report(plain: tuple[Any, ...]) -> RolloutReport:
    """The report that `plain_report` made this of; few ever look at where its generators stood."""
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
    """A rollout's bytes as they travel compressed, leaf by leaf."""
    return PackedBuffer.of(slab.array(), leaf_sizes(slab), _COMPRESS)


def opened_slab(buffer: Buffer | PackedBuffer) -> Buffer:
    """A rollout's bytes, which may have been compressed."""
    return buffer.open(_COMPRESS) if isinstance(buffer, PackedBuffer) else buffer


@dataclass(frozen=True)
class ErrorReport:
    """An exception on its way to the caller.

    Attributes:
        pickled: the exception, None if it does not survive pickling.
    """

    pickled: bytes | None
    text: str
    remote_traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """The report of an exception that is being handled."""
        _explain_missing_name(error)
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:  # whatever its __reduce__ or __init__ do
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
        except Exception:  # a class that exists only over there
            return None
        return error

    def rebuild(self, spec: WorkerSpec) -> BaseException:
        """The exception with a WorkerError as its cause, or the WorkerError itself.

        Args:
            spec: of whoever raised it.
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
    """Extend the text of a NameError that a function without its module has raised."""
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


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout, as it is asked for.

    Attributes:
        random: with random actions instead of the policy's.
        rows: where it is to lie. A worker that writes in place uses these until the rollout is
            there, also if it is dropped, or its process is gone. None: a slab is found once the
            rollout is there, and it comes with its own bytes.
        min_steps: it has so many steps at least, also where it is stopped.
    """

    random: bool
    rows: SlabRows | None = None
    min_steps: int = 1


@dataclass(frozen=True)
class Rollout:
    """A rollout that arrived: what is said of it, and its bytes, read-only.

    Attributes:
        buffer: None where the worker wrote it into the rows of its request.
    """

    report: RolloutReport
    buffer: Buffer | None


def pickled(name: str, value: Any) -> bytes:
    """Pickle a value for another process; raise TypeError with the argument's name on failure."""
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise _unsent(name, error) from error
    return data


def _unsent(name: str, error: Exception) -> TypeError:
    text = f"{name}: cannot be pickled to be sent to a worker: {error}"
    if "through inheritance" in str(error):
        text += (
            "; processes can share multiprocessing's values and locks only on one machine, so use "
            "MultiSyncDataCollector or MultiaSyncDataCollector"
        )
    return TypeError(text)


def pickled_spec(spec: WorkerSpec) -> bytes:
    """A worker's spec, pickled for a process that runs already."""
    return pickled("create_env_fn", spec)


def pickled_for_child(spec: WorkerSpec) -> tuple[bytes, tuple[Any, ...]]:
    """A worker's spec, pickled for a process that is about to be started, and what that inherits.

    Raises TypeError as `pickled`.
    """
    try:
        return pickled_apart(spec)
    except Exception as error:
        raise _unsent("create_env_fn", error) from error
