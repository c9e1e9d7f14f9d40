"""TorchRL's Q-value and exploration modules: the same frames without a TensorDict."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict.nn import InteractionType as Type
from tensordict.nn import TensorDictModule, TensorDictSequential, set_interaction_type
from torch import nn

from pycollect import SyncDataCollector

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its extension fails to load on a newer torch
    pytest.importorskip("torchrl")
    from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
    from torchrl.envs import EnvBase
    from torchrl.modules import (
        AdditiveGaussianModule,
        EGreedyModule,
        OrnsteinUhlenbeckProcessModule,
        QValueActor,
        QValueModule,
    )

INDEX, TORQUE = Categorical(2), Bounded(-2, 2, (1,))
SYNC = partial(gym.make_vec, num_envs=3, vectorization_mode="sync")
CART_POLE = [partial(gym.make, "CartPole-v1"), partial(SYNC, "CartPole-v1")]
PENDULUM = [partial(gym.make, "Pendulum-v1"), partial(SYNC, "Pendulum-v1")]


def q_values() -> Any:
    return QValueActor(nn.Linear(4, 2), spec=INDEX, in_keys=["observation"])


def epsilon_greedy(epsilon: float = 0.5) -> Any:
    exploration = EGreedyModule(INDEX, eps_init=epsilon, eps_end=0.0, annealing_num_steps=10)
    return TensorDictSequential(q_values(), exploration)


def noisy(make: Callable[..., nn.Module], spec: Any = TORQUE, **options: Any) -> Any:
    actor = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    return TensorDictSequential(actor, make(spec, device="cpu", **options))


GAUSSIAN = partial(noisy, AdditiveGaussianModule, sigma_init=0.5, sigma_end=0.5)
CASES = {
    "Q-values": (CART_POLE, q_values),
    "epsilon-greedy": (CART_POLE, epsilon_greedy),
    "Gaussian": (PENDULUM, GAUSSIAN),
    "Gaussian, not safe": (PENDULUM, partial(GAUSSIAN, safe=False)),
    "Gaussian, unbounded": (PENDULUM, partial(GAUSSIAN, Unbounded(1))),
    "Ornstein-Uhlenbeck": (PENDULUM, partial(noisy, OrnsteinUhlenbeckProcessModule)),
    "Ornstein-Uhlenbeck, annealed": (
        PENDULUM,
        partial(
            noisy, OrnsteinUhlenbeckProcessModule, sigma_min=0.1, n_steps_annealing=5, x0=0.1, mu=1
        ),
    ),
}


def collected(env: Any, policy: Any, **options: Any) -> tuple[Any, bool]:
    """Return three seeded batches, and whether the policy is called with a TensorDict."""
    torch.manual_seed(3)
    with SyncDataCollector(
        env, policy, frames_per_batch=30, total_frames=90, max_frames_per_traj=7, **options
    ) as collector:
        collector.set_seed(1)
        return torch.cat(list(collector)), bool(
            collector.stats()["slow_paths"]["policy_tensordict"]
        )


@pytest.mark.parametrize("kind", [Type.RANDOM, Type.DETERMINISTIC])
@pytest.mark.parametrize("batched", [0, 1], ids=["one", "three"])
@pytest.mark.parametrize("name", CASES)
def test_frames_equal_those_of_the_module(name: str, batched: int, kind: Type) -> None:
    envs, make = CASES[name]
    policy = make()
    ours, slow = collected(envs[batched], policy, exploration_type=kind)
    policy[-1].register_forward_hook(lambda module, given, returned: None)
    theirs, opaque = collected(envs[batched], policy, exploration_type=kind)
    assert (slow, opaque) == (False, True)
    assert set(ours.keys(True)) == set(theirs.keys(True))
    assert (ours == theirs).all()


class DriftEnv(EnvBase):
    """A TorchRL environment of any batch shape, or with two agents below "agents"."""

    def __init__(self, batch: tuple[int, ...], action: Any, agents: bool = False) -> None:
        super().__init__(batch_size=batch)
        self.path: Any = ("agents",) if agents else ()
        lead = (*batch, 2) if agents else batch
        action = action.expand(*lead, *action.shape)
        self.observation_spec = self.nested("observation", Unbounded((*lead, 4)), lead)
        self.action_spec = self.nested("action", action, lead)
        self.reward_spec = Composite(reward=Unbounded((*batch, 1)), shape=batch)
        done = Binary(1, (*batch, 1), dtype=torch.bool)
        self.done_spec = Composite(done=done, terminated=done.clone(), shape=batch)

    def nested(self, name: str, leaf: Any, lead: tuple[int, ...]) -> Any:
        spec = Composite({name: leaf}, shape=lead)
        return Composite(agents=spec, shape=self.batch_size) if self.path else spec

    def _reset(self, td: Any = None, **kwargs: Any) -> Any:
        return self.observation_spec.zero().update(self.full_done_spec.zero())

    def _step(self, td: Any) -> Any:
        key = (*self.path, "observation")
        seen = self._reset().set(key, td.get(key) * 0.7 + 0.3)
        return seen.update(self.full_reward_spec.zero())

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: the environment is deterministic."""


