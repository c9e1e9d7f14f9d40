"""Environments with a `reset` or `step` that differs from Gymnasium's interface."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    NEST_STACK,
    STACK,
    SYNC_WAYS,
    Way,
    collecting,
    marked,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from raising import refused
from torchrl.envs import GymWrapper

from pycollect import SyncDataCollector

WAYS = marked(IN_PROCESS, MULTI_STACK, MULTI_ASYNC[0], STACK, ASYNC[0], NEST_STACK)


class WithoutSeed(gymnasium.Env[Any, Any]):
    """An environment with a `reset` that takes no arguments; an episode has three steps."""

    observation_space: Any = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)
    steps = 0

    def observation(self) -> Any:
        return np.full(1, self.steps, np.float32)

    def reset(self) -> Any:  # type: ignore[override]
        self.steps = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), 0.0, self.steps == 3, False, {}


class Seeded(WithoutSeed):
    """An environment that observes the seed passed to its method `seed`."""

    given = 0

    def seed(self, seed: int) -> None:
        self.given = seed

    def observation(self) -> Any:
        return np.full(1, self.given % 7, np.float32)


class KeywordsOnly(Seeded):
    """An environment with a `reset` that takes any keyword arguments, but no options."""

    def reset(self, **kwargs: Any) -> Any:
        assert not kwargs.keys() - {"seed"}
        self.given = kwargs.get("seed", self.given)
        return super().reset()


class VectorWithoutSeed(VectorEnv):
    """A vector environment with a `reset` that takes no arguments."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2
    single_observation_space = WithoutSeed.observation_space
    single_action_space = WithoutSeed.action_space

    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros((2, 1), np.float32), {}

    def step(self, action: Any) -> Any:
        none = np.zeros(2, np.bool_)
        return np.ones((2, 1), np.float32), np.zeros(2), none, none, {}


def wrapped() -> Any:
    return GymWrapper(WithoutSeed())


ENTRIES: dict[str, Any] = {
    "one": WithoutSeed,
    "list": [WithoutSeed, WithoutSeed],
    "TorchRL": wrapped,
    "vector": VectorWithoutSeed,
    "keywords": KeywordsOnly,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_reset_needs_no_seed_unless_one_is_given(way: Way, entry: str) -> None:
    with collecting(way, lambda worker: ENTRIES[entry], frames=16) as collector:
        assert collector.next().numel() >= 16


@pytest.mark.parametrize("way", SYNC_WAYS)
@pytest.mark.parametrize("entry", [Seeded, [Seeded, Seeded], KeywordsOnly])
def test_environments_are_seeded_by_their_method_seed(way: Way, entry: Any) -> None:
    """Call `seed` as TorchRL does if `reset` takes no seed."""
    with collecting(way, lambda worker: entry, frames=8) as collector:
        collector.set_seed(5)
        first = collector.next()["observation"]
    assert first.flatten()[0] == 5
    if isinstance(entry, list) or way.workers > 1:
        assert len(first.unique()) > 1


@pytest.mark.parametrize("way", SYNC_WAYS)
@pytest.mark.parametrize("entry", ["one", "list", "vector"])
def test_a_seed_for_an_environment_that_takes_none_is_refused(way: Way, entry: str) -> None:
    with (
        collecting(way, lambda worker: ENTRIES[entry], frames=8) as collector,
        refused(TypeError, "seed"),
    ):
        collector.set_seed(5)


class OldStep(WithoutSeed):
    def step(self, action: Any) -> Any:
        return super().step(action)[1:]


class OldStepOfDict(OldStep):
    observation_space = spaces.Dict(a=spaces.Box(-9, 9, (1,)), b=spaces.Box(-9, 9, (1,)))

    def observation(self) -> Any:
        return {name: np.zeros(1, np.float32) for name in "ab"}


class OldVectorStep(VectorWithoutSeed):
    def step(self, action: Any) -> Any:
        return super().step(action)[1:]


class OldReset(WithoutSeed):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


class OldLaterReset(WithoutSeed):
    resets = 0

    def reset(self) -> Any:  # type: ignore[override]
        self.resets += 1
        return super().reset()[: 2 if self.resets == 1 else 1]


@pytest.mark.parametrize(
    ("entry", "method"),
    [
        (OldStep, "step"),
        ([OldStep, OldStep], "step"),
        (OldStepOfDict, "step"),
        ([OldStepOfDict, OldStepOfDict], "step"),
        (OldVectorStep, "step"),
        (OldReset, "reset"),
        ([OldReset, OldReset], "reset"),
        (OldLaterReset, "reset"),
        ([OldLaterReset, OldLaterReset], "reset"),
    ],
)
def test_the_old_interface_of_gym_is_refused(entry: Any, method: str) -> None:
    with (
        pytest.raises((TypeError, ValueError), match=method),
        SyncDataCollector([entry], None, frames_per_batch=16) as collector,
    ):
        collector.next()
