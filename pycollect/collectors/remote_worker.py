"""The class that runs inside an actor: a Worker whose every answer says whether it went well.

It is plain on purpose: no ``__len__``, ``__bool__``, ``__repr__`` or ``__getattr__`` that could
raise, because Ray then reports a dead actor and the error is lost. Exceptions are caught here and
travel as an :class:`ErrorReport`.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import (
    Leaf,
    Placement,
    RolloutControl,
    SharedNumber,
    SlabPool,
    merge_freed_memory,
)
from pycollect.batch import TRAJ_IDS, BatchLeaves, Target, make_pool, to_tensordict
from pycollect.collectors.hooks import PRE
from pycollect.collectors.inheritance import unpickled
from pycollect.collectors.profiling import ProfilerHook
from pycollect.devices import CPU
from pycollect.errors import WorkerError
from pycollect.extras import Extra, Extras, fitted, joined
from pycollect.generators import GeneratorState, TeamState
from pycollect.layout import Key, dotted
from pycollect.policy import build
from pycollect.rollout_report import Episode, TeamReport
from pycollect.step_timer import WorkerSeconds
from pycollect.weights import WeightSlab
from pycollect.worker import Worker
from pycollect.worker_options import WorkerOptions

if TYPE_CHECKING:
    from pycollect.collectors.remote_options import RemoteOptions
    from pycollect.collectors.team import Team

Buffer = npt.NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made from, in any process.

    Attributes:
        builds_policy: what comes beside it is a factory, not the policy itself. Either is pickled
            apart, since workers share it.
        hides_gpus: its process is not to see any.
        team: how processes of its own collect for it, one for each item of `entry`; `env_kwargs`
            may be a list of as many. None: it collects itself.
    """

    index: int
    entry: Any
    env_kwargs: Any
    options: WorkerOptions
    incarnation: int = 0
    builds_policy: bool = False
    hides_gpus: bool = False
    team: RemoteOptions | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker turned out to be once it was built.

    Attributes:
        num_seeds: how many its environments are reset with.
        bounded: its episodes are known to end.
        weights: names, dtypes and shapes of the policy's parameters and buffers.
        device: where its environments lie.
        processes: how many of its own collect for it; 0: it does so itself.
    """

    leaves: BatchLeaves
    num_envs: int
    num_seeds: int
    batch_size: tuple[int, ...]
    steps: int
    pid: int
    node: str
    bounded: bool
    weights: tuple[Leaf, ...] = ()
    device: torch.device = CPU
    processes: int = 0

    @property
    def frames(self) -> int:
        """Frames of one full rollout."""
        return self.num_envs * self.steps

    @cached_property
    def placement(self) -> Placement:
        """Where the leaves of one rollout lie. Made once, by whoever asks: it does not pickle."""
        return Placement(self.leaves.layout(), 1, self.num_envs, self.steps)


def check_alike(infos: Mapping[int, WorkerInfo]) -> None:
    """Raise ValueError if workers of a sync collector deliver different things."""
    (first, reference), *others = infos.items()
    for index, info in others:
        if info.batch_size != reference.batch_size:
            raise ValueError(
                "create_env_fn: expected environments alike in all workers of a sync collector; "
                f"worker {first} has the batch size {list(reference.batch_size)}, "
                f"worker {index} {list(info.batch_size)}"
            )
        ours: tuple[Leaf | Extra, ...] = (
            *reference.leaves.layout().leaves,
            *reference.leaves.extras,
        )
        theirs: tuple[Leaf | Extra, ...] = (*info.leaves.layout().leaves, *info.leaves.extras)
        if ours != theirs:
            odd = [leaf for leaf in [*ours, *theirs] if (leaf in ours) != (leaf in theirs)]
            raise ValueError(
                "create_env_fn: expected the same keys, dtypes and shapes from all workers of a "
                f"sync collector; worker {index} differs from worker {first} in "
                f"{sorted({dotted(leaf.key) for leaf in odd})}"
            )


class RolloutNote(NamedTuple):
    """What travels beside a rollout's bytes.

    Attributes:
        extras: pickled; None where there are none.
        generator_state: where the worker's own stand at its end, pickled, as few are ever looked
            at; None if it has none.
        team: None where the worker collected it itself.
    """

    episodes: list[Episode]
    seconds: WorkerSeconds
    stepped: int
    slow_paths: tuple[str, ...]
    extras: bytes | None = None
    generator_state: bytes | None = None
    team: TeamReport | None = None

    @classmethod
    def from_plain(cls, plain: tuple[Any, ...]) -> RolloutNote:
        """The note that `plain` was of."""
        episodes, seconds, *others = plain
        return cls(episodes, WorkerSeconds(*seconds), *others)

    def plain(self) -> tuple[Any, ...]:
        """As plain tuples: to pickle classes, once per rollout, takes ten times as long."""
        return (self.episodes, tuple(self.seconds), *self[2:])

    @property
    def generators(self) -> GeneratorState | TeamState | None:
        """Where the worker's own generators stand at its end; None if it has none."""
        if self.generator_state is None:
            return None
        state: GeneratorState | TeamState = pickle.loads(self.generator_state)
        return state


