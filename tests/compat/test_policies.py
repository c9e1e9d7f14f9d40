"""Recurrent and masked policies: TorchRL's collector and ours give the same frames.

TorchRL's needs transforms in the environment (InitTracker, primers); here the policy's modules say
it all, and the environment is a plain Gymnasium one. Each episode begins alike.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

import pycollect

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    torchrl_collectors = pytest.importorskip("torchrl.collectors")
    import torchrl.envs
    from torchrl.modules import (
        GRUModule,
        IndependentNormal,
        LSTMModule,
        MaskedCategorical,
        ProbabilisticActor,
    )
    from torchrl.modules.utils import get_primers_from_module

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find this file

FRAMES = 60
IDS = ("collector", "traj_ids")


class SameStart(gymnasium.Wrapper):
    """Every episode begins alike, and has 25 steps."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=7, options=options)


def make_pendulum() -> Any:
    return SameStart(gymnasium.make("Pendulum-v1", max_episode_steps=25))


class Corridor(gymnasium.Env):
    """Where one is, and which of four moves are allowed there; a forbidden one is an error."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            observation=gymnasium.spaces.Box(0, 100, (2,), np.float32),
            action_mask=gymnasium.spaces.Box(0, 1, (4,), np.bool_),
        )
        self.action_space = gymnasium.spaces.Discrete(4)
        self.steps = self.place = 0

    def observe(self) -> dict[str, Any]:
        self.mask = np.array([(self.place + move) % 3 != 0 for move in range(4)])
        return {
            "observation": np.array([self.place, self.steps], np.float32),
            "action_mask": self.mask,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = self.place = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.mask[action]
        self.place, self.steps = self.place + int(action), self.steps + 1
        return self.observe(), float(action), self.place > 10, False, {}


def recurrent_policy(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    cls = LSTMModule if kind == "LSTM" else GRUModule
    module = cls(input_size=3, hidden_size=8, in_key="observation", out_key="hidden", **options)
    head = nn.Sequential(nn.Linear(8, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictSequential(module, TensorDictModule(head, ["hidden"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def prepared(policy: Any, make_env: Callable[[], Any] = make_pendulum) -> Any:
    """TorchRL's environment for a recurrent policy."""
    env = torchrl.envs.TransformedEnv(
        torchrl.envs.GymWrapper(make_env()), torchrl.envs.InitTracker()
    )
    return env.append_transform(get_primers_from_module(policy))


def run(make_collector: Callable[..., Any], env: Any, policy: Any, **kwargs: Any) -> list[Any]:
    """Batches as they come, kept as copies, drawn from one and the same stream."""
    collector = make_collector(
        env, policy, frames_per_batch=FRAMES, total_frames=3 * FRAMES, **kwargs
    )
    batches = []
    try:
        iterator = iter(collector)
        for seed in range(3):
            torch.manual_seed(seed)
            batches.append(next(iterator).clone())
        return batches
    finally:
        collector.shutdown()


def assert_alike(ours: TensorDictBase, theirs: TensorDictBase, without: set[Any]) -> None:
    assert ours.names == theirs.names
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True)) - without
    for key in ours.keys(True, True):
        assert ours[key].dtype == theirs[key].dtype, key
        assert ours[key].shape == theirs[key].shape, key
        # Rewards are computed in float64 there and rounded.
        tolerance = 1e-4 if key == ("next", "reward") else 0
        torch.testing.assert_close(
            ours[key], theirs[key], rtol=0, atol=tolerance, msg=f"{key} differs"
        )


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("exploration", ["RANDOM", "DETERMINISTIC", "MEAN"])
@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_in_process(kind: str, exploration: str, layers: int) -> None:
    policy = recurrent_policy(kind, num_layers=layers)
    options = {"exploration_type": torchrl.envs.ExplorationType[exploration]}
    theirs = run(torchrl_collectors.Collector, prepared(policy), policy, **options)
    ours = run(pycollect.Collector, make_pendulum, policy, **options)
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        # It is false wherever it is written there, so that it says nothing.
        assert_alike(our_batch, their_batch, {("next", "is_init")})


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_that_pass_through_the_environment(kind: str) -> None:
    """TorchRL's environment with its transforms, on both sides."""
    policy = recurrent_policy(kind)
    theirs = run(torchrl_collectors.Collector, prepared(policy), policy)
    ours = run(pycollect.Collector, prepared(policy), policy)
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert_alike(our_batch, their_batch, set())


def test_random_frames_then_a_policy_whose_states_pass_through() -> None:
    policy = recurrent_policy("GRU")
    env = prepared(policy)
    td, following = run(pycollect.Collector, env, policy, init_random_frames=FRAMES)[:2]
    assert (td["next", "recurrent_state"] == 0).all()
    assert (following["recurrent_state"][0] == 0).all()
    assert (following["next", "recurrent_state"] != 0).any(-1).all()


def test_cut_trajectories_begin_anew() -> None:
    policy = recurrent_policy("LSTM")
    theirs = run(torchrl_collectors.Collector, prepared(policy), policy, max_frames_per_traj=7)
    ours = run(pycollect.Collector, make_pendulum, policy, max_frames_per_traj=7)
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert_alike(our_batch, their_batch, {("next", "is_init")})


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_on_ray(kind: str) -> None:
    policy = recurrent_policy(kind)
    kwargs: dict[str, Any] = {"exploration_type": "DETERMINISTIC"}
    own = torchrl.envs.ExplorationType.DETERMINISTIC
    theirs = run(torchrl_collectors.Collector, prepared(policy), policy, exploration_type=own)
    ours = run(
        pycollect.RayCollector,
        [make_pendulum],
        policy,
        remote_configs={"num_cpus": 1},
        **kwargs,
    )
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert_alike(our_batch, their_batch, {("next", "is_init")})


@pytest.mark.parametrize("exploration", ["RANDOM", "DETERMINISTIC"])
def test_masked_actions(exploration: str) -> None:
    torch.manual_seed(0)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(2, 4), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            {"logits": "logits", "mask": "action_mask"},
            ["action"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        ),
    )
    options = {"exploration_type": torchrl.envs.ExplorationType[exploration]}
    env = torchrl.envs.GymWrapper(Corridor(), categorical_action_encoding=True)
    theirs = run(torchrl_collectors.Collector, env, policy, **options)
    ours = run(pycollect.Collector, Corridor, policy, **options)
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert_alike(our_batch, their_batch, set())


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    def make_policy() -> TensorDictModule:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten(-2))
        policy = TensorDictModule(
            nn.Sequential(Row(net), nn.Linear(3, 1), nn.Tanh()), ["observation"], ["action"]
        )
        return policy.train(training)

    their_policy, our_policy = make_policy(), make_policy()
    env = torchrl.envs.GymWrapper(make_pendulum())
    theirs = run(torchrl_collectors.Collector, env, their_policy)
    ours = run(pycollect.Collector, make_pendulum, our_policy)
    steps = 3 * FRAMES if training else 0
    assert our_policy.state_dict()["module.0.net.1.num_batches_tracked"] == steps
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert our_batch["action"].shape == their_batch["action"].shape
        if not training:  # there, the call that learns the outputs is counted as a step
            torch.testing.assert_close(
                our_batch["action"], their_batch["action"], rtol=0, atol=1e-5
            )


class Row(nn.Module):
    """A net for a batch of rows, given one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation.unsqueeze(0)).squeeze(0)
