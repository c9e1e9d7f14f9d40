"""Policies over tensors: the observation for each parameter, and the returned values."""

from __future__ import annotations

import functools
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from policy_support import ShapeOnly, box, make
from raising import refused
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from pycollect.data.weights import named_weights
from pycollect.policy.random_runner import RandomRunner

PLAIN = ShapeOnly(box(3), box(1), None)
BATCH = ShapeOnly(box(3), box(1), 4)
TWO = ShapeOnly(gym.spaces.Dict({"position": box(2), "velocity": box(2)}), box(2), 4)
NESTED = ShapeOnly(
    gym.spaces.Dict({"camera": gym.spaces.Dict({"rgb": box(2)}), "speed": box(2)}), box(2), None
)


def act(runner):
    with torch.no_grad():
        return runner.act()


def test_module_over_tensors():
    lin = nn.Linear(3, 1)
    for env, shape in ((PLAIN, (1,)), (BATCH, (4, 1))):
        runner, current = make(lin, env)
        assert [leaf.key for leaf in runner.outputs] == [("action",)]
        assert runner.outputs[0].shape == (1,)
        assert runner.inputs == (("observation",),)
        assert not runner.slow_path
        (action,) = act(runner)
        assert action.shape == shape
        assert torch.equal(action, lin(current[("observation",)]))


@pytest.mark.parametrize(
    "policy",
    [
        lambda position, velocity: position - velocity,
        lambda velocity, position: position - velocity,
        lambda x, y: x - y,
        lambda *inputs: inputs[0] - inputs[1],
        lambda *, position, velocity: position - velocity,
        lambda **inputs: inputs["position"] - inputs["velocity"],
        lambda position, velocity=None, unused=1.0: position - velocity,
        functools.partial(lambda scale, x, y: scale * (x - y), 1.0),
        torch.sub,
    ],
)
def test_parameters_are_matched_by_name_or_by_position(policy):
    runner, current = make(policy, TWO)
    assert torch.equal(act(runner)[0], current[("position",)] - current[("velocity",)])


def test_a_part_of_the_observation_by_name():
    runner, current = make(lambda velocity: 2 * velocity, TWO)
    assert runner.inputs == (("velocity",),)
    assert torch.equal(act(runner)[0], 2 * current[("velocity",)])


def test_nested_keys_by_joined_name():
    runner, current = make(lambda camera_rgb: -camera_rgb, NESTED)
    assert runner.inputs == (("camera", "rgb"),)
    assert torch.equal(act(runner)[0], -current[("camera", "rgb")])


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda x: x, ["x", "'position', 'velocity'"]),
        (lambda x, y, z: x, ["x, y, z"]),
        (lambda: 0, ["none", "position"]),
        (lambda position, speed: position, ["'speed'", "'position', 'velocity'"]),
        (lambda x, y, *, speed: x, ["speed"]),
    ],
)
def test_parameters_that_do_not_fit_are_named(policy, words):
    with refused(ValueError, "policy") as error:
        make(policy, TWO)
    assert all(word in str(error.value) for word in words), error.value
    assert isinstance(error.value, TypeError)  # TorchRL raises this type


def by_annotation(data: TensorDictBase) -> TensorDictBase:
    return data.set("action", data["observation"][..., :1])


class TakesTensorDict(nn.Module):
    def forward(self, tensordict):
        return by_annotation(tensordict)


class Unannounced(TensorDictModuleBase):
    """A module without declared keys or a known parameter name."""

    def forward(self, data):
        return by_annotation(data)


class CalledItself(TensorDictModuleBase):
    def __call__(self, data):
        return by_annotation(data)


class Bound:
    def act(self, tensordict=None):
        return by_annotation(tensordict)


class HasKeys:
    in_keys = ("observation",)
    out_keys = ("action",)

    def __call__(self, whatever):
        return by_annotation(whatever)


@pytest.mark.parametrize(
    "policy",
    [
        lambda td: by_annotation(td),
        lambda tensordict: by_annotation(tensordict),
        by_annotation,
        TakesTensorDict(),
        HasKeys(),
        Unannounced(),
        CalledItself(),
        Bound().act,
        lambda td=None, scale=1.0: by_annotation(td),
        functools.partial(lambda scale, td: by_annotation(td), 1.0),
        functools.partial(lambda td, scale: by_annotation(td), scale=1.0),
    ],
)
@pytest.mark.parametrize("env", [PLAIN, BATCH])
def test_callables_that_take_the_tensordict(policy, env):
    runner, current = make(policy, env)
    assert runner.slow_path
    assert [leaf.key for leaf in runner.outputs] == [("action",)]
    assert torch.equal(act(runner)[0], current[("observation",)][..., :1])