def pickled_extras(extras: Extras | None) -> bytes | None:
    """The extras of a rollout as they travel; TypeError that names one that does not pickle."""
    if extras is None:
        return None
    try:
        data: bytes = cloudpickle.dumps(extras)
        return data
    except Exception:
        for key, cells in extras.items():
            try:
                cloudpickle.dumps(cells)
            except Exception as error:
                raise TypeError(
                    f"{dotted(key)}: expected values that pickle, as they leave their process: "
                    f"{error}"
                ) from error
        raise


def join_extras(
    pickled: Sequence[bytes | None],
    join: str | int,
    info: WorkerInfo,
    steps: Sequence[int] | None = None,
) -> Extras | None:
    """The extras of several workers' rollouts, in their order, as those of a batch.

    Args:
        steps: how many each is to have in the batch, cut or padded; None: as many as it has.
    """
    if not info.leaves.extras:
        return None
    rollouts = [cloudpickle.loads(data) for data in pickled]
    if steps is not None:
        rollouts = [fitted(own, count) for own, count in zip(rollouts, steps, strict=True)]
    return joined(rollouts, join, info.batch_size)


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
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:  # whatever its __reduce__ or __init__ do
            pickled = None
        return cls(pickled, text, traceback.format_exc())

    def rebuild(self, worker: int, incarnation: int) -> BaseException:
        """The exception with a WorkerError as its cause, or the WorkerError itself."""
        failure = WorkerError(
            f"worker {worker} raised {self.text}\n{self.remote_traceback}",
            worker,
            incarnation,
            self.remote_traceback,
        )
        if self.pickled is None:
            return failure
        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:  # a class that exists only over there
            return failure
        error.__cause__ = failure
        return error


