"""TorchRL's policies are recognized without importing TorchRL, and act as they do there."""

from __future__ import annotations

import pytest
import torch
from policy_support import ShapeOnly, as_tensordict, assert_follows, assert_same, box, make
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as dists
from torch import nn


@pytest.fixture(scope="module")
def rl():
    pytest.importorskip("torchrl")
    import torchrl.modules

    checks = dists.Distribution._validate_args
    # The first import of TorchRL does this too: TanhNormal's own check raises a TypeError.
    dists.Distribution.set_default_validate_args(False)
    yield torchrl.modules
    dists.Distribution.set_default_validate_args(checks)


def boxes(num_envs):
    return ShapeOnly(box(3), box(2), num_envs)


KINDS = ["random", "deterministic", "mode", "mean"]


@pytest.mark.parametrize(("num_envs", "log_prob"), [(None, False), (5, True)])
@pytest.mark.parametrize("kind", KINDS)
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
        with pytest.raises(RuntimeError):
            make(policy, env, kind)
        return
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, kind)


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


@pytest.mark.parametrize("num_envs", [None, 1, 5])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["LSTMModule", "GRUModule"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"python_based": True}]
)
def test_recurrent_modules_without_a_tensordict(rl, num_envs, first, name, options):
    """Run several steps with varying states, at the start of a trajectory and later."""
    states = ["h", "c"] if name == "LSTMModule" else ["h"]
    torch.manual_seed(0)
    recurrent = getattr(rl, name)(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", *states],
        out_keys=["hidden", *(("next", key) for key in states)],
        **options,
    )
    size = 8 if options.get("bidirectional") else 4
    policy = TensorDictSequential(
        recurrent, TensorDictModule(nn.Linear(size, 2), ["hidden"], ["action"])
    )
    env = boxes(num_envs)
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert [state.leaf.key for state in runner.states] == [(key,) for key in states]
    inputs = {state.leaf.key: state.current for state in runner.states}
    given = {**current, **inputs, ("is_init",): runner.is_init}
    for step in range(4):
        given["is_init",].fill_(first and step in (0, 2))
        current["observation",].normal_()
        with torch.no_grad():
            expected = policy(as_tensordict(given, env))
            came = runner.act()
        keys = [leaf.key for leaf in runner.outputs] + [state.next_key for state in runner.states]
        for key, tensor in zip(keys, came, strict=True):
            assert_same(tensor, expected.get(key))
        for state in runner.states:
            state.current.copy_(expected.get(state.next_key))


@pytest.mark.parametrize("refreshes", [True, False])
@pytest.mark.parametrize("name", ["LSTMModule", "GRUModule"])
def test_a_recurrent_module_keeps_its_weights_after_a_loss_swapped_them(rl, name, refreshes):
    """As a loss with target networks does, which puts the module's parameters back."""
    policy = TensorDictSequential(
        getattr(rl, name)(input_size=3, hidden_size=4, in_key="observation", out_key="hidden"),
        TensorDictModule(nn.Linear(4, 2), ["hidden"], ["action"]),
    )
    env = boxes(5)
    runner, current = make(policy, env)
    assert not runner.slow_path
    states = {state.leaf.key: state.current for state in runner.states}
    given = {**current, **states, ("is_init",): runner.is_init}
    targets = TensorDict.from_module(policy).data.apply(lambda weights: weights + 1)
    with torch.no_grad():
        with targets.to_module(policy):
            policy(as_tensordict(given, env))
        if refreshes:
            runner.refresh(1)
        came = runner.act()
        expected = policy(as_tensordict(given, env))
    for leaf, tensor in zip(runner.outputs, came, strict=False):
        assert_same(tensor, expected.get(leaf.key))


def test_a_hook_on_a_recurrent_module_is_seen(rl):
    policy = TensorDictSequential(
        rl.GRUModule(input_size=3, hidden_size=4, in_key="observation", out_key="hidden"),
        TensorDictModule(nn.Linear(4, 2), ["hidden"], ["action"]),
    )
    runner, _ = make(policy, boxes(5))
    assert not runner.slow_path
    seen = []
    policy[0].register_forward_hook(lambda *args: seen.append(0))
    with torch.no_grad():
        runner.refresh(1)
        runner.act()
    assert runner.slow_path
    assert seen
