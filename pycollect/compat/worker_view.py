"""The attributes of a worker that TorchRL's programs read. This code runs in the worker."""

from __future__ import annotations

import math
from typing import Any

from pycollect.checks import check_callable
from pycollect.compat.one_worker import OneWorker
from pycollect.policy.remote import RemotePolicy
from pycollect.transport.host import SingleWorker
from pycollect.worker.options import POST, PRE, WorkerOptions

# These advance or reset collection, so a worker may not run them without its collector.
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


class View:
    """Base of the readable attributes; explains names that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _THE_COLLECTORS:
            raise AttributeError(
                f"not available on a single worker; call {name}() of the collector"
            )
        raise AttributeError(f"a worker has no attribute {name!r}")


class WorkerView(View, OneWorker):
    """The names that TorchRL's collector in a worker has, as far as they move nothing."""

    def __init__(self, worker: SingleWorker) -> None:
        self._worker: SingleWorker = worker
        self.worker_idx = worker.index
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
        frames: int = self._worker.steps * self._worker.num_envs
        return frames

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int | None:
        """Version of the worker's weights; None if an inference server has them."""
        return None if isinstance(self._worker.policy, RemotePolicy) else self._worker.version

    def get_policy_version(self) -> int | None:
        """`policy_version`."""
        return self.policy_version

    @property
    def pre_collect_hook(self) -> Any:
        """Called before each rollout."""
        return self._worker.pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._worker.pre_collect_hook = check_callable(PRE, hook)

    @property
    def post_collect_hook(self) -> Any:
        """Called with each rollout."""
        return self._worker.post_collect_hook

    def set_post_collect_hook(self, hook: Any) -> None:
        """Set `post_collect_hook` of this worker alone, until it is replaced."""
        self._worker.post_collect_hook = check_callable(POST, hook)

    def stats(self) -> dict[str, Any]:
        """Its own counts."""
        return {
            "frames": self._worker.stepped,
            "requested_frames_per_batch": self.frames_per_batch,
            "policy_version": self.policy_version,
        }