class RemoteWorker:
    """A worker behind calls from another process.

    Every method but `set_weights`, `set_hook`, `steps` and `stop` is to run in one and the same
    thread, so that environments see no other; these may come at any time.
    """

    def __init__(self, inherited: tuple[Any, ...] = ()) -> None:
        self._inherited = inherited
        self._worker: Worker | Team | None = None
        self._pool: SlabPool | None = None  # of rollouts that travel
        self._weight_slab: WeightSlab | None = None
        self._lock = threading.Lock()
        self._given: tuple[int, int, Buffer | None] = (0, 0, None)
        self._edition = 0
        self._version = 0
        self.post_collect_hook: Callable[[Any], Any] | None = None
        self._hooks_given: dict[str, tuple[int, Buffer]] = {}
        self._hooks_taken: dict[str, int] = {}
        self._stop = SharedNumber()  # up to which rollout they are to end

    def build(self, spec: bytes, policy: bytes) -> WorkerInfo | ErrorReport:
        """Make the environments and try the policy once.

        Args:
            spec: a WorkerSpec, pickled.
            policy: the policy or its factory, pickled.
        """
        return _answer(lambda: self._build(spec, policy))

    def _build(self, spec_bytes: bytes, policy_bytes: bytes) -> WorkerInfo:
        # A new process starts torch's generator at a constant: all workers would draw alike.
        torch.seed()
        merge_freed_memory()
        spec: WorkerSpec = unpickled(spec_bytes, self._inherited)
        if spec.hides_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch looks when it is first asked
        if spec.options.num_threads is not None:
            torch.set_num_threads(spec.options.num_threads)
        worker = self._made(spec, policy_bytes)
        self._worker = worker
        self._weight_slab = WeightSlab(worker.weights) if worker.weights else None
        return self._info()

    def _made(self, spec: WorkerSpec, policy_bytes: bytes) -> Worker | Team:
        if spec.team is not None:
            from pycollect.collectors.team import Team  # which is made of what is here

            return Team(spec, policy_bytes)
        policy = cloudpickle.loads(policy_bytes)
        if spec.builds_policy:
            policy = build(policy)
        self.post_collect_hook = spec.options.post_collect_hook
        return Worker(
            spec.index, spec.entry, spec.env_kwargs, policy, spec.options, spec.incarnation
        )

    def _info(self) -> WorkerInfo:
        worker = self._built
        return WorkerInfo(
            leaves=worker.leaves,
            num_envs=worker.env.num_envs,
            num_seeds=worker.env.num_seeds,
            batch_size=worker.env.batch_size,
            steps=worker.steps,
            pid=os.getpid(),
            node=socket.gethostname(),
            bounded=worker.bounded,
            weights=worker.weights,
            device=worker.device,
            processes=worker.processes,
        )

    def collect(
        self,
        number: int,
        random: bool,
        min_steps: int,
        edition: int,
        version: int,
        weights: Buffer | None,
    ) -> tuple[RolloutNote, Buffer] | ErrorReport:
        """One rollout, as its slab's bytes.

        Args:
            number: the how many-th it is that was asked for; see `stop`.
            random: random actions instead of the policy's.
            min_steps: it has so many at least if it is stopped.
            edition: of the weights that the caller knows to be the newest.
            version: the policy version that they make.
            weights: these, None if they were sent before or never changed.
        """
        self.set_weights(edition, version, weights)
        control = RolloutControl(self._stop, number, min_steps)
        return _answer(lambda: self._collect(random, control))

    def _collect(self, random: bool, control: RolloutControl) -> tuple[RolloutNote, Buffer]:
        if self._pool is None:
            self._pool = make_pool(self._built.placement, 2)
        slab = self._pool.acquire()
        note = self._collect_into(Target(slab), random, control)
        return note, slab.array()

    def stop(self, number: int) -> None:
        """Rollouts up to this one of `collect` are to end after their current step."""
        with self._lock:
            self._stop.value = max(self._stop.value, number)

    def _collect_into(self, target: Target, random: bool, control: RolloutControl) -> RolloutNote:
        worker = self._built
        self._take_weights(worker)
        self._take_hooks(worker, self._hooks_given)
        report = worker.collect(target.slab, target.row, self._version, random, control)
        _bring(report.there, worker, target)
        target.header()
        self._show(worker, target)
        generators = worker.generator_state()
        return RolloutNote(
            report.episodes,
            report.seconds,
            report.stepped,
            report.slow_paths,
            pickled_extras(report.extras),
            None if generators is None else pickle.dumps(generators),
            report.team,
        )

    def _show(self, worker: Worker | Team, target: Target) -> None:
        """The hook's rollout is the one that is delivered: what it writes there arrives."""
        if self.post_collect_hook is not None:
            tensors = target.tensors(worker.env.batch_size, worker.leaves.keys)
            shape = [*worker.env.batch_size, tensors[TRAJ_IDS].shape[-1]]
            self.post_collect_hook(to_tensordict(tensors, shape))

    def set_weights(self, edition: int, version: int, weights: Buffer | None) -> None:
        """Keep weights for the next rollout to start, if they are newer than what is there."""
        with self._lock:
            if weights is not None and edition > self._given[0]:
                self._given = (edition, version, weights)

    def _take_weights(self, worker: Worker | Team) -> None:
        with self._lock:
            edition, version, buffer = self._given
        if buffer is not None and edition > self._edition:
            if self._weight_slab is not None:
                worker.load_weights(self._weight_slab.unpack(buffer))
            self._edition, self._version = edition, version

    def set_hook(self, name: str, edition: int, pickled: Buffer) -> None:
        """Keep a hook for the next rollout to start."""
        with self._lock:
            self._hooks_given = {**self._hooks_given, name: (edition, pickled)}

    def _take_hooks(self, worker: Worker | Team, hooks: Mapping[str, tuple[int, Buffer]]) -> None:
        """Call from now on those of them that are new."""
        for name, (edition, pickled) in hooks.items():
            if edition > self._hooks_taken.get(name, 0):
                self._use_hook(worker, name, cloudpickle.loads(pickled))
                self._hooks_taken[name] = edition

    def _use_hook(self, worker: Worker | Team, name: str, hook: Any) -> None:
        if not isinstance(worker, Worker):
            worker.set_hook(name, hook)
        elif name == PRE:
            worker.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def set_seed(self, seeds: Sequence[int], root: int) -> ErrorReport | None:
        """Seed and reset everything."""
        return _answer(lambda: self._built.set_seed(seeds, root))

    def resume(self, state: Any, seeds: Sequence[int]) -> ErrorReport | None:
        """Reset everything, and go on with generators that stood so."""
        return _answer(lambda: self._built.resume(state, seeds))

    def resize(self, frames: int) -> WorkerInfo | ErrorReport:
        """Collect that many frames per rollout from now on."""
        return _answer(lambda: self._resize(frames))

    def _resize(self, frames: int) -> WorkerInfo:
        self._built.set_share(frames)
        self._pool = None
        return self._info()

    def reset(self) -> ErrorReport | None:
        """Reset all environments."""
        return _answer(lambda: self._built.reset())

    def ask(self, question: bytes) -> bytes | ErrorReport:
        """What the worker shows of itself, see :func:`answered`."""
        return _answer(lambda: self._shown(question))

    def _shown(self, question: bytes) -> bytes:
        from pycollect.collectors.worker_face import TeamFace, WorkerFace, answered

        worker = self._built
        if isinstance(worker, Worker):
            return answered(WorkerFace(worker.index, worker, self), question)
        return answered(TeamFace(worker.index, worker), question)

    @property
    def version(self) -> int:
        """The policy version of the weights that were taken last."""
        return self._version

    def steps(self) -> int:
        """Steps of single environments recorded so far. May be asked at any time."""
        return 0 if self._worker is None else self._worker.stepped

    @property
    def _built(self) -> Worker | Team:
        assert self._worker is not None
        return self._worker

    def close(self) -> None:
        """Close the environments."""
        if isinstance(self.post_collect_hook, ProfilerHook):
            self.post_collect_hook.stop()
        if self._worker is not None:
            self._worker.close()


def _bring(there: Mapping[Key, torch.Tensor], worker: Worker | Team, target: Target) -> None:
    """Copy what was recorded on a device to its place in the slab, once for a whole rollout."""
    if there:
        tensors = target.tensors(worker.env.batch_size, worker.leaves.keys)
        for key, recorded in there.items():
            tensors[key].copy_(recorded)


def _answer(function: Callable[[], T]) -> T | ErrorReport:
    try:
        return function()
    except Exception as error:  # carried to the caller, who raises it
        return ErrorReport.of(error)
