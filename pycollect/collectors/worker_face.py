"""What a worker elsewhere shows of itself to whoever asks it by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

from pycollect.collectors.one_worker import OneWorker
from pycollect.worker import Worker
from pycollect.worker_options import WorkerOptions

if TYPE_CHECKING:
    from pycollect.collectors.remote_worker import RemoteWorker
    from pycollect.collectors.team import Team

# What moves the stream: a worker that did it by itself would not be where the collector thinks.
_THE_COLLECTORS = frozenset(
    [
        "async_shutdown",
        "iterator",
        "load_state_dict",
        "next",
        "pause",
        "reset",
        "rollout",
        "set_seed",
        "shutdown",
        "start",
        "state_dict",
        "update_policy_weights_",
    ]
)


class _Face:
    """Says what is not there."""

    def __getattr__(self, name: str) -> Any:
        if name in _THE_COLLECTORS:
            raise AttributeError(f"{name}: not of one worker; call the collector's {name}()")
        raise AttributeError(f"a worker has no attribute {name!r}")


class WorkerFace(_Face, OneWorker):
    """The names that TorchRL's collector in a worker has, as far as they move nothing."""

    def __init__(self, index: int, worker: Worker, ends: RemoteWorker) -> None:
        self._worker = worker
        self._ends = ends
        self.worker_idx = index
        self.total_frames = math.inf
        self.closed = False

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._worker.options

    @property
    def policy(self) -> Any:
        """The worker's copy; None for random actions."""
        return self._worker.policy

    @property
    def frames_per_batch(self) -> int:
        """Frames of one rollout."""
        return self._worker.steps * self._worker.env.num_envs

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int:
        """Of the weights that it has."""
        return self._ends.version

    def get_policy_version(self) -> int:
        """`policy_version`."""
        return self.policy_version

    @property
    def pre_collect_hook(self) -> Any:
        """Called before each rollout."""
        return self._worker.pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._worker.pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> Any:
        """Called with each rollout."""
        return self._ends.post_collect_hook

    def set_post_collect_hook(self, hook: Any) -> None:
        """Set `post_collect_hook` of this worker alone, until it is replaced."""
        self._ends.post_collect_hook = hook

    def stats(self) -> dict[str, Any]:
        """Its own counts."""
        return {
            "frames": self._worker.stepped,
            "requested_frames_per_batch": self.frames_per_batch,
            "policy_version": self.policy_version,
        }


class TeamFace(_Face):
    """The same of a worker with processes of its own, each of which answers."""

    def __init__(self, index: int, team: Team) -> None:
        self._processes = team.collector
        self.worker_idx = index
        self.num_workers = team.processes

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first process's environment."""
        return self._processes.getattr_env(attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the first process's policy."""
        return self._processes.getattr_policy(attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What each process has at that path."""
        return self._processes.get_distant_attr(attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What a method of each process returns."""
        return self._processes.map_fn(method_name, list_of_args, list_of_kwargs)

    def set_post_collect_hook(self, hook: Any) -> None:
        """Of all its processes."""
        self._processes.post_collect_hook = hook

    def stats(self) -> dict[str, Any]:
        """Their counts together."""
        return {"frames": sum(own["frames"] for own in self._processes.map_fn("stats"))}

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of these."""
        return getattr(self, attr_path)(*args, **kwargs)


def answered(face: WorkerFace | TeamFace, question: bytes) -> bytes:
    """What a method of the face returns, pickled.

    Args:
        question: its name, positional and keyword arguments, pickled.

    Raises:
        TypeError: that does not pickle.
        Exception: what the method raises.
    """
    method, args, kwargs = cloudpickle.loads(question)
    value = getattr(face, method)(*args, **kwargs)
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        asked = ", ".join(map(repr, args))
        raise TypeError(
            f"{method}({asked}): expected a value that pickles, got {type(value).__name__}: {error}"
        ) from error
    return data
