"""Collect without waiting for one worker that is twenty times slower than the others.

Environments sleep, so they need no cores. Only frames of the other workers are counted; the limit
is these workers alone.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from tensordict import TensorDictBase

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, read, torchrls

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
        """Store the duration of a step."""
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


def read_others(batch: TensorDictBase) -> int:
    """Read a batch; return the frames of the workers that are not slow."""
    read(batch)
    return int((batch["collector", "traj_ids"][:OTHERS] >= 0).sum())


def read_share(batch: TensorDictBase) -> int:
    """Read a batch of TorchRL; return the number of frames of the workers that are not slow."""
    return read(batch) * OTHERS // len(batch)


def work(steps: int, stragglers: int, threshold: float | None) -> dict[str, Any]:
    """Return the arguments of a collector whose last `stragglers` workers are slow."""
    fast, slow = partial(Sleeping, STEP_SECONDS), partial(Sleeping, SLOWER * STEP_SECONDS)
    return {
        "collector": "MultiSyncDataCollector",
        "env": [fast] * OTHERS + [slow] * stragglers,
        "policy": workloads.linear_policy,
        "frames_per_batch": steps * (OTHERS + stragglers),
        "preemptive_threshold": threshold,
        "read": read_others,
    }


def test_stragglers(compare: Callable[..., None], smoke: bool) -> None:
    """Compare batches that need two of three workers."""
    steps = 10 if smoke else STEPS
    preempted = work(steps, 1, 0.6)
    theirs = {**preempted, "cat_results": "stack", "read": read_share}
    compare(
        f"preemption, processes, {OTHERS} workers and one {SLOWER} times slower, T={steps}",
        [
            Side("pycollect", ours, preempted),
            Side(PEER, torchrls, theirs, needs="torchrl", spawns=True),
            Side(WAITED_FOR, ours, work(steps, 1, None)),
            Side(ALONE, ours, work(steps, 0, None)),
        ],
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={ALONE: 0.85},
    )