def test_a_tensordict_has_the_batch_shape_and_fresh_tensors():
    seen = []

    def policy(td: TensorDict):
        seen.append(td.copy())
        return td.set("action", td["observation"][..., :1])

    runner, current = make(policy, BATCH)
    act(runner), act(runner)
    assert [td.batch_size for td in seen] == [torch.Size([4])] * 3
    pointers = {td["observation"].data_ptr() for td in seen}
    assert len(pointers) == 3
    assert current[("observation",)].data_ptr() not in pointers


@pytest.mark.parametrize("returned", [None, torch.zeros(1)])
def test_a_tensordict_policy_must_return_the_tensordict(returned):
    with refused(ValueError, "policy"):
        make(lambda td: returned, PLAIN)


def of_another_form(observation):
    return torch.stack([observation, observation], -1).double()


def set_anew(td):
    by_annotation(td)
    return td.set("observation", of_another_form(td["observation"]))


def in_place(td):
    td["observation"].mul_(0)  # the observation at a reset may be zero too
    return by_annotation(td)


@pytest.mark.parametrize(
    ("policy", "shape", "dtype"),
    [
        (lambda td: set_anew(td), (3, 2), "float64"),
        (in_place, (3,), "float32"),
        (
            TensorDictModule(lambda o: o.mul_(0)[..., :1] * 1, ["observation"], ["action"]),
            (3,),
            "float32",
        ),
        (
            TensorDictSequential(
                TensorDictModule(of_another_form, ["observation"], ["observation"]),
                TensorDictModule(lambda o: o[..., :1, 0].float(), ["observation"], ["action"]),
            ),
            (3, 2),
            "float64",
        ),
    ],
)
@pytest.mark.parametrize("env", [PLAIN, BATCH])
def test_the_observation_may_be_written(env, policy, shape, dtype):
    runner, current = make(policy, env)
    before = current[("observation",)].clone()
    leaves = {leaf.key: leaf for leaf in runner.outputs}
    assert leaves[("observation",)].shape == shape
    assert leaves[("observation",)].dtype == dtype
    with torch.autocast("cpu"):  # a change that makes a program anew
        runner.refresh(8)
    written = dict(zip(leaves, act(runner), strict=True))[("observation",)]
    assert torch.equal(written, before * 0 if len(shape) == 1 else of_another_form(before))
    assert torch.equal(current[("observation",)], before)


@pytest.mark.parametrize(
    "policy", [lambda td: by_annotation(td.clone()), lambda td: by_annotation(td).select("action")]
)
def test_an_unchanged_observation_is_not_an_output(policy):
    runner, _ = make(policy, BATCH)
    assert [leaf.key for leaf in runner.outputs] == [("action",)]


def test_root_entries_of_a_policy_are_in_its_next_input():
    seen = []

    def policy(td):
        seen.append(sorted(td.keys()))
        td["note"] = td["observation"] * 2
        td["next", "note"] = td["observation"] * 3
        return by_annotation(td)

    runner, _ = make(policy, PLAIN)
    act(runner), act(runner)
    runner.forget()
    act(runner)
    first, later = ["observation"], ["action", "note", "observation"]
    assert seen[-3:] == [first, later, first]


@pytest.mark.parametrize(
    "returned",
    [
        np.full(1, 0.5, np.float32),
        [0.5],
        {"action": torch.full((1,), 0.5)},
        [torch.full((1,), 0.5)],
    ],
)
def test_outputs_are_converted_to_tensors(returned):
    runner, _ = make(lambda x: returned, PLAIN)
    assert torch.equal(act(runner)[0], torch.full((1,), 0.5))


