"""Shared parts of the policy tests: environments that only have a shape, and oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

from pycollect.data.layout import Key, torch_dtype
from pycollect.envs.base import EnvBatch, EnvSpec
from pycollect.envs.spaces import action_leaves, observation_leaves
from pycollect.policy.remote import PolicyNeeds
from pycollect.policy.runner import PolicyRunner

KINDS = tuple(InteractionType)


class ShapeOnly(EnvBatch):
    """An EnvBatch that is never stepped."""

    def __init__(self, observation: gym.Space, action: gym.Space, num_envs: int | None) -> None:
        self.spec = EnvSpec(
            batch_size=() if num_envs is None else (num_envs,),
            observation=observation_leaves(observation),
            action=action_leaves(action),
            action_space=action,
        )

    def reset(self, seeds: Any = None) -> Any:
        raise AssertionError

    step = reset_done = reset

    def close(self) -> None:
        pass


def box(*shape: int, dtype: Any = np.float32) -> gym.spaces.Box:
    return gym.spaces.Box(-1, 1, shape, dtype)


def observation(env: EnvBatch, seed: int = 0) -> dict[Key, torch.Tensor]:
    """Return a first observation: random numbers in the env's shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    lead = env.spec.rows
    return {
        leaf.key: (3 * torch.randn(*lead, *leaf.shape, generator=generator)).to(
            torch_dtype(leaf.dtype)
        )
        for leaf in env.spec.observation
    }


def make(policy: Any, env: EnvBatch, kind: Any = "random") -> tuple[Any, dict[Key, torch.Tensor]]:
    current = observation(env)
    with torch.no_grad(), set_interaction_type(kind):
        runner = PolicyRunner(policy, PolicyNeeds(env.spec), current)
        runner.refresh(8)
    return runner, current


def as_tensordict(current: Mapping[Key, torch.Tensor], env: EnvBatch) -> TensorDict:
    batch = env.spec.batch_size
    return TensorDict({key: value.clone() for key, value in current.items()}, batch_size=batch)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def assert_follows(
    runner: PolicyRunner,
    current: Mapping[Key, torch.Tensor],
    reference: Callable[[TensorDict], Any],
    env: EnvBatch,
    kind: Any = "random",
    steps: int = 4,
) -> None:
    """Check that the runner matches the policy on a TensorDict, bit for bit, and draws the same."""
    with torch.no_grad(), set_interaction_type(kind):
        for step in range(steps):
            for key, value in observation(env, seed=step + 1).items():
                current[key].copy_(value)
            torch.manual_seed(step)
            expected = reference(as_tensordict(current, env))
            after = torch.get_rng_state()
            torch.manual_seed(step)
            came = runner.act()
            assert torch.equal(torch.get_rng_state(), after), "another random stream"
            for leaf, tensor in zip(runner.outputs, came, strict=True):
                want = expected.get(leaf.key)
                assert_same(tensor, want.to(torch_dtype(leaf.dtype)))
