"""A policy on another device: what crosses, in which order, who waits; and the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import parity_policy
from echo_envs import echo_fns
from fake_device import FakeDevice
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from pycollect import SyncDataCollector
from pycollect.devices import CPU
from pycollect.policy.crossing import Crossing


class Elsewhere(Crossing):
    """The policy's device is told apart from the CPU, though it is the same memory."""

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return False


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Every policy is on another device than its environment."""
    device = FakeDevice()

    def crossing(there: torch.device, home: torch.device, told: bool = False) -> Crossing:
        own = Elsewhere(there, home)
        own.uses(device)
        return own

    monkeypatch.setattr("pycollect.policy.runner.Crossing", crossing)
    return device


def test_pinned_memory_is_written_again_only_after_its_copy() -> None:
    """Where nothing is fetched, nothing else waits for the device."""
    device = FakeDevice()
    crossing = Elsewhere(CPU, torch.device("meta"))
    crossing.uses(device)
    source = torch.zeros(3)
    crossing.mirrors({("observation",): source})
    act = crossing.around(lambda: ())
    act()
    assert "host waits" not in device.log
    act()
    assert device.log.count("host waits") == 1


class Keys(gymnasium.Env[Any, Any]):
    """Two observations, of which a policy may read one; episodes of three steps."""

    observation_space = spaces.Dict(
        {"seen": spaces.Box(-9, 9, (3,)), "unseen": spaces.Box(-9, 9, (1000,))}
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def _observe(self) -> Any:
        return {name: space.low * 0 + self.steps for name, space in self.observation_space.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), float(action), self.steps == 3, False, {}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def planned() -> Any:
    return TensorDictModule(
        nn.Sequential(mlp(), ArgMax()), in_keys=["observation"], out_keys=["action"]
    )


class ArgMax(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


def sampled() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


class Counter(nn.Module):
    """Counts its calls since a trajectory began in a state of its own."""

    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def forward(self, td: Any) -> Any:
        td["action"] = (td["count"] % 2).long().squeeze(-1) + 0 * td["is_init"].long().squeeze(-1)
        return td.set(("next", "count"), td["count"] + 1)


def whole(td: Any) -> Any:
    """A policy that takes the TensorDict itself."""
    return td.set("action", (td["observation"][..., 2] % 2).long())


POLICIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "opaque": (parity_policy, {}),
    "planned": (planned, {}),
    "sampled": (sampled, {}),
    "with a state": (Counter, {"policy_state": {"count": (1,)}}),
    "whole": (lambda: whole, {}),
}


def batches(name: str) -> list[Any]:
    make, arguments = POLICIES[name]
    with SyncDataCollector(echo_fns(0), make(), frames_per_batch=15, **arguments) as collector:
        collector.set_seed(4)
        return [collector.next() for _ in range(3)]


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_batches_wherever_the_policy_is(name: str, request: pytest.FixtureRequest) -> None:
    here = batches(name)
    request.getfixturevalue("apart")
    for ours, theirs in zip(batches(name), here, strict=True):
        keys = set(theirs.keys(True, True))
        assert set(ours.keys(True, True)) == keys
        for key in keys:
            assert torch.equal(ours[key], theirs[key]), key


def test_one_wait_per_step_and_only_what_is_read_crosses(apart: FakeDevice) -> None:
    policy = TensorDictModule(lambda seen: (seen[..., 0] % 2).long(), ["seen"], ["action"])
    with SyncDataCollector([[Keys]], policy, frames_per_batch=10) as collector:
        assert not [entry for entry in apart.log if "1000" in entry]
        apart.log.clear()
        collector.next()
        assert apart.log.count("host waits") == 10
        pinned = [entry for entry in apart.log if entry.startswith("pinned")]
        assert pinned == ["pinned (1,)"]  # the action; its room is used again at each step
        apart.log.clear()
        collector.next()
        assert apart.log == ["host waits"] * 10


def test_a_policy_that_takes_a_tensordict_is_given_it_from_pinned_memory(apart: FakeDevice) -> None:
    def takes_all(td: Any) -> Any:
        return td.set("action", (td["seen"][..., 0] % 2).long())

    with SyncDataCollector([[Keys]], takes_all, frames_per_batch=10) as collector:
        assert {"pinned (1, 3)", "pinned (1, 1000)"} <= set(apart.log)
        collector.next()
        apart.log.clear()
        collector.next()
        assert apart.log == ["host waits"] * 10


def test_outputs_of_another_shape_are_noticed(apart: FakeDevice) -> None:
    def grows(seen: torch.Tensor) -> Any:
        count[0] += 1
        return (seen[..., 0] % 2).long(), seen[..., : 1 + (count[0] > 3)]

    count = [0]
    policy = TensorDictModule(grows, ["seen"], ["action", "part"])
    with (
        SyncDataCollector([[Keys]], policy, frames_per_batch=10) as collector,
        pytest.raises(ValueError, match="part"),
    ):
        collector.next()


def test_outputs_come_back_only_when_the_device_is_done() -> None:
    device = FakeDevice()
    crossing = Elsewhere(CPU, CPU)
    crossing.uses(device)
    source = torch.zeros(2)
    (mirror,) = crossing.mirrors({("x",): source}).values()
    act = crossing.around(lambda: (mirror + 1,))
    source.fill_(5)
    (out,) = act()
    assert device.log[-1] == "host waits"
    assert out.tolist() == [6.0, 6.0]
    source.fill_(7)
    (again,) = act()
    assert again.data_ptr() == out.data_ptr()
    assert again.tolist() == [8.0, 8.0]