def test_several_actions():
    space = gym.spaces.Dict({"go": gym.spaces.Discrete(3), "turn": box(2)})
    env = ShapeOnly(box(3), space, 4)
    runner, _ = make(lambda x: (torch.ones(4), torch.zeros(4, 2)), env)
    assert [leaf.key for leaf in runner.outputs] == [("action", "go"), ("action", "turn")]
    go, turn = act(runner)
    assert go.dtype == torch.int64
    assert go.shape == (4,)
    assert turn.shape == (4, 2)
    with refused(ValueError, "policy") as caught:
        make(lambda x: torch.ones(4), env)
    assert "'go'" in str(caught.value)
    with refused(ValueError, "policy") as caught:
        make(lambda x: {("action", "go"): torch.ones(4)}, env)
    assert "('action', 'turn')" in str(caught.value)


def test_a_cast_does_not_hide_another_dtype_later():
    answers = [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)]
    runner, _ = make(lambda x: answers.pop(0), PLAIN)
    with refused(ValueError, "policy") as caught:
        act(runner)
    assert "'action'" in str(caught.value)


@pytest.mark.parametrize(
    ("action", "num_envs", "out", "words"),
    [
        (gym.spaces.Discrete(3), None, torch.zeros(3), ["'action'", "one-hot", "argmax", "[3]"]),
        (gym.spaces.Discrete(3), 4, torch.zeros(4, 3), ["one-hot", "[4]"]),
        (gym.spaces.Discrete(3), 4, torch.zeros(4, 2), ["[4]", "[4, 2]"]),
        (box(2), 4, torch.zeros(2), ["[4, 2]", "[2]"]),
        (box(1), 4, torch.zeros(1, 4), ["[4, 1]", "[1, 4]"]),
        (box(1), None, torch.zeros(2), ["[1]", "[2]"]),
        (box(1), None, torch.zeros(1, dtype=torch.complex64), ["float32", "complex64"]),
        (box(1), None, torch.zeros(1).to_sparse(), ["dense", "sparse"]),
        (box(1), None, torch.zeros(1, device="meta"), ["CPU", "meta"]),
        (box(1), None, "left", ["'action'", "str"]),
    ],
)
def test_wrong_outputs_are_named(action, num_envs, out, words):
    with refused(ValueError, "policy") as error:
        make(lambda x: out, ShapeOnly(box(3), action, num_envs))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("num_envs", [None, 1, 4])
@pytest.mark.parametrize(
    ("action", "frame"),
    [
        (gym.spaces.Discrete(3), (1,)),
        (box(1), ()),
        (box(2, 1), (2,)),
        (box(), (1,)),
        (gym.spaces.MultiDiscrete([3]), ()),
    ],
)
def test_dimensions_of_size_one_are_added_and_removed(action, num_envs, frame):
    lead = () if num_envs is None else (num_envs,)
    answers = [torch.ones((*lead, *frame)) for _ in range(2)] + [torch.ones((*lead, *frame, 2))]
    runner, _ = make(lambda x: answers.pop(0), ShapeOnly(box(3), action, num_envs))
    (came,) = act(runner)
    assert came.shape == (*lead, *action.shape)
    assert came.dtype == torch.from_numpy(np.ones((), action.dtype)).dtype
    with refused(ValueError, "policy") as caught:
        act(runner)
    assert "'action'" in str(caught.value)


def test_other_outputs_are_numbered():
    out, rest = torch.zeros(1), (torch.ones(2), torch.ones(3))
    runner, _ = make(lambda x: (out, 2.5, None, rest), PLAIN)
    keys = [("action",), ("output1",), ("output3", "0"), ("output3", "1")]
    assert [leaf.key for leaf in runner.outputs] == keys
    assert [value.shape for value in act(runner)] == [(1,), (), (2,), (3,)]


@pytest.mark.parametrize("rest", [(None,), (None, None), (None, 2.5)])
def test_an_output_of_none_is_left_out(rest):
    """Like the state that `predict` of Stable-Baselines3 returns."""
    runner, _ = make(lambda x: (torch.zeros(1), *rest), PLAIN)
    given = [("action",), *[(f"output{n}",) for n, value in enumerate(rest, 1) if value]]
    assert [leaf.key for leaf in runner.outputs] == given
    assert len(act(runner)) == len(given)


def test_other_outputs_keep_their_keys_after_a_module_was_changed():
    module = nn.Linear(3, 1)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x), x

    policy = Two()
    runner, current = make(policy, PLAIN)
    policy.register_forward_hook(lambda m, given, out: (out[0], out[1] + 1))
    runner.refresh(4)
    assert torch.equal(act(runner)[1], current[("observation",)] + 1)


