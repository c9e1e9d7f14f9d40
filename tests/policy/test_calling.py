"""`compile_policy` and `cudagraph_policy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collect_support import MULTI_STACK, Way, collecting, marked
from echo_envs import echo_fns
from raising import refused, warned
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn

from pycollect import SyncDataCollector


@pytest.fixture(autouse=True)
def distributions_check_their_arguments() -> Iterator[None]:
    """Restore validation of distributions, which ``torch.compile`` disables process-wide."""
    before = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


class Net(nn.Module):
    """Return the parity of episode and step as action, and the observation plus the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        action = (observation[..., 1] + observation[..., 2]) % 2
        return action.long(), observation + self.bias


def module() -> TensorDictModule:
    return TensorDictModule(Net(), ["observation"], ["action", "seen"])


class Bare(Net):
    """A module over tensors that returns only the action."""

    def forward(self, observation: torch.Tensor) -> Any:
        return super().forward(observation)[0]


class Whole(TensorDictModuleBase):
    """The same network as a module that needs a TensorDict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.in_keys, self.out_keys = ["observation"], ["action", "seen"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        action, seen = self.net(td["observation"])
        return td.set("action", action).set("seen", seen)


class Spy:
    """A torch.compile backend that counts graphs and leaves them unchanged."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", [module, Whole, Bare])
def test_a_compiled_policy_returns_the_same(policy: Any) -> None:
    batches, spy = [], Spy()
    for arguments in ({}, {"compile_policy": {"backend": spy}}):
        own = policy()
        with SyncDataCollector(echo_fns(0), own, frames_per_batch=21, **arguments) as collector:
            batches.append([collector.next() for _ in range(2)])
    assert spy.graphs >= 1
    for plain, compiled in zip(*batches, strict=True):
        assert torch.equal(plain["action"], compiled["action"])
        assert torch.equal(plain["observation"], compiled["observation"])


def test_compiled_modules_are_live() -> None:
    policy = module()
    with SyncDataCollector(
        echo_fns(0), policy, frames_per_batch=21, compile_policy={"backend": "eager"}
    ) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.bias.fill_(1000.0)
        collector.update_policy_weights_()
        td = collector.next()
    assert torch.equal(td["seen"], td["observation"] + 1000.0)


def test_calls_before_it_is_compiled() -> None:
    spy = Spy()
    with SyncDataCollector(
        echo_fns(0, 1), module(), frames_per_batch=1, compile_policy={"backend": spy, "warmup": 3}
    ) as collector:
        for _ in range(3):
            collector.next()
            assert spy.graphs == 0
        collector.next()
    assert spy.graphs == 1


def test_distributions_of_compiled_policies_are_sampled() -> None:
    batches = []
    for arguments in ({}, {"compile_policy": {"backend": "eager"}}):
        torch.manual_seed(0)
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=torch.distributions.Categorical
            ),
        )
        with SyncDataCollector(echo_fns(0), policy, frames_per_batch=21, **arguments) as collector:
            collector.set_seed(3)
            batches.append(collector.next())
    torch.testing.assert_close(batches[0]["action"], batches[1]["action"])


@pytest.mark.parametrize("way", marked(MULTI_STACK))
def test_workers_compile_for_themselves(way: Way) -> None:
    with collecting(
        way, echo_fns, module(), frames=21, compile_policy={"backend": "eager"}
    ) as collector:
        td = collector.next()
    assert torch.equal(td["seen"], td["observation"] + 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_graphs_without_cuda_are_a_warning() -> None:
    with (
        warned("cudagraph_policy"),
        SyncDataCollector(
            echo_fns(0), module(), frames_per_batch=21, cudagraph_policy=True
        ) as collector,
    ):
        td = collector.next()
    assert torch.equal(td["seen"], td["observation"] + 0.0)


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"compile_policy": 3}, TypeError),
    ({"compile_policy": {"backed": "eager"}}, TypeError),
    ({"compile_policy": {"warmup": -1}}, ValueError),
    ({"cudagraph_policy": "yes"}, TypeError),
    ({"cudagraph_policy": {"warmup": 1.5}}, ValueError),
    ({"trust_policy": "yes"}, TypeError),
    ({"cudagraph_policy": {"pool": 1}}, TypeError),
]


@pytest.mark.parametrize(("arguments", "error"), BAD, ids=str)
def test_invalid_call_options(arguments: dict[str, Any], error: Any) -> None:
    ((name, value),) = arguments.items()
    with refused(error, name) as caught:
        SyncDataCollector(echo_fns(0), module(), frames_per_batch=21, **arguments)
    if isinstance(value, dict):
        assert next(iter(value)) in str(caught.value)


@pytest.mark.parametrize("off", [None, False])
def test_false_disables_both_options(off: Any) -> None:
    with SyncDataCollector(
        echo_fns(0), module(), frames_per_batch=21, compile_policy=off, cudagraph_policy=off
    ) as collector:
        assert "seen" in collector.next()
