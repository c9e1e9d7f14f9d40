"""An observation named "step_count", a name that `max_frames_per_traj` uses."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import IN_PROCESS, MULTI_ASYNC, MULTI_STACK, STACK, Way, collecting, marked
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from raising import refused
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector


class Counted(gymnasium.Env[Any, Any]):
    """Observe one more than ten times the steps of the episode, which has four steps."""

    observation_space = spaces.Dict(
        {"step_count": spaces.Box(0, 99, (), np.int32), "view": spaces.Box(0, 9, (2,))}
    )
    action_space = spaces.Discrete(2)
    steps = 0

    def observation(self) -> Any:
        return {
            "step_count": np.array(10 * self.steps + 1, np.int32),
            "view": np.full(2, self.steps, np.float32),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), 0.0, self.steps == 4, False, {"step_count": -self.steps}


def entry(worker: int) -> Any:
    return Counted


def act(view: torch.Tensor, step_count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(view.shape[:-1], dtype=torch.int64), step_count.clone()


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK, MULTI_ASYNC[0], STACK))
def test_an_observation_may_have_that_name(way: Way) -> None:
    policy = TensorDictModule(act, ["view", "step_count"], ["action", "seen"])
    with collecting(way, entry, policy, frames=8) as collector:
        td = collector.next()
    for row in td.reshape(-1, 8):
        assert row["step_count"].tolist() == [1, 11, 21, 31] * 2
        assert torch.equal(row["seen"], row["step_count"])
        assert row["next", "step_count"].tolist() == [11, 21, 31, 41] * 2
        assert row["step_count"].dtype == torch.int32


def test_an_info_may_have_that_name() -> None:
    view = gymnasium.wrappers.FilterObservation(Counted(), ["view"])
    with SyncDataCollector(view, None, frames_per_batch=8, info_keys=["step_count"]) as collector:
        assert collector.next()["next", "step_count"].tolist() == [-1, -2, -3, -4] * 2


@pytest.mark.parametrize("made", [Counted, lambda: SyncVectorEnv([Counted] * 2)])
def test_a_limit_of_the_collector_needs_the_name(made: Any) -> None:
    with refused(ValueError, "max_frames_per_traj"):
        SyncDataCollector(made, None, frames_per_batch=8, max_frames_per_traj=3)