@pytest.mark.parametrize(
    "answers",
    [
        [torch.zeros(1), (torch.zeros(1), torch.zeros(1))],
        [(torch.zeros(1), torch.zeros(1)), torch.zeros(1)],
    ],
)
def test_another_number_of_outputs_later(answers):
    given = list(answers)
    runner, _ = make(lambda x: given.pop(0), PLAIN)
    with refused(ValueError, "policy") as caught:
        act(runner)
    assert "'action'" in str(caught.value)


class Disturbing(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))
        self.own = torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.rebound = self.rebound + 1
        noise = torch.rand(1) + torch.rand(1, generator=self.own) + self.rng.random()
        return self.lin(self.norm(x)) + noise + np.random.rand() + random.random()


def test_construction_does_not_change_the_policy_or_generators():
    module = Disturbing()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    own, rng = module.own.get_state(), module.rng.bit_generator.state
    runner, _ = make(module, BATCH)
    assert module.calls == 1
    assert module.training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert torch.equal(module.own.get_state(), own)
    assert module.rng.bit_generator.state == rng
    act(runner)
    assert module.count == 1


def test_the_users_training_mode_is_not_changed():
    module = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).eval()
    make(module, BATCH)
    assert not module.training


def test_opaque_modules_may_keep_their_inputs():
    kept = []

    def policy(x):
        kept.append(x)
        return x[..., :1]

    runner, current = make(policy, BATCH)
    for value in (1.0, 2.0):
        current[("observation",)].fill_(value)
        act(runner)
    assert [float(x[0, 0]) for x in kept[1:]] == [1.0, 2.0]


def test_an_output_that_is_a_parameter_can_be_recorded():
    bias = nn.Parameter(torch.ones(1))
    runner, _ = make(lambda x: bias, PLAIN)
    assert not act(runner)[0].requires_grad


def test_named_weights():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = named_weights(module)
    assert set(weights) == set(module.state_dict())
    assert not any(w.requires_grad for w in weights.values())
    weights["0.bias"].fill_(7)
    assert (module[0].bias == 7).all()
    assert named_weights(lambda x: module(x)) == {}
    assert named_weights(None) == {}
    with refused(ValueError, "policy") as caught:
        named_weights(nn.LazyLinear(2))
    assert "'weight'" in str(caught.value)


def test_lazy_modules_get_their_shapes_from_the_first_observation():
    module = nn.LazyLinear(1)
    runner, current = make(module, BATCH)
    assert torch.equal(act(runner)[0], module(current[("observation",)]))
    assert set(named_weights(module)) == {"weight", "bias"}


@pytest.mark.parametrize("num_envs", [None, 1, 4])
def test_random_actions(num_envs):
    env = ShapeOnly(box(3), gym.spaces.Dict({"a": gym.spaces.Discrete(3), "b": box(2)}), num_envs)
    runner, again = RandomRunner(env), RandomRunner(env)
    runner.rng, again.rng = np.random.default_rng(1), np.random.default_rng(1)
    assert runner.outputs == env.spec.action
    assert runner.inputs == ()
    steps = []
    for rollout in (3, 2):
        runner.refresh(rollout)
        steps += [runner.act() for _ in range(rollout)]
    lead = () if num_envs is None else (num_envs,)
    assert all(a.shape == lead and b.shape == (*lead, 2) for a, b in steps)
    assert len({b.ctypes.data for _, b in steps}) == 5
    again.refresh(3)
    assert all(np.array_equal(b, again.act()[1]) for _, b in steps[:3])


def test_random_actions_in_place_of_a_policy():
    runner, _ = make(lambda x: torch.zeros(4, 1), BATCH)
    extra = type(runner.outputs[0])(("value",), "float64", (2,))
    current = {("observation",): torch.zeros(4, 3)}
    seen = type(extra)(("observation",), "float64", (3,))
    stand_in = RandomRunner(BATCH, (seen,), current)
    stand_in.refresh(2)
    for value in (1, 2):
        current[("observation",)].fill_(value)
        assert torch.equal(stand_in.act()[0], torch.full((4, 3), value, dtype=torch.float64))
    stand_in = RandomRunner(BATCH, (extra, *runner.outputs))
    stand_in.refresh(2)
    value, action = stand_in.act()
    assert torch.equal(value, torch.zeros(4, 2, dtype=torch.float64))
    assert action.shape == (4, 1)
    assert np.abs(action).sum() > 0
