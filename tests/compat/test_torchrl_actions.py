"""Actions with a shape, dtype or encoding other than the spec's.

They are recorded as returned, and interpreted as TorchRL's environments do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from envs_for_tests import ActedEnv
from gymnasium import spaces
from raising import refused, warned
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl_support import Make, collect, compare, seeded

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

Act = Callable[[torch.Tensor], torch.Tensor]


def cart_pole(**kwargs: Any) -> Any:
    return seeded(partial(GymEnv, "CartPole-v1", **kwargs))


def pendulum() -> Any:
    return seeded(partial(GymEnv, "Pendulum-v1"))


def policy(act: Act) -> Any:
    return TensorDictModule(act, ["observation"], ["action"])


def falls_right(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] > 0).long()


def two_hot(observation: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(falls_right(observation), 2)


def even(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 0] % 2 == 0).int()


def counting_of(*size: int) -> Any:
    return mock.CountingBatchedEnv(batch_size=torch.Size(size), max_steps=torch.full(size, 4))


indexed = partial(cart_pole, categorical_action_encoding=True)
counting = partial(mock.CountingEnv, max_steps=4)
CART_POLE_ACTIONS: dict[str, tuple[Make, Act]] = {
    "an index for one-hot": (cart_pole, falls_right),
    "an index of shape [1] for one-hot": (cart_pole, lambda o: falls_right(o).unsqueeze(-1)),
    "one-hot in float": (cart_pole, lambda o: two_hot(o).float()),
    "one-hot in bool": (cart_pole, lambda o: two_hot(o).bool()),
    "probabilities for one-hot": (cart_pole, lambda o: torch.cat([o[..., 2:], -o[..., 2:]], -1)),
    "an index in int32": (indexed, lambda o: falls_right(o).int()),
    "an index in float": (indexed, lambda o: falls_right(o).float()),
    "an index in bool": (indexed, lambda o: falls_right(o).bool()),
}
PENDULUM_ACTIONS: dict[str, tuple[Make, Act]] = {
    "float64": (pendulum, lambda o: o[..., :1].double()),
    "float16": (pendulum, lambda o: o[..., :1].half()),
    "int64": (pendulum, lambda o: o[..., :1].long()),
}
COUNTING_ACTIONS: dict[str, tuple[Make, Act]] = {
    "a scalar": (counting, even),
    "a scalar in float": (counting, lambda o: even(o).float()),
    "a scalar for each of [3]": (partial(counting_of, 3), even),
    "a scalar for each of [2, 3]": (partial(counting_of, 2, 3), even),
    "an index for another's one-hot": (
        mock.DiscreteActionVecMockEnv,
        lambda o: o[..., 0].long() % 3,
    ),
}
ACTIONS = {**CART_POLE_ACTIONS, **PENDULUM_ACTIONS, **COUNTING_ACTIONS}
WAYS: dict[str, Callable[[Make], Any]] = {
    "alone": lambda make: make(),
    "transformed": lambda make: TransformedEnv(make(), StepCounter()),
    "SerialEnv": lambda make: SerialEnv(2, make),
    "SerialEnv, transformed": lambda make: TransformedEnv(SerialEnv(2, make), StepCounter()),
    "SerialEnv of transformed": lambda make: SerialEnv(
        2, lambda: TransformedEnv(make(), StepCounter())
    ),
}
ignores_indices = pytest.mark.filterwarnings("ignore:policy. 'action'. expected a one-hot")


@ignores_indices
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_frames(way: str, action: str) -> None:
    if way != "alone" and action.startswith("an index for another"):
        pytest.skip("draws its observations")
    make, act = ACTIONS[action]
    compare(lambda: WAYS[way](make), lambda: policy(act))


def test_several_actions_of_one_agent() -> None:
    def act(td: Any) -> Any:
        return td.update(
            mock.MultiKeyCountingEnv().full_action_spec.zero().apply(lambda x: x.long())
        )

    compare(mock.MultiKeyCountingEnv, lambda: act)


@pytest.mark.slow
@pytest.mark.processes
@ignores_indices
@pytest.mark.parametrize("action", ["an index for one-hot", "one-hot in float"])
def test_parallel_env(action: str) -> None:
    make, act = ACTIONS[action]
    compare(lambda: ParallelEnv(2, make), lambda: policy(act), batches=2)


@pytest.mark.parametrize("arguments", [{}, {"info_keys": {"height": torch.float32}}])
def test_an_encoding_is_the_same_with_info_keys(arguments: dict[str, Any]) -> None:
    """TorchRL's one-hot encoding of [0.2, 0.9] as integers is the action 0: a push to the left."""
    act = policy(lambda observation: torch.tensor([0.2, 0.9]))
    td = collect(pycollect.Collector, cart_pole, act, **arguments)[0]
    assert (td["next", "observation"][:, 1] < td["observation"][:, 1]).all()


