"""Environments with two and three batch dimensions, in policies and in batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl_support import (
    IDS,
    MAX_STEPS,
    assert_alike,
    assert_same_entries,
    batched,
    collect,
    compare,
    counting_policy,
)

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.envs import Compose, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule

Make = Callable[[], Any]


def counting(*size: int) -> Any:
    count = torch.Size(size).numel()
    return mock.CountingBatchedEnv(
        batch_size=torch.Size(size), max_steps=torch.arange(3, 3 + count).view(size)
    )


def nested_serial() -> Any:
    return SerialEnv(2, lambda: SerialEnv(3, partial(mock.CountingEnv, max_steps=4)))


ENVS: dict[str, Make] = {
    "[2, 3]": partial(counting, 2, 3),
    "[2, 3, 2]": partial(counting, 2, 3, 2),
    "[1, 1]": partial(counting, 1, 1),
    "SerialEnv of SerialEnv": nested_serial,
    "SerialEnv of [3]": lambda: SerialEnv(2, partial(counting, 3)),
    "SerialEnv of [3, 2]": lambda: SerialEnv(2, partial(counting, 3, 2)),
    "SerialEnv of SerialEnv of SerialEnv": lambda: SerialEnv(2, nested_serial),
    "transformed": lambda: TransformedEnv(
        counting(2, 3), Compose(InitTracker(), RewardSum(), StepCounter())
    ),
    "transformed inside": lambda: SerialEnv(
        2, lambda: TransformedEnv(SerialEnv(3, mock.CountingEnv), RewardSum())
    ),
}


def sized(env: Any, policy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a policy that asserts the environment's batch size."""
    size = env.batch_size

    def act(td: Any) -> Any:
        assert td.batch_size == size
        return policy(td)

    return act


def zeros(env: Any) -> Any:
    spec = env.action_spec
    return sized(env, lambda td: td.set("action", spec.zero()))


def drawn(env: Any) -> Any:
    spec = env.action_spec
    return sized(env, lambda td: td.set("action", spec.rand()))


def whole_spec(env: Any) -> Any:
    spec = env.full_action_spec
    return sized(env, lambda td: td.update(spec.rand()))


def tensors(env: Any) -> Any:
    size = env.batch_size

    def act(observation: torch.Tensor) -> torch.Tensor:
        assert observation.shape[:-1] == size
        return (observation % 2 == 0).to(torch.int8)

    return act


def noting(env: Any) -> Any:
    """Return a policy that passes a private entry to its next call."""

    def policy(td: Any) -> Any:
        noted = td.get("_noted", torch.zeros(*td.shape, 2))
        td["action"] = td["observation"].to(torch.int8) % 2
        td["_noted"] = noted + 1
        return td.set("calls", noted.clone())

    return sized(env, policy)


POLICIES: dict[str, Callable[[Any], Any]] = {
    "zeros": zeros,
    "drawn": drawn,
    "whole spec": whole_spec,
    "tensors": tensors,
    "module": lambda env: counting_policy(),
    "noting": noting,
    "random": lambda env: None,
}


@pytest.mark.sample(usual=24)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("env", ENVS)
def test_policies(env: str, policy: str) -> None:
    make = ENVS[env]
    if env.startswith("transformed") and policy == "tensors":
        pytest.skip("several keys for one parameter: an error there")
    frames = 4 * make().batch_size.numel()
    for td in compare(make, lambda: POLICIES[policy](make()), frames=frames):
        assert td.shape == (*make().batch_size, 4)


ARGUMENTS: list[dict[str, Any]] = [
    MAX_STEPS,
    {"init_random_frames": 30},
    {"reset_at_each_iter": True},
    {**MAX_STEPS, "set_truncated": True},
]


@pytest.mark.parametrize("kwargs", ARGUMENTS, ids=str)
@pytest.mark.parametrize("env", ["[2, 3]", "SerialEnv of SerialEnv"])
def test_arguments(env: str, kwargs: dict[str, Any]) -> None:
    compare(ENVS[env], lambda: zeros(ENVS[env]()), **kwargs)


