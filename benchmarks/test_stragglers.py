"""One worker that is twenty times slower than the others, and is not waited for.

Environments sleep, so that no core is missing to anybody. Only the others' frames are counted; the
limit is the others alone.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from benchmarks import workloads
from benchmarks.race import Side

OTHERS = 2
STEPS = 200
STEP_SECONDS = 0.002
SLOWER = 20
PEER = "TorchRL"
ALONE = f"the {OTHERS} others alone"
WAITED_FOR = "pycollect, not preempted"


class Sleeping(gymnasium.Env):
    """Each step takes a given time; episodes have 100 steps."""

    def __init__(self, seconds: float) -> None:
        """Remember how long a step takes."""
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.seconds = seconds
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Sleep."""
        time.sleep(self.seconds)
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, False, self.steps == 100, {}


def ours(steps: int, stragglers: int, threshold: float | None) -> Iterator[int]:
    """MultiSyncDataCollector of pycollect; the last `stragglers` workers are slow."""
    from pycollect import MultiSyncDataCollector

    arguments = _arguments(steps, stragglers, threshold)
    with MultiSyncDataCollector(_envs(stragglers), **arguments) as running:
        for batch in running:
            workloads.read(batch)
            frames = batch["collector", "traj_ids"][:OTHERS] >= 0
            yield int(frames.sum())


def torchrl(steps: int, stragglers: int, threshold: float | None) -> Iterator[int]:
    """The same of TorchRL, of which all frames of the others are there."""
    from torchrl.collectors import MultiSyncCollector

    envs = [workloads.for_torchrl(env) for env in _envs(stragglers)]
    arguments = _arguments(steps, stragglers, threshold)
    running = MultiSyncCollector(envs, cat_results="stack", **arguments)
    try:
        for batch in running:
            yield workloads.read(batch) * OTHERS // len(envs)
    finally:
        running.shutdown()


def _envs(stragglers: int) -> list[Any]:
    fast, slow = partial(Sleeping, STEP_SECONDS), partial(Sleeping, SLOWER * STEP_SECONDS)
    return [fast] * OTHERS + [slow] * stragglers


def _arguments(steps: int, stragglers: int, threshold: float | None) -> dict[str, Any]:
    workers = OTHERS + stragglers
    return {
        "policy": workloads.linear_policy(),
        "frames_per_batch": steps * workers,
        "total_frames": workloads.FOREVER,
        "preemptive_threshold": threshold,
    }


def test_stragglers(compare: Callable[..., None], smoke: bool) -> None:
    """Two workers of three are enough."""
    steps = 10 if smoke else STEPS
    preempted = {"steps": steps, "stragglers": 1, "threshold": 0.6}
    compare(
        f"preemption, processes, {OTHERS} workers and one {SLOWER} times slower, T={steps}",
        [
            Side("pycollect", ours, preempted),
            Side(PEER, torchrl, preempted, needs="torchrl", spawns=True),
            Side(WAITED_FOR, ours, {**preempted, "threshold": None}),
            Side(ALONE, ours, {"steps": steps, "stragglers": 0, "threshold": None}),
        ],
        frame_bytes=2 * 3 * 4,
        wanted={ALONE: 0.85},
    )
