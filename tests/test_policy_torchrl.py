"""TorchRL's policies are recognised without importing TorchRL, and do what they do there."""

from __future__ import annotations

import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from policy_support import ShapeOnly, assert_follows, box, make
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import distributions as dists
from torch import nn


@pytest.fixture(scope="module")
def rl():
    pytest.importorskip("torchrl")
    import torchrl.modules

    return torchrl.modules


def boxes(num_envs):
    return ShapeOnly(box(3), box(2), num_envs)


KINDS = ["random", "deterministic", "mode", "mean"]


@pytest.mark.parametrize("num_envs", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_prob", [False, True])
@pytest.mark.parametrize("name", ["TanhNormal", "TruncatedNormal", "IndependentNormal", "Normal"])
def test_continuous_actor(rl, num_envs, kind, log_prob, name):
    cls = dists.Normal if name == "Normal" else getattr(rl, name)
    net = nn.Sequential(
        rl.MLP(in_features=3, out_features=4, num_cells=[8]), NormalParamExtractor()
    )
    policy = rl.ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=cls,
        return_log_prob=log_prob,
    )
    env = boxes(num_envs)
    if (name, kind) == ("TanhNormal", "mode"):
        with pytest.raises(RuntimeError, match="mode"):
            make(policy, env, kind)
        return
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, kind)


@pytest.mark.parametrize("num_envs", [None, 5])
@pytest.mark.parametrize("kind", ["random", "deterministic", "mode"])
def test_discrete_actor(rl, num_envs, kind):
    policy = rl.ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=dists.Categorical,
        return_log_prob=True,
    )
    env = ShapeOnly(box(3), gym.spaces.Discrete(4), num_envs)
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, kind)


def test_one_hot_actions_are_refused(rl):
    policy = rl.ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=rl.OneHotCategorical,
    )
    with pytest.raises(ValueError, match="one-hot"):
        make(policy, ShapeOnly(box(3), gym.spaces.Discrete(4), 5))


def test_actor_value_operator(rl):
    common = TensorDictModule(nn.Linear(3, 8), ["observation"], ["hidden"])
    actor = rl.ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["hidden"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=rl.TanhNormal,
        return_log_prob=True,
    )
    value = rl.ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    policy, env = rl.ActorValueOperator(common, actor, value), boxes(5)
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert {leaf.key for leaf in runner.outputs} == {
        ("hidden",), ("loc",), ("scale",), ("action",), ("action_log_prob",), ("state_value",)
    }  # fmt: skip
    assert_follows(runner, current, policy, env)


@pytest.mark.parametrize("num_envs", [None, 5])
def test_deterministic_actor_with_an_mlp_is_planned(rl, num_envs):
    module = rl.MLP(in_features=3, out_features=2, num_cells=[16, 16])
    policy, env = rl.Actor(module, in_keys=["observation"]), boxes(num_envs)
    runner, current = make(policy, env)
    assert runner.reuses_memory
    assert_follows(runner, current, policy, env)


def test_safe_actions_and_other_modules_get_a_tensordict(rl):
    from torchrl.data import Bounded

    spec = Bounded(-0.1, 0.1, (2,))
    policy, env = (
        rl.Actor(nn.Linear(3, 2), in_keys=["observation"], spec=spec, safe=True),
        boxes(None),
    )
    runner, current = make(policy, env)
    assert runner.slow_path
    assert_follows(runner, current, policy, env)


def test_recurrent_modules_say_that_they_come_later(rl):
    lstm = rl.LSTMModule(input_size=3, hidden_size=2, in_key="observation", out_key="action")
    with pytest.raises(NotImplementedError, match="recurrent_state_h"):
        make(lstm, boxes(None))


def test_torchrl_is_not_imported_by_itself():
    code = "import sys, pycollect.policy; assert 'torchrl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.get_num_threads() > 0
