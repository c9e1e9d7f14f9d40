"""TorchRL's Q-value and exploration modules: the module's own frames, without a TensorDict."""

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
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    pytest.importorskip("torchrl")
    from torchrl.data import Bounded, Categorical, Unbounded
    from torchrl.modules import (
        AdditiveGaussianModule,
        EGreedyModule,
        OrnsteinUhlenbeckProcessModule,
        QValueActor,
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
    """Three seeded batches, and whether the policy is called with a TensorDict."""
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
def test_frames_are_those_of_the_module(name: str, batched: int, kind: Type) -> None:
    envs, make = CASES[name]
    policy = make()
    ours, slow = collected(envs[batched], policy, exploration_type=kind)
    policy[-1].register_forward_hook(lambda module, given, returned: None)
    theirs, opaque = collected(envs[batched], policy, exploration_type=kind)
    assert (slow, opaque) == (False, True)
    assert set(ours.keys(True)) == set(theirs.keys(True))
    assert (ours == theirs).all()


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


def test_noise_goes_on_where_the_policy_is_taken_apart_again() -> None:
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
    """Explores in another way."""

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