def drifting(env: Any, policy: Any, seed: int = 3) -> tuple[Any, bool]:
    torch.manual_seed(seed)
    with SyncDataCollector(
        env, policy, frames_per_batch=60, total_frames=60, max_frames_per_traj=7
    ) as collector:
        return next(collector), bool(collector.stats()["slow_paths"]["policy_tensordict"])


def greedy(spec: Any, epsilon: float) -> Any:
    actor = QValueActor(nn.Linear(4, 3), spec=spec, in_keys=["observation"])
    return TensorDictSequential(actor, EGreedyModule(spec, eps_init=epsilon, eps_end=0.0))


def greedy_agents() -> Any:
    keys = [("agents", name) for name in ("action", "action_value", "chosen")]
    values = TensorDictModule(nn.Linear(4, 3), [("agents", "observation")], keys[1:2])
    best = QValueModule("categorical", action_value_key=keys[1], out_keys=keys)
    explore = EGreedyModule(Categorical(3), 0.5, 0.5, action_key=keys[0])
    return TensorDictSequential(values, best, explore)


def noises(*makes: Callable[[], nn.Module]) -> Any:
    heads = (
        TensorDictModule(nn.Linear(4, 2), ["observation"], [key]) for key in ("action", "other")
    )
    return TensorDictSequential(*heads, *(make() for make in makes))


def one_number(make: Callable[..., nn.Module], spec: Any, dtype: torch.dtype) -> Any:
    """Return a policy with scalar actions."""
    actor = TensorDictModule(lambda seen: seen[..., 0].to(dtype), ["observation"], ["action"])
    return TensorDictSequential(actor, make(spec))


BOX, ONE_HOT = Bounded(-0.3, 0.3, (2,)), OneHot(3, dtype=torch.int64)
OU = partial(OrnsteinUhlenbeckProcessModule, BOX)
BOTH = {"action": BOX, "other": Bounded(-0.01, 0.01, (2,))}
UNUSUAL = {
    "one-hot of bool, one environment": ((), OneHot(3), partial(greedy, OneHot(3), 0.05), False),
    "one-hot of bool": ((4,), OneHot(3), partial(greedy, OneHot(3), 0.05), False),
    "one-hot of int64, one environment": ((), ONE_HOT, partial(greedy, ONE_HOT, 0.5), False),
    "one-hot of [2, 3]": ((2, 3), ONE_HOT, partial(greedy, ONE_HOT, 0.5), False),
    "epsilon-greedy of [2, 3]": (
        (2, 3),
        Categorical(3),
        partial(greedy, Categorical(3), 0.5),
        False,
    ),
    "noise of [2, 3]": ((2, 3), BOX, partial(noises, OU), False),
    "noise of [], one environment": (
        (),
        Bounded(-0.3, 0.3, ()),
        partial(one_number, OrnsteinUhlenbeckProcessModule, Bounded(-0.3, 0.3, ()), torch.float32),
        False,
    ),
    "epsilon-greedy of int32, one environment": (
        (),
        Categorical(3),
        partial(one_number, EGreedyModule, Categorical(3), torch.int32),
        False,
    ),
    "several agents": ((4,), Categorical(3), greedy_agents, True),
    "two processes": ((4,), BOX, partial(noises, OU, partial(OU, action_key="other")), True),
    "two keys projected": (
        (4,),
        BOX,
        partial(noises, lambda: AdditiveGaussianModule(Composite(BOTH), safe=True)),
        True,
    ),
    "is_init that is missing": ((4,), BOX, partial(noises, partial(OU, is_init_key="no")), True),
}


@pytest.mark.filterwarnings("ignore:The tensordict passed to Ornstein")
@pytest.mark.parametrize("name", UNUSUAL)
def test_frames_of_unusual_modules_equal_those_of_the_module(name: str) -> None:
    batch, action, make, needs_tensordict = UNUSUAL[name]
    make_env = partial(DriftEnv, batch, action, name == "several agents")
    policy = make()
    ours, slow = drifting(make_env(), policy, seed=1)
    policy[-1].register_forward_hook(lambda module, given, returned: None)
    theirs, opaque = drifting(make_env(), policy, seed=1)
    assert (slow, opaque) == (needs_tensordict, True)
    assert set(ours.keys(True)) == set(theirs.keys(True))
    assert (ours == theirs).all()


