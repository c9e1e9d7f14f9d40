"""The demo's two ways to collect: Ray actors, or this process."""

from __future__ import annotations

from typing import Any

from pycollect.demo.tasks import Task


def single(task: Task, policy: Any) -> Any:
    """One worker in this process."""
    from pycollect import SyncDataCollector

    return SyncDataCollector(
        task.make_env,
        policy,
        frames_per_batch=task.num_envs * task.steps,
        total_frames=task.frames,
        num_threads=task.threads,
    )


def ray(task: Task, workers: int, policy: Any) -> Any:
    """Actors of a local Ray of their own, which waits for no other cluster; on-policy."""
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
