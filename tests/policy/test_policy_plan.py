"""Plans give the module's result, bit for bit, until the module changes."""

from __future__ import annotations

from functools import partialmethod

import pytest
import torch
from policy_support import ShapeOnly, assert_follows, assert_same, box, make
from raising import refused
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn

from pycollect.policy.program.plan import make_plan

ACTIVATIONS = [
    nn.Tanh(), nn.ReLU(), nn.ReLU(inplace=True), nn.Sigmoid(), nn.ELU(0.7), nn.GELU(),
    nn.GELU("tanh"), nn.SiLU(), nn.LeakyReLU(0.3), nn.Identity(), nn.Dropout(0.5).eval(),
]  # fmt: skip


def chain(activation, bias=True):
    return nn.Sequential(
        nn.Linear(3, 17, bias=bias), activation, nn.Sequential(nn.Linear(17, 9), activation),
        nn.Linear(9, 2, bias=bias),
    )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (64, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plans_are_equal_to_the_module(activation, shape, bias, dtype):
    module = chain(activation, bias).to(dtype)
    plan = make_plan(module, torch.randn(shape, dtype=dtype))
    assert plan is not None
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(shape, dtype=dtype)
            kept = x.clone()
            assert_same(plan.run(x), module(x.clone()))
            assert torch.equal(x, kept)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64, 200, 256])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,)])
def test_sizes(size, shape):
    module = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 3))
    plan = make_plan(module, torch.randn(*shape, size))
    if plan is None:
        return  # not equal on this machine, so no plan is made
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(*shape, size)
            assert_same(plan.run(x), module(x))


def test_a_first_activation_does_not_change_the_observation():
    module = nn.Sequential(nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    kept = x.clone()
    plan = make_plan(module, x)
    with torch.no_grad():
        assert_same(plan.run(x), module(kept))
    assert torch.equal(x, kept)


def test_parameters_of_a_normal_distribution():
    module = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    plan = make_plan(module, torch.randn(5, 3))
    x = torch.randn(5, 3)
    with torch.no_grad():
        for came, expected in zip(plan.run(x), module(x), strict=True):
            assert_same(came, expected)


class SubLinear(nn.Linear):
    pass


def hooked():
    module = nn.Linear(3, 2)
    module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    return module


def own_forward():
    module = nn.Linear(3, 2)
    module.forward = lambda x: x[..., :2]
    return module


def inner_hook():
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    module[1].register_forward_hook(lambda m, args, out: out + 1)
    return module


@pytest.mark.parametrize(
    "make_module",
    [
        hooked,
        own_forward,
        inner_hook,
        lambda: SubLinear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Tanh(), nn.Identity()),
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)),
        lambda: nn.Sequential(NormalParamExtractor(), nn.Linear(3, 2)),
        lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
        lambda: nn.Linear(3, 2, dtype=torch.float64),
    ],
)
def test_modules_without_a_plan(make_module):
    assert make_plan(make_module(), torch.randn(4, 3)) is None


def test_other_inputs_have_no_plan():
    assert make_plan(nn.Linear(3, 2), torch.randn(2, 4, 3)) is None
    with torch.autocast("cpu"):
        assert make_plan(nn.Linear(3, 2), torch.randn(4, 3)) is None


def env_of(num_envs=4):
    return ShapeOnly(box(3), box(2), num_envs)


def forms():
    return [lambda m: m, lambda m: TensorDictModule(m, ["observation"], ["action"])]


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("num_envs", [None, 4])
def test_runner_uses_a_plan(form, num_envs):
    module = chain(nn.Tanh())
    env = env_of(num_envs)
    runner, current = make(form(module), env)
    assert runner.reuses_memory
    reference = TensorDictModule(module, ["observation"], ["action"])
    assert_follows(runner, current, reference, env)
    with torch.no_grad():
        assert runner.act()[0] is runner.act()[0]
    module.register_forward_hook(lambda *_: None)
    runner.refresh(8)
    assert not runner.reuses_memory


def assert_sees(change, module, form=lambda module: module):
    """Check that a policy follows a change of its module between rollouts.

    `change` may return a handle that undoes the change.
    """
    env = env_of()
    runner, current = make(form(module), env)
    handle = change(module)
    try:
        runner.refresh(8)
        reference = TensorDictModule(module, ["observation"], ["action"])
        assert_follows(runner, current, reference, env)
    finally:
        if handle is not None:
            handle.remove()


def exchange_data(module):
    module[0].weight.data = torch.randn(17, 3)


def exchange_strides(module):
    module[0].weight.data = module[0].weight.data.reshape(3, 17).t()


def exchange_parameter(module):
    module[0].weight = nn.Parameter(torch.randn(17, 3))


def exchange_layer(module):
    module[3] = nn.Linear(9, 2)