def test_a_spec_without_the_action_does_not_matter_without_exploration() -> None:
    policy = TensorDictSequential(q_values(), EGreedyModule(Composite(other=INDEX)))
    td, slow = collected(CART_POLE[0], policy, exploration_type=Type.DETERMINISTIC)
    assert slow
    assert (td["action"] == td["action_value"].argmax(-1)).all()


def test_a_replaced_spec_counts_from_the_next_rollout_on() -> None:
    policy = epsilon_greedy(1.0)
    with SyncDataCollector(CART_POLE[0], policy, frames_per_batch=50) as collector:
        assert 0 < next(collector)["action"].sum() < 50
        policy[1].spec["action"] = Categorical(2, mask=torch.tensor([False, True]))
        assert (next(collector)["action"] == 1).all()


def test_the_learner_anneals_epsilon() -> None:
    policy = epsilon_greedy(1.0)
    greedy = []
    with SyncDataCollector(
        CART_POLE[0], policy, frames_per_batch=50, total_frames=100
    ) as collector:
        for td in collector:
            greedy.append((td["action"] == td["action_value"].argmax(-1)).all().item())
            policy[1].step(10)
    assert greedy == [False, True]


def test_noise_continues_when_the_plan_is_rebuilt() -> None:
    def frames(changes: bool) -> torch.Tensor:
        torch.manual_seed(3)
        policy = noisy(OrnsteinUhlenbeckProcessModule)
        with SyncDataCollector(PENDULUM[0], policy, frames_per_batch=20) as collector:
            collector.set_seed(1)
            first = next(collector)
            if changes:
                policy[0].module.weight = nn.Parameter(policy[0].module.weight.detach().clone())
            return torch.cat([first, next(collector)])["action"]

    assert torch.equal(frames(True), frames(False))


class OtherGreedy(EGreedyModule):
    """A subclass that explores differently."""

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", torch.ones_like(tensordict["action"]))


@pytest.mark.parametrize("change", ["subclass", "hook", "mask"])
def test_other_modules_are_called_with_a_tensordict(change: str) -> None:
    policy = epsilon_greedy()
    if change == "subclass":
        policy = TensorDictSequential(q_values(), OtherGreedy(INDEX))
    elif change == "hook":
        policy[1].register_forward_hook(lambda module, given, td: td.set("seen", torch.ones(())))
    else:
        policy = QValueActor(
            nn.Linear(4, 2), spec=INDEX, in_keys=["observation"], action_mask_key="mask"
        )
        policy = TensorDictSequential(
            TensorDictModule(lambda x: x[..., :2] > 9, ["observation"], ["mask"]), policy
        )
    td, slow = collected(CART_POLE[0], policy)
    assert slow
    assert change != "subclass" or (td["action"] == 1).all()
    assert change != "hook" or (td["seen"] == 1).all()


class OwnMemory(nn.Module):
    """A network that returns the same tensor at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.out = torch.empty(0)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        values = self.layer(observation)
        if self.out.shape != values.shape:
            self.out = torch.empty_like(values)
        return self.out.copy_(values)


@pytest.mark.parametrize("batched", [0, 1], ids=["one", "three"])
@pytest.mark.parametrize("make", [partial(nn.Linear, 4, 2), OwnMemory])
def test_a_module_behind_the_exploration_may_keep_actions(make: Any, batched: int) -> None:
    kept: list[torch.Tensor] = []

    def keep(action: torch.Tensor) -> torch.Tensor:
        kept.append(action)
        return action + 0

    values = QValueActor(make(), spec=INDEX, in_keys=["observation"])
    policy = [values, EGreedyModule(INDEX, 0.5, 0.5), TensorDictModule(keep, ["action"], ["seen"])]
    td, slow = collected(CART_POLE[batched], TensorDictSequential(*policy))
    last = td[-3:] if batched else td[-30:]
    assert not slow
    assert torch.equal(torch.stack(kept[-last.shape[-1] :], -1), last["action"])


@pytest.mark.parametrize("batched", [0, 1], ids=["one", "three"])
def test_rollouts_may_be_made_in_and_outside_of_inference_mode(batched: int) -> None:
    with SyncDataCollector(CART_POLE[batched], epsilon_greedy(), frames_per_batch=30) as collector:
        with torch.inference_mode():
            next(collector)
        td = next(collector)
    best = td["action_value"].max(-1, keepdim=True).values
    assert torch.equal(td["chosen_action_value"], best)


def test_the_interaction_type_of_the_caller_counts() -> None:
    policy = epsilon_greedy(1.0)
    with (
        SyncDataCollector(
            CART_POLE[0], policy, frames_per_batch=20, exploration_type=Type.DETERMINISTIC
        ) as collector,
        set_interaction_type(Type.RANDOM),
    ):
        td = next(collector)
    assert (td["action"] == td["action_value"].argmax(-1)).all()
