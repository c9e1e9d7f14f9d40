"""The demo's collectors: Ray actors, or this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pycollect.demo.tasks import Task


@contextmanager
def _with_empty_cells() -> Iterator[None]:
    """Hide the advice on cells without a frame, which the demo's PPO masks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "create_env_fn: this vector environment")
        yield


@_with_empty_cells()
def single(task: Task, policy: Any) -> Any:
    """Collect with one worker in this process."""
    from pycollect import SyncDataCollector

    return SyncDataCollector(
        task.make_env,
        policy,
        frames_per_batch=task.num_envs * task.steps,
        total_frames=task.frames,
        num_threads=task.threads,
    )


@_with_empty_cells()
def ray(task: Task, workers: int, policy: Any) -> Any:
    """Collect on-policy with the actors of a new local Ray, not of a running cluster."""
    from pycollect import RayCollector

    return RayCollector(
        [task.make_env] * workers,
        policy,
        frames_per_batch=workers * task.num_envs * task.steps,
        total_frames=task.frames,
        sync=True,
        ray_init_config={
            "address": "local",
            "num_cpus": workers,
            "include_dashboard": False,
            "logging_level": "error",
        },
    )
