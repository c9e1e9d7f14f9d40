"""Vector rewards, compared with TorchRL's GymWrapper and MOGymWrapper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from echo_envs import LENGTHS
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl_support import assert_alike, collect
from vector_reward_envs import SeveralEnv, several

import pycollect

pytest.importorskip("torchrl")

from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, MOGymWrapper, SerialEnv

Make = Callable[[], Any]


def several_env(number: int = 0) -> Any:
    return SeveralEnv(number, LENGTHS)


def wrapped(number: int = 0) -> Any:
    return GymWrapper(several_env(number), categorical_action_encoding=True)


def act(observation: torch.Tensor) -> torch.Tensor:
    return ((observation[..., 1] + observation[..., 2]) % 2).long()


def policy() -> TensorDictModule:
    return TensorDictModule(act, ["observation"], ["action"])


def theirs(make: Make, **arguments: Any) -> list[TensorDictBase]:
    return collect(Collector, make, policy(), **arguments)


def ours(entry: Any, **arguments: Any) -> list[TensorDictBase]:
    with pycollect.SyncDataCollector(
        entry, policy(), frames_per_batch=24, total_frames=96, **arguments
    ) as collector:
        return [td.clone() for td in collector]


def test_one_environment() -> None:
    assert_alike(ours(several_env), theirs(wrapped))


def test_a_list_equals_a_serial_env() -> None:
    several_of = [partial(several_env, number) for number in range(3)]
    made = ours(several_of)
    assert_alike(made, theirs(lambda: SerialEnv(3, [partial(wrapped, n) for n in range(3)])))
    assert made[0]["next", "reward"].shape == (3, 8, 3)


@pytest.mark.parametrize("make", [wrapped, lambda: SerialEnv(2, [wrapped, partial(wrapped, 1)])])
def test_their_wrapper_in_our_collector(make: Make) -> None:
    assert_alike(collect(pycollect.SyncDataCollector, make, policy()), theirs(make))


def test_their_wrapper_has_one_return() -> None:
    with pycollect.SyncDataCollector(
        wrapped(), policy(), frames_per_batch=24, total_frames=24
    ) as collector:
        td = collector.next()
        ended = int(td["next", "done"].flatten().nonzero()[-1])
        total = td["next", "reward"][: ended + 1].double().sum()
        episodes = collector.stats()["episodes"]
        assert collector.stats()["episode_return"] == pytest.approx(float(total / episodes))


# MO-Gymnasium's own environments, if installed


class Bounded(SeveralEnv):
    """A space with bounds, like MO-Gymnasium's."""

    reward_space = spaces.Box(np.float32(-1e6), np.float32(1e6), (3,), np.float32)


def test_a_space_with_bounds() -> None:
    make = partial(Bounded, 0, LENGTHS)
    (batch, *_) = ours(make)
    expected = several((batch["next", "observation"][..., 2] + 100 * batch["action"]).numpy())
    assert torch.equal(batch["next", "reward"], torch.as_tensor(expected).float())
    assert_alike(ours(make), theirs(lambda: GymWrapper(make(), categorical_action_encoding=True)))


class Seeded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begin each episode alike, even if the env draws from numpy's global generator."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        np.random.seed(7)
        return self.env.reset(seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deep-sea-treasure-v0", "minecart-v0", "mo-hopper-v5"])
def test_mo_gymnasium(name: str) -> None:
    mo_gymnasium = pytest.importorskip("mo_gymnasium")
    if name == "mo-hopper-v5":
        pytest.importorskip("mujoco")

    def make() -> Any:
        np.random.seed(7)
        return Seeded(mo_gymnasium.make(name))

    def actions() -> TensorDictModule:
        space = make().action_space
        space.seed(5)
        drawn = iter([torch.as_tensor(np.asarray(space.sample())) for _ in range(1000)])
        return TensorDictModule(lambda observation: next(drawn), ["observation"], ["action"])

    arguments = {"frames_per_batch": 200, "total_frames": 600}
    with pycollect.SyncDataCollector(make, actions(), **arguments) as collector:
        mine = [td.clone() for td in collector]
    oracle = Collector(
        MOGymWrapper(make(), categorical_action_encoding=True), actions(), **arguments
    )
    assert_alike(mine, [td.clone() for td in oracle])
    oracle.shutdown()
    assert mine[0]["next", "reward"].shape[-1] > 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["deep-sea-treasure-v0", "minecart-v0", "mo-hopper-v5"])
def test_mo_gymnasium_from_workers_and_in_rows(name: str) -> None:
    mo_gymnasium = pytest.importorskip("mo_gymnasium")
    from mo_gymnasium.wrappers import LinearReward
    from mo_gymnasium.wrappers.vector import MOSyncVectorEnv

    make = partial(mo_gymnasium.make, name)
    (k,) = make().unwrapped.reward_space.shape
    with pycollect.MultiSyncDataCollector(
        [make, make], frames_per_batch=400, total_frames=800
    ) as collector:
        for td in collector:
            assert td["next", "reward"].shape == (2, 200, k)
    rows = partial(MOSyncVectorEnv, [make] * 3)
    with pycollect.SyncDataCollector(
        rows, frames_per_batch=600, total_frames=600, drop_uncollected=True
    ) as collector:
        td = collector.next()
        assert td["next", "reward"].shape == (len(td), k)
        assert len(collector.stats()["episode_return"]) == k
    one = partial(LinearReward, make(), np.full(k, 1 / k))
    with pycollect.SyncDataCollector(one, frames_per_batch=100, total_frames=100) as collector:
        assert collector.next()["next", "reward"].shape == (100, 1)
