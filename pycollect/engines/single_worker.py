"""A Worker behind calls from another process: its hooks come from there, and questions about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cloudpickle

from pycollect.engines.face import Face
from pycollect.engines.messages import WorkerSpec
from pycollect.policy import build
from pycollect.worker.hooks import PRE
from pycollect.worker.one_worker import OneWorker
from pycollect.worker.options import WorkerOptions
from pycollect.worker.profiling import ProfilerHook
from pycollect.worker.worker import Worker


class SingleWorker(Worker):
    """A Worker that collects in a process of its own.

    Args:
        spec: what it is made from.
        policy: pickled, or its factory.
    """

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
    def beside(self) -> bool:
        """There are none."""
        return False

    def face(self, version: int) -> Face:
        """What it shows of itself to whoever asks by name, with weights of that version."""
        return WorkerFace(self, version)

    def set_hook(self, name: str, hook: Any) -> None:
        """A hook, from the next rollout on."""
        if name == PRE:
            self.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def close(self) -> None:
        """Close the environments."""
        if isinstance(self.post_collect_hook, ProfilerHook):
            self.post_collect_hook.stop()
        super().close()


class WorkerFace(Face, OneWorker):
    """The names that TorchRL's collector in a worker has, as far as they move nothing."""

    def __init__(self, worker: SingleWorker, version: int) -> None:
        self._worker: SingleWorker = worker
        self.worker_idx = worker.index
        self.policy_version = version
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
        return self._worker.post_collect_hook

    def set_post_collect_hook(self, hook: Any) -> None:
        """Set `post_collect_hook` of this worker alone, until it is replaced."""
        self._worker.post_collect_hook = hook

    def stats(self) -> dict[str, Any]:
        """Its own counts."""
        return {
            "frames": self._worker.stepped,
            "requested_frames_per_batch": self.frames_per_batch,
            "policy_version": self.policy_version,
        }
