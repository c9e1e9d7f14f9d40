"""A policy that torch cannot call on what the environment shows: what the error says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from envs_for_tests import CountingEnv
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector


class Doubles(CountingEnv):
    """As MuJoCo's: float64."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0].astype(np.float64), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(0)
        return (observation.astype(np.float64), *rest)


def linear(inputs: int) -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(inputs, 1), ["observation"], ["action"])


class Whole(torch.nn.Module):
    """Takes a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, td: Any) -> Any:
        return td.set("action", self.layer(td["observation"]))


@pytest.mark.parametrize("policy", [linear(3), torch.nn.Linear(3, 1), Whole()])
def test_a_dtype_is_named_with_the_remedy(policy: Any) -> None:
    words = (
        r"policy: .*'observation' float64 \[3\].* parameters are float32.*"
        r"observation_dtype=torch\.float32"
    )
    with pytest.raises(RuntimeError, match=words):
        SyncDataCollector(Doubles, policy, frames_per_batch=4)
    with SyncDataCollector(
        Doubles, policy, frames_per_batch=4, observation_dtype=torch.float32
    ) as collector:
        assert collector.next()["observation"].dtype == torch.float32


def test_a_shape_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'observation' float32 \[3\].*1x3 and 4x1") as raised:
        SyncDataCollector(Doubles, linear(4), frames_per_batch=4, observation_dtype=torch.float32)
    assert "observation_dtype" not in str(raised.value)


def test_what_a_policy_itself_raises_is_left_alone() -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("own words")

    with pytest.raises(RuntimeError, match=r"^own words$"):
        SyncDataCollector(Doubles, broken, frames_per_batch=4)


def test_an_index_error_of_its_own_is_left_alone() -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(np.zeros(3)[int(observation.sum()) + 3])

    with pytest.raises(IndexError, match="out of bounds for axis 0 with size 3"):
        SyncDataCollector(Doubles, broken, frames_per_batch=4)


def test_a_function_of_a_tensordict_that_is_given_a_tensor() -> None:
    with pytest.raises(RuntimeError, match=r"policy: its first call, with 'observation' float32"):
        SyncDataCollector(CountingEnv, lambda given: given["observation"], frames_per_batch=4)
