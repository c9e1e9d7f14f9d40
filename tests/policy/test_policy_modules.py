"""Plans of TensorDictModules give the same values as the modules, bit for bit."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from policy_support import KINDS, ShapeOnly, assert_follows, box, make
from raising import refused
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from torch import distributions as dists
from torch import nn

ENVS = [None, 1, 5]
OBS = ["observation"]


def boxes(num_envs):
    return ShapeOnly(box(3), box(2), num_envs)


def discrete(num_envs):
    return ShapeOnly(box(3), gym.spaces.Discrete(4), num_envs)


def normal(**kwargs):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), NormalParamExtractor())
    return ProbSeq(
        TensorDictModule(net, OBS, ["loc", "scale"]),
        Prob(["loc", "scale"], ["action"], distribution_class=dists.Normal, **kwargs),
    )


def categorical(key="logits", **kwargs):
    return ProbSeq(
        TensorDictModule(nn.Linear(3, 4), OBS, ["hidden"]),
        TensorDictModule(lambda h: h if key == "logits" else h.softmax(-1), ["hidden"], [key]),
        Prob([key], ["action"], distribution_class=dists.Categorical, **kwargs),
    )


def keys(runner):
    return [leaf.key for leaf in runner.outputs]


@pytest.mark.parametrize("num_envs", ENVS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_prob", [False, True])
def test_normal(num_envs, kind, log_prob):
    env, policy = boxes(num_envs), normal(return_log_prob=log_prob)
    if kind is InteractionType.MEDIAN:
        with pytest.raises(NotImplementedError):
            make(policy, env, kind)
        return
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert keys(runner) == [("loc",), ("scale",), ("action",)] + [("action_log_prob",)] * log_prob
    assert_follows(runner, current, policy, env, kind)


@pytest.mark.parametrize("num_envs", ENVS)
@pytest.mark.parametrize("kind", [k for k in KINDS if k.name not in ("MEDIAN", "MEAN")])
@pytest.mark.parametrize("key", ["logits", "probs"])
@pytest.mark.parametrize("log_prob", [False, True])
def test_categorical(num_envs, kind, key, log_prob):
    env, policy = discrete(num_envs), categorical(key, return_log_prob=log_prob)
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, kind)


def test_one_runner_under_every_interaction_type():
    env, policy = discrete(5), categorical(return_log_prob=True)
    runner, current = make(policy, env)
    for kind in ("mode", "random", "deterministic", "random", None):
        assert_follows(runner, current, policy, env, kind)


def test_the_mean_of_a_categorical_is_not_an_index():
    runner, _ = make(categorical(), discrete(5), "mean")
    with torch.no_grad(), set_interaction_type("mean"), refused(ValueError, "policy") as caught:
        runner.act()
    assert "nan" in str(caught.value)
    assert "'action'" in str(caught.value)


def test_logits_that_cannot_be_drawn_from(monkeypatch):
    # Importing TorchRL's modules turns this check off for the whole process.
    monkeypatch.setattr(dists.Distribution, "_validate_args", True)
    policy = categorical()
    runner, current = make(policy, discrete(5))
    current[("observation",)].fill_(float("nan"))
    with torch.no_grad(), pytest.raises(ValueError, match="logits"):
        runner.act()


@pytest.mark.parametrize("num_envs", [None, 5])
@pytest.mark.parametrize(
    ("cls", "names", "size"),
    [
        (dists.Bernoulli, ["logits"], 2),
        (dists.Laplace, ["loc", "scale"], 4),
        (dists.Beta, ["concentration1", "concentration0"], 4),
    ],
)
@pytest.mark.parametrize("kind", ["random", "deterministic", "mean"])
def test_other_distributions(num_envs, cls, names, size, kind):
    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if len(names) == 1 else tuple(o.exp() for o in out.chunk(2, -1))

    env, log_prob = boxes(num_envs), (cls, kind) != (dists.Bernoulli, "mean")
    head = Prob(names, ["action"], distribution_class=cls, return_log_prob=log_prob)
    policy = ProbSeq(TensorDictModule(Net(3, size), OBS, names), head)
    runner, current = make(policy, env, kind)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, kind)


def test_mean_that_is_estimated():
    class NoMean(dists.Normal):
        @property
        def mean(self):
            raise NotImplementedError

    env = boxes(5)
    head = Prob(["loc", "scale"], ["action"], distribution_class=NoMean, n_empirical_estimate=7)
    policy = ProbSeq(normal()[0], head)
    runner, current = make(policy, env, "mean")
    assert not runner.slow_path
    assert_follows(runner, current, policy, env, "mean")


def test_distribution_arguments_and_renamed_parameters():
    env = boxes(5)
    policy = ProbSeq(
        TensorDictModule(nn.Linear(3, 2), OBS, [("params", "mu")]),
        Prob(
            {"loc": ("params", "mu")},
            ["action"],
            distribution_class=dists.Normal,
            distribution_kwargs={"scale": 0.5},
            return_log_prob=True,
            log_prob_key="logp",
        ),
    )
    runner, current = make(policy, env)
    assert keys(runner) == [("params", "mu"), ("action",), ("logp",)]
    assert_follows(runner, current, policy, env)


def test_a_modules_own_generator_advances_equally():
    env = discrete(5)
    policy, twin = categorical(generator=3), categorical(generator=3)
    twin.load_state_dict(policy.state_dict())
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert_follows(runner, current, twin, env)


def test_a_sample_that_is_the_observation_itself():
    env = ShapeOnly(box(2), box(2), 5)
    head = Prob(
        {"loc": "observation"},
        ["action"],
        distribution_class=dists.Normal,
        distribution_kwargs={"scale": 1.0},
    )
    runner, current = make(head, env, "mode")
    with torch.no_grad():
        (action,) = runner.act()
    before = action.clone()
    current[("observation",)].zero_()
    assert torch.equal(action, before)


@pytest.mark.parametrize("num_envs", ENVS)
def test_actor_and_value_over_a_common_part(num_envs):
    env = discrete(num_envs)
    policy = ProbSeq(
        TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), OBS, ["hidden"]),
        TensorDictModule(nn.Linear(8, 1), ["hidden"], ["state_value"]),
        TensorDictModule(nn.Linear(8, 4), ["hidden"], ["_logits"]),
        Prob({"logits": "_logits"}, ["action"], distribution_class=dists.Categorical),
    )
    runner, current = make(policy, env)
    assert keys(runner) == [("hidden",), ("state_value",), ("action",)]
    assert_follows(runner, current, policy, env)


def test_samples_in_the_middle_of_a_sequence():
    env = boxes(5)
    policy = ProbSeq(
        *normal(return_log_prob=True), TensorDictModule(nn.Linear(2, 1), ["action"], ["q"])
    )
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env)
    nested = TensorDictSequential(normal(), TensorDictModule(nn.Linear(2, 1), ["action"], ["q"]))
    runner, current = make(nested, env)
    assert not runner.slow_path
    assert_follows(runner, current, nested, env)


def test_later_modules_may_keep_outputs_of_plans_and_distributions():
    kept = []

    def value(hidden, action):
        kept.append((hidden, action))
        return hidden.sum(-1, keepdim=True)

    policy = ProbSeq(
        TensorDictModule(nn.Linear(3, 4), OBS, ["logits"]),
        Prob(["logits"], ["action"], distribution_class=dists.Categorical),
        TensorDictModule(value, ["logits", "action"], ["value"]),
        return_composite=True,
    )
    runner, current = make(policy, discrete(5))
    assert not runner.slow_path
    for step in range(3):
        current[("observation",)].fill_(step)
        with torch.no_grad():
            runner.act()
    assert len({t.data_ptr() for pair in kept for t in pair}) == 2 * len(kept)
    assert_follows(runner, current, policy, discrete(5))


def test_a_module_that_changes_its_input_in_place():
    env = ShapeOnly(box(2), box(2), 5)
    policy = TensorDictSequential(
        TensorDictModule(lambda x: x.mul_(2) + 0, OBS, ["doubled"]),
        TensorDictModule(nn.Linear(2, 2), OBS, ["action"]),
    )
    runner, current = make(policy, env)
    assert runner.slow_path  # only the TensorDict has the changed observation
    before = current[("observation",)].clone()
    assert_follows(runner, current, policy, env)
    with torch.no_grad():
        current[("observation",)].copy_(before)
        out = dict(zip(keys(runner), runner.act(), strict=True))
    assert torch.equal(current[("observation",)], before)
    assert torch.equal(out[("observation",)], 2 * before)


def test_a_module_that_changes_an_output_of_another_in_place():
    env = ShapeOnly(box(2), box(2), 5)
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(2, 2), OBS, ["hidden"]),
        TensorDictModule(lambda x: x.mul_(2) + 1, ["hidden"], ["action"]),
    )
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env)


@pytest.mark.parametrize(
    ("out", "out_keys"),
    [
        (lambda x: {"action": x[..., :2], "extra": x}, ["extra", "action"]),
        (lambda x: (x[..., :2], x), ["action", "_"]),
        (lambda x: (x[..., :2], x), ["action", ("deep", "_hidden")]),
        (lambda x: (x[..., :2], x), [("deep", "seen"), "action"][::-1]),
    ],
)
def test_ways_to_return(out, out_keys):
    env, policy = boxes(5), TensorDictModule(out, OBS, out_keys)
    runner, current = make(policy, env)
    assert not runner.slow_path
    delivered = [k for k in out_keys if k != "_" and k != ("deep", "_hidden")]
    assert keys(runner) == [k if isinstance(k, tuple) else (k,) for k in delivered]
    assert_follows(runner, current, policy, env)


def test_inputs_by_name_and_a_method():
    class Net(nn.Module):
        def forward(self):
            raise AssertionError

        def choose(self, *, x):
            return x[..., :2]

    env = boxes(5)
    policy = TensorDictModule(Net(), {"x": "observation"}, ["action"], method="choose")
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert_follows(runner, current, policy, env)


def test_selected_outputs():
    env = boxes(5)
    policy = normal(return_log_prob=True).select_out_keys("action")
    runner, current = make(policy, env)
    assert not runner.slow_path
    assert keys(runner) == [("action",)]
    assert_follows(runner, current, policy, env)


def hooked():
    module = TensorDictModule(nn.Linear(3, 2), OBS, ["action"])
    module.register_forward_hook(lambda m, args, out: out.set("hooked", out["action"] + 1))
    return module


class Overrides(TensorDictModule):
    def forward(self, tensordict):
        return super().forward(tensordict).set("more", tensordict["action"] * 2)


class Own(TensorDictModuleBase):
    in_keys = ("observation",)
    out_keys = ("action",)

    def forward(self, tensordict):
        return tensordict.set("action", tensordict["observation"][..., :2])


class OwnSampling(Prob):
    def get_dist(self, tensordict):
        return dists.Normal(tensordict["loc"], 1.0)


def composite():
    net = TensorDictModule(lambda x: x[..., :2], OBS, [("params", "a", "loc")])
    head = Prob(
        ["params"],
        ["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"a": lambda loc: dists.Normal(loc, 1.0)},
            "name_map": {"a": "action"},
        },
    )
    return ProbSeq(net, head)


@pytest.mark.parametrize(
    "make_policy",
    [
        hooked,
        lambda: Overrides(nn.Linear(3, 2), OBS, ["action"]),
        Own,
        lambda: TensorDictSequential(Own()),
        lambda: TensorDictSequential(lambda td: td.set("action", td["observation"][..., :2])),
        lambda: TensorDictModule(nn.Linear(3, 2), OBS, ["action"], inplace="empty"),
        lambda: TensorDictSequential(
            TensorDictModule(nn.Linear(3, 2), OBS, ["action"]), partial_tolerant=True
        ),
        lambda: ProbSeq(normal()[0], OwnSampling(["loc", "scale"], ["action"])),
        lambda: TensorDictModule(lambda x: x[..., :2].numpy(), OBS, ["action"]),
        composite,
    ],
)
@pytest.mark.parametrize("num_envs", [None, 5])
def test_policies_that_cannot_be_unwrapped_get_a_tensordict(make_policy, num_envs):
    env, policy = boxes(num_envs), make_policy()
    runner, current = make(policy, env)
    assert runner.slow_path
    assert ("action",) in keys(runner)
    assert_follows(runner, current, policy, env)


def test_a_part_of_the_observation_as_a_tensordict():
    space = gym.spaces.Dict({"body": gym.spaces.Dict({"x": box(2), "v": box(2)})})
    env = ShapeOnly(space, box(2), 5)
    policy = TensorDictModule(lambda body: body["x"] + body["v"], ["body"], ["action"])
    runner, current = make(policy, env)
    assert runner.slow_path
    assert_follows(runner, current, policy, env)


def test_a_hook_on_the_inner_module_is_called():
    calls = []
    lin = nn.Linear(3, 2)
    lin.register_forward_hook(lambda *_: calls.append(1))
    runner, _ = make(TensorDictModule(lin, OBS, ["action"]), boxes(5))
    assert not runner.slow_path
    with torch.no_grad():
        runner.act()
    assert len(calls) == 2


def test_a_hook_added_later_is_called():
    env, policy = boxes(5), TensorDictModule(nn.Linear(3, 2), OBS, ["action"])
    runner, current = make(policy, env)
    handle = policy.register_forward_hook(lambda m, args, out: out.set("action", out["action"] + 1))
    runner.refresh(8)
    assert runner.slow_path
    assert_follows(runner, current, policy, env)
    policy.register_forward_hook(lambda m, args, out: out.set("new", out["action"]))
    with torch.no_grad(), refused(ValueError, "policy") as caught:
        runner.act()
    assert "'new'" in str(caught.value)
    handle.remove()


def test_an_output_without_the_batch_shape_is_named():
    policy = TensorDictModule(lambda x: (x[..., :2], torch.ones(3)), OBS, ["action", "odd"])
    with refused(ValueError, "policy") as caught:
        make(policy, boxes(5))
    assert "[3]" in str(caught.value)
    assert "'odd'" in str(caught.value)