def test_an_index_for_one_hot_is_warned_about() -> None:
    """TorchRL's GymEnv then takes the action 0 for any recorded index."""
    with warned("policy"):
        (td, *_) = collect(pycollect.Collector, cart_pole, policy(falls_right))
    assert td["action"].shape == (24,)
    assert td["action"].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_random_frames_have_the_policys_action_encoding(dtype: torch.dtype) -> None:
    def act() -> Any:
        return policy(lambda o: even(o).to(dtype))

    kwargs = {"init_random_frames": 24, "frames": 24, "batches": 3}
    first, *ours = collect(pycollect.Collector, counting, act(), **kwargs)
    (random, *theirs) = collect(Collector, counting, act(), **kwargs)
    assert random["action"].shape == (24, 1)  # and [24] afterwards
    assert first["action"].shape == (24,)
    for our, their in zip(ours, theirs, strict=True):
        assert our["action"].dtype is their["action"].dtype is dtype
        assert our["action"].shape == their["action"].shape == (24,)


@ignores_indices
def test_random_frames_of_another_encoding_are_refused() -> None:
    with refused(ValueError, "init_random_frames"):
        collect(pycollect.Collector, cart_pole, policy(falls_right), init_random_frames=24)


@pytest.mark.parametrize("collector_class", [Collector, pycollect.Collector])
@pytest.mark.parametrize("policy", [None, "linear"])
def test_torchs_seed_decides_random_actions(collector_class: Any, policy: str | None) -> None:
    def actions() -> torch.Tensor:
        module = policy and TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
        collector = collector_class(
            GymEnv("Pendulum-v1"), module, frames_per_batch=4, total_frames=8, init_random_frames=8
        )
        batches = torch.cat([td["action"] for td in collector])
        collector.shutdown()
        return batches

    torch.manual_seed(7)
    first, other = actions(), actions()
    torch.manual_seed(7)
    assert torch.equal(first, actions())
    assert not torch.equal(first, other)


def test_a_random_step_is_a_random_action() -> None:
    """TorchRL's collector makes two steps per frame, one of them in the policy."""
    counting = partial(mock.CountingEnv, max_steps=100)
    for cls in (Collector, pycollect.Collector):
        env = SerialEnv(2, counting)
        collector = cls(env, env.rand_step, frames_per_batch=20, total_frames=20)
        (td,) = list(collector)
        collector.shutdown()
        assert td.shape == (2, 10)
        counts, actions = td["next", "observation"][..., -1, 0], td["action"].sum((-2, -1))
        assert torch.equal(counts, actions) == (cls is pycollect.Collector)
        assert (counts >= actions).all()


class Planner:
    """A policy's class with methods that are named like those of TorchRL's environments."""

    def rand_step(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.full((*td.shape, 1), 0.5))

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        raise AssertionError("not the policy")


def test_a_method_of_another_class_is_called_by_its_own_name() -> None:
    collector = pycollect.Collector(
        GymEnv("Pendulum-v1"), Planner().rand_step, frames_per_batch=4, total_frames=4
    )
    (td,) = list(collector)
    collector.shutdown()
    assert (td["action"] == 0.5).all()


def test_an_environment_that_was_just_reset_is_not_reset_again() -> None:
    resets = {}
    for kind in (Collector, pycollect.Collector):

        class Counting(GymEnv):  # type: ignore[misc]
            resets = 0

            def _reset(self, *args: Any, **kwargs: Any) -> Any:
                type(self).resets += 1
                return super()._reset(*args, **kwargs)

        env = TransformedEnv(Counting("Pendulum-v1"), StepCounter())
        made = Counting.resets
        collector = kind(env, None, frames_per_batch=4, total_frames=12, reset_at_each_iter=True)
        list(collector)
        collector.shutdown()
        resets[kind] = Counting.resets - made
    assert resets[Collector] == resets[pycollect.Collector] + 1 == 4


def test_a_value_outside_of_an_integer_space_does_not_wrap_around() -> None:
    """The value is recorded, and passed to the environment, in the policy's own dtype."""
    env = ActedEnv(spaces.Box(0, 255, (1,), np.uint8))
    with pycollect.SyncDataCollector(
        GymWrapper(env), lambda observation: torch.tensor([-1.0]), frames_per_batch=2
    ) as collector:
        td = collector.next()
    assert td["action"].tolist() == [[-1.0], [-1.0]]
    assert [action.tolist() for action in env.actions] == [[-1.0], [-1.0]]
