"""RandomPolicy: random actions as an object."""

from __future__ import annotations

import gymnasium
import torch
from envs_for_tests import CountingEnv
from raising import refused
from tensordict import TensorDict

from pycollect import RandomPolicy, SyncDataCollector


class Ones:
    """A spec that draws only ones."""

    def clone(self) -> Ones:
        return Ones()

    def rand(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.int64)


def test_without_a_spec_a_collector_draws_the_actions() -> None:
    actions = []
    for policy in (RandomPolicy(), None):
        with SyncDataCollector(CountingEnv, policy, frames_per_batch=32) as collector:
            collector.set_seed(3)
            actions.append(collector.next()["action"])
            assert collector.stats()["slow_paths"]["policy_tensordict"] == 0
    assert torch.equal(*actions)


def test_with_a_spec_its_actions_are_used() -> None:
    with SyncDataCollector(CountingEnv, RandomPolicy(Ones()), frames_per_batch=8) as collector:
        assert collector.next()["action"].tolist() == [1] * 8
    assert RandomPolicy(Ones(), ("deep", "a"))(TensorDict())["deep", "a"] == 1


def test_a_space_instead_of_a_spec_is_refused() -> None:
    with refused(TypeError, "action_spec"):
        RandomPolicy(gymnasium.spaces.Discrete(2))


def test_a_random_policy_called_directly_needs_a_spec() -> None:
    with refused(RuntimeError, "action_spec"):
        RandomPolicy()(TensorDict())
