"""What all collectors share: one stream of batches, its counting, its delivery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect._core import TrajectoryIds
from pycollect.batch import BatchLeaves, to_tensordict
from pycollect.collectors import arguments as check
from pycollect.collectors.progress import Progress
from pycollect.collectors.statistics import Statistics
from pycollect.extras import Extras
from pycollect.extras_delivery import with_extras
from pycollect.layout import Key
from pycollect.trajectory import split_trajectories
from pycollect.worker import Episode

_METHODS_TO_COME = frozenset(
    {
        "add_collectors",
        "ledger",
        "load_state_dict",
        "pause",
        "remove_collectors",
        "reset",
        "start",
        "state_dict",
        "stop_remote_collectors",
    }
)


@dataclass(frozen=True)
class StreamOptions:
    """The arguments that concern the stream of batches, checked.

    Attributes:
        total_frames: None: without an end.
        init_random_frames: 0: none.
        device: what ``td.device`` of a batch says.
    """

    frames_per_batch: int
    total_frames: int | None
    init_random_frames: int
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    split_trajs: bool
    device: torch.device | None
    progress: bool

    @classmethod
    def checked(
        cls,
        *,
        frames_per_batch: Any,
        total_frames: Any,
        init_random_frames: Any,
        postproc: Any,
        split_trajs: Any,
        device: torch.device | None,
        progress: Any,
    ) -> StreamOptions:
        """Check each; the errors name the argument."""
        return cls(
            frames_per_batch=check.check_positive("frames_per_batch", frames_per_batch),
            total_frames=check.check_total_frames(total_frames),
            init_random_frames=check.check_count("init_random_frames", init_random_frames),
            postproc=check.check_callable("postproc", postproc),
            split_trajs=bool(split_trajs),
            device=device,
            progress=bool(progress),
        )


@dataclass(frozen=True)
class Batch:
    """An assembled batch before it is delivered.

    Attributes:
        shape: its batch dimensions, time last.
        frames: collected ones; uncollected cells are not counted.
        leaves: what a frame consists of.
        extras: of its shape each; None where there are none.
    """

    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    frames: int
    episodes: Sequence[Episode]
    leaves: BatchLeaves
    extras: Extras | None = None


class CollectorBase(ABC):
    """A stream of batches: ``iter()``, ``next()`` and ``.next()`` all go on where it stands.

    Subclasses set `_batch_frames` (frames of a full batch) before the first batch is asked for and
    produce batches in `_collect`.
    """

    _batch_frames: int

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._statistics = Statistics()
        self._ids = TrajectoryIds()
        self._policy_version = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._progress: Progress | None = None

    # The stream

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self

    def __next__(self) -> TensorDictBase:
        batch = self.next()
        if batch is None:
            raise StopIteration
        return batch

    def next(self) -> TensorDictBase | None:
        """The next batch, or None once `total_frames` were delivered.

        Raises:
            RuntimeError: the collector was shut down before its end.
            WorkerError: a worker died.
            Exception: what an environment or the policy raised; again at every later call.
        """
        if self._has_ended:
            self._close_progress()
            return None
        if self._closed:
            raise RuntimeError("the collector was shut down: no more batches can be collected")
        if self._failure is not None:
            raise self._failure
        self._statistics.entered()
        try:
            batch = self._collect()
        except Exception as error:
            self._failure = error
            raise
        self._statistics.count(batch.frames, batch.episodes)
        with self._statistics.timed("deliver"):
            td = self._deliver(batch)
        self._show_progress(batch.frames)
        self._statistics.left()
        return td

    @abstractmethod
    def _collect(self) -> Batch:
        """Produce the next batch."""

    def _deliver(self, batch: Batch) -> TensorDictBase:
        td: TensorDictBase = to_tensordict(
            batch.tensors, batch.shape, self._options.device, batch.leaves.shapes
        )
        if parcel := batch.leaves.parcel(batch.extras):
            td = with_extras(td, parcel)
        if self._options.split_trajs:
            td = split_trajectories(td)
        if self._options.postproc is not None:
            td = self._options.postproc(td)
            if td is None:
                raise TypeError("postproc: expected it to return the batch, got None")
        return td

    @property
    def _has_ended(self) -> bool:
        total = self._options.total_frames
        return total is not None and self._statistics.frames >= total

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """The number of batches in all, delivered ones included, if every batch is full."""
        if self._options.total_frames is None:
            raise TypeError(
                f"len() of a {type(self).__name__} without an end: total_frames was not given"
            )
        return -(-self._options.total_frames // self._batch_frames)

    # Progress

    def _show_progress(self, frames: int) -> None:
        if not self._options.progress:
            return
        if self._progress is None:
            self._progress = Progress(self._options.total_frames)
        lag = max(self.policy_lag.values(), default=0)
        self._progress.update(frames, self._statistics.episode_return, lag)
        if self._has_ended:
            self._close_progress()

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()

    # What it is and does

    @property
    def frames_per_batch(self) -> int:
        """Frames in one full batch, after rounding up."""
        return self._batch_frames

    @property
    def total_frames(self) -> int:
        """The lower bound of delivered frames, -1 without one."""
        total = self._options.total_frames
        return -1 if total is None else total

    @property
    def policy_version(self) -> int:
        """0 at first, one more with each weight update."""
        return self._policy_version

    @property
    @abstractmethod
    def policy_lag(self) -> dict[int, int]:
        """Per worker: how many versions its last delivered rollout was behind."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Frames, batches, episodes, workers and where the time went; JSON-able."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, policy noise and random actions, and reset everything.

        Environments get the seeds of TorchRL's chain in (worker, env) order: the first `seed`, each
        next the following one, or all `seed` with `static_seed`. Rollouts in flight are dropped.

        Returns:
            The next seed of the chain.
        """

    @abstractmethod
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        wait: bool = False,
    ) -> None:
        """Give workers new weights, which they take when they start their next rollout.

        Args:
            policy_or_weights: an nn.Module, a TensorDict of parameters or a state dict with the
                names and shapes of the collector's policy. None: the policy that the collector was
                made with.
            worker_ids: one id or several; None: all workers.
            wait: return only when all have got them.

        Raises:
            ValueError: names or shapes differ, or a worker id is unknown.
            TypeError: `policy_or_weights` is none of these.
        """

    def __getattr__(self, name: str) -> Any:
        """Methods that are to come: calling one raises NotImplementedError that names it."""
        if name not in _METHODS_TO_COME:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def to_come(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{type(self).__name__}.{name}() is not implemented yet")

        return to_come

    def shutdown(self) -> None:
        """Close environments and end workers. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_progress()
            self._shutdown()

    @abstractmethod
    def _shutdown(self) -> None: ...

    def __enter__(self) -> CollectorBase:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def check_open(closed: bool, failure: BaseException | None) -> None:
    """Raise where nothing can be asked of the workers any more."""
    if closed:
        raise RuntimeError("the collector was shut down")
    if failure is not None:
        raise failure


def no_weights_given() -> ValueError:
    """What an update without weights raises where the caller has no policy."""
    return ValueError(
        "policy_or_weights: expected a module or weights, got None; policy_factory builds the "
        "policy in the worker, so that there are none here to take"
    )


def check_worker_ids(worker_ids: int | Sequence[int] | None, known: Sequence[int]) -> list[int]:
    """The ids as a list, all of `known` for None; ValueError for an unknown one."""
    if worker_ids is None:
        return list(known)
    if not isinstance(worker_ids, int | Sequence) or isinstance(worker_ids, str):
        raise TypeError(f"worker_ids: expected an int, several or None, got {worker_ids!r}")
    ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
    unknown = [index for index in ids if index not in known]
    if unknown:
        raise ValueError(f"worker_ids: expected ids among {list(known)}, got {unknown}")
    return ids