def exchange_inner_layer(module):
    module[2][1] = nn.ReLU()


def optimise(module):
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(4, 3)).sum().backward()
    optimiser.step()


def load(module):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})


def add_hook(module):
    module[0].register_forward_hook(lambda m, args, out: out * 2)


def replace_forward(module):
    module[0].forward = lambda x: torch.zeros(*x.shape[:-1], 17)


def change_slope(module):
    module[1].negative_slope = 0.9


def global_hook(module):
    return nn.modules.module.register_module_forward_hook(
        lambda m, args, out: out * 2 if m is module else None
    )


@pytest.mark.parametrize(
    "change",
    [
        exchange_data,
        exchange_strides,
        exchange_parameter,
        exchange_layer,
        exchange_inner_layer,
        optimise,
        load,
        add_hook,
        replace_forward,
        change_slope,
        global_hook,
    ],
)
@pytest.mark.parametrize("form", forms())
def test_changes_between_rollouts_are_seen(change, form):
    assert_sees(change, chain(nn.LeakyReLU(0.3)), form)


class Opaque(nn.Module):
    """A module of an unknown kind, which is called as it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * 2


class Other(Opaque):
    def forward(self, x):
        return self.inner(x) - 1


class Called(Opaque):
    def __call__(self, x):
        return super().__call__(x) + 1


def hook(module):
    return module.register_forward_hook(lambda m, args, out: out * 2)


def pre_hook(module):
    return module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


def forward_of_its_own(module):
    module.forward = lambda x: torch.zeros(*x.shape[:-1], 2)


def another_class(module):
    module.__class__ = Other


def a_class_with_a_call(module):
    module.__class__ = Called


class CalledOtherwise(Opaque):
    def _call_impl(self, x):
        return super()._call_impl(x) + 3


def a_class_with_another_call(module):
    module.__class__ = CalledOtherwise


def compiled_call(module):
    module._compiled_call_impl = lambda x: module.inner(x) + 5  # the attribute that compile() sets


@pytest.mark.parametrize(
    "change",
    [
        hook,
        pre_hook,
        global_hook,
        forward_of_its_own,
        another_class,
        a_class_with_a_call,
        a_class_with_another_call,
        compiled_call,
    ],
)
@pytest.mark.parametrize("form", forms())
def test_changes_of_a_module_that_is_called_are_seen(change, form):
    assert_sees(change, Opaque(), form)


def test_a_forward_exchanged_in_the_class_is_seen(monkeypatch):
    assert_sees(lambda module: monkeypatch.setattr(Opaque, "forward", Other.forward), Opaque())


def test_a_call_exchanged_for_all_modules_is_seen(monkeypatch):
    module, env = Opaque(), env_of()
    runner, current = make(module, env)
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, x: call(self, x) * 2)
    runner.refresh(8)
    assert_follows(runner, current, lambda td: td.set("action", module(td["observation"])), env)


class Partial(Opaque):
    """A module with a new `forward` on each access."""

    def scaled(self, x, factor):
        self.calls += 1
        return self.inner(x) * factor

    forward = partialmethod(scaled, factor=3)


@pytest.mark.parametrize("kind", [Opaque, Partial])
def test_a_module_that_counts_its_calls_is_unchanged(kind):
    module = kind()
    runner, _ = make(module, env_of())
    act = runner.act
    with torch.no_grad():
        act()
    runner.refresh(8)
    assert runner.act is act


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize(
    "script",
    [
        torch.jit.script,
        lambda module: torch.jit.trace(module, torch.zeros(4, 3)),
        lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
    ],
    ids=["scripted", "traced", "frozen"],
)
def test_script_modules(script, form):
    module, env = script(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), env_of()
    runner, current = make(form(module), env)
    assert_follows(runner, current, TensorDictModule(module, ["observation"], ["action"]), env)


def test_training_mode_with_dropout():
    module, env = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval(), env_of()
    reference = TensorDictModule(module, ["observation"], ["action"])
    runner, current = make(module, env)
    assert runner.reuses_memory
    module.train()
    runner.refresh(8)
    assert not runner.reuses_memory
    assert_follows(runner, current, reference, env)
    module.eval()
    runner.refresh(8)
    assert runner.reuses_memory


def test_parameters_that_leave_the_cpu():
    module = chain(nn.Tanh())
    runner, _ = make(module, env_of())
    module.to("meta")
    with refused(ValueError, "policy") as caught:
        runner.refresh(8)
    assert "meta" in str(caught.value)


def test_plan_outputs_can_be_recorded():
    runner, _ = make(chain(nn.Tanh()), env_of())
    with torch.no_grad():
        (action,) = runner.act()
    assert not action.is_inference()
    assert not action.requires_grad
    assert torch.from_dlpack(action).data_ptr() == action.data_ptr()
    assert action.numpy().shape == (4, 2)