NESTED: dict[str, Make] = {
    "NestedCountingEnv": batched(mock.NestedCountingEnv, 2, 3),
    "NestedCountingEnv root done": batched(mock.NestedCountingEnv, 2, 3, has_root_done=True),
    "MultiKeyCountingEnv": batched(mock.MultiKeyCountingEnv, 2, 3),
    "EnvWithTensorClass": lambda: SerialEnv(2, lambda: SerialEnv(2, mock.EnvWithTensorClass)),
}


@pytest.mark.parametrize("env", NESTED)
def test_nested_keys(env: str) -> None:
    compare(NESTED[env])
    compare(NESTED[env], lambda: whole_spec(NESTED[env]()))


def recurrent(kind: Any, states: tuple[str, ...], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(lambda observation: observation.float(), ["observation"], ["seen"]),
        kind(
            input_size=1,
            hidden_size=4,
            in_keys=["seen", *states],
            out_keys=["out", *(("next", state) for state in states)],
            **kwargs,
        ),
        TensorDictModule(lambda out: (out.sum(-1, True) > 0).int(), ["out"], ["action"]),
    )


RECURRENT: dict[str, Make] = {
    "LSTM": lambda: recurrent(LSTMModule, ("hidden0", "hidden1")),
    "LSTM of 2 layers": lambda: recurrent(LSTMModule, ("hidden0", "hidden1"), num_layers=2),
    "GRU": lambda: recurrent(GRUModule, ("hidden",)),
}


@pytest.mark.parametrize("kwargs", [{}, {"max_frames_per_traj": 3}], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("env", ["[2, 3]", "SerialEnv of SerialEnv"])
def test_recurrent_policies(env: str, name: str, kwargs: dict[str, Any]) -> None:
    def make() -> Any:
        primer = RECURRENT[name]()[1].make_tensordict_primer()
        return TransformedEnv(ENVS[env](), Compose(InitTracker(), primer))

    frames = 4 * make().batch_size.numel()
    compare(make, RECURRENT[name], frames=frames, **kwargs)


@pytest.mark.parametrize("name", RECURRENT)
def test_states_known_only_from_the_policy(name: str) -> None:
    """The frames match TorchRL's with its transforms, although pycollect needs no transforms."""

    def primed() -> Any:
        primer = RECURRENT[name]()[1].make_tensordict_primer()
        return TransformedEnv(counting(2, 3), Compose(InitTracker(), primer))

    theirs = collect(Collector, primed, RECURRENT[name]())
    ours = collect(pycollect.Collector, partial(counting, 2, 3), RECURRENT[name]())
    assert_alike(ours, [td.exclude(("next", "is_init")) for td in theirs])


def test_entries_of_the_collector_have_the_batch_dimensions() -> None:
    def policy(td: Any) -> Any:
        assert td["is_init"].shape == td["step_count"].shape == (2, 3, 1)
        return td.set("action", td["is_init"].int() + (td["step_count"] > 2).int())

    policy.in_keys, policy.out_keys = ["is_init", "step_count"], ["action"]  # type: ignore[attr-defined]
    (td, *_) = collect(pycollect.Collector, partial(counting, 2, 3), policy, **MAX_STEPS)
    assert torch.equal(td["is_init"], td["step_count"] == 0)
    assert torch.equal(td["action"], (td["is_init"] | (td["step_count"] > 2)).int())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("env", ["[2, 3]", "SerialEnv of SerialEnv"])
def test_from_processes(env: str) -> None:
    """Each worker's rows equal the batch of a collector in this process."""
    make = ENVS[env]
    policy = zeros(make())
    alone = collect(pycollect.Collector, make, policy, batches=2)
    collector = pycollect.MultiSyncCollector(
        [make, make], policy, frames_per_batch=48, total_frames=96, cat_results="stack"
    )
    try:
        for td, own in zip(collector, alone, strict=True):
            assert td.shape == (2, 2, 3, 4)
            for row in td:
                assert_same_entries(row, own, (IDS,))
    finally:
        collector.shutdown()
