"""A policy on another device: its copies, their order and waits; batches stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import parity_policy
from echo_envs import echo_fns
from fake_device import Elsewhere, FakeDevice, place_policies_on
from gymnasium import spaces
from raising import refused
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from pycollect import SyncDataCollector
from pycollect.data.devices import CPU


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Place every policy on another device than its environment."""
    device = FakeDevice()
    place_policies_on(device, monkeypatch)
    return device


def test_pinned_memory_is_reused_only_after_its_copy() -> None:
    """If no output is copied back, only this check waits for the device."""
    device = FakeDevice()
    transfer = Elsewhere(CPU, torch.device("meta"))
    transfer.use(device)
    source = torch.zeros(3)
    transfer.mirrors({("observation",): source})
    act = transfer.wrap(lambda: ())
    act()
    assert "host waits" not in device.log
    act()
    assert device.log.count("host waits") == 1


class Keys(gymnasium.Env[Any, Any]):
    """Two observations, one of which the policy may ignore; episodes have three steps."""

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
    """Count the calls since the start of the trajectory in its own recurrent state."""

    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def forward(self, td: Any) -> Any:
        td["action"] = (td["count"] % 2).long().squeeze(-1) + 0 * td["is_init"].long().squeeze(-1)
        return td.set(("next", "count"), td["count"] + 1)


def whole(td: Any) -> Any:
    """A policy over the TensorDict itself."""
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
def test_batches_do_not_depend_on_the_policys_device(
    name: str, request: pytest.FixtureRequest
) -> None:
    here = batches(name)
    request.getfixturevalue("apart")
    for ours, theirs in zip(batches(name), here, strict=True):
        keys = set(theirs.keys(True, True))
        assert set(ours.keys(True, True)) == keys
        for key in keys:
            assert torch.equal(ours[key], theirs[key]), key


def test_a_step_waits_once_and_copies_only_entries_that_are_read(
    apart: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart.note_copies(monkeypatch)
    policy = TensorDictModule(lambda seen: (seen[..., 0] % 2).long(), ["seen"], ["action"])
    with SyncDataCollector([[Keys]], policy, frames_per_batch=10) as collector:
        apart.log.clear()
        collector.next()
        assert apart.log.count("host waits") == 10
        pinned = [entry for entry in apart.log if entry.startswith("pinned")]
        assert pinned == ["pinned (8,)"]  # the action; each step reuses its memory
        apart.log.clear()
        collector.next()
        assert apart.log == ["up 12", "down 8", "host waits"] * 10


def test_one_copy_each_way_for_any_inputs_and_outputs(
    apart: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(seen: torch.Tensor, unseen: torch.Tensor) -> Any:
        action = ((seen.sum(-1) + unseen.sum(-1)) % 2).long()
        return action, seen.mean(-1, keepdim=True), unseen[..., 0] > 1

    names = ["action", "value", "is_late"]
    with monkeypatch.context() as patch:
        apart.note_copies(patch)
        policy = TensorDictModule(act, ["seen", "unseen"], names)
        with SyncDataCollector([[Keys] * 3], policy, frames_per_batch=12) as collector:
            apart.log.clear()
            batch = collector.next()
    # Each tensor starts at a multiple of 64 bytes.
    up, down = f"up {64 + 3 * 4000}", f"down {2 * 64 + 3}"
    assert apart.copies == [up, down] * 4
    assert apart.log.count("host waits") == 4
    for name, own in zip(names, act(batch["seen"], batch["unseen"]), strict=True):
        assert torch.equal(batch[name], own), name


def test_tensors_of_every_form_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    device.note_copies(monkeypatch)
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    forms: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3,), torch.bool),
        ((), torch.int64),
        ((2, 0), torch.float32),
        ((5, 3), torch.bfloat16),
        ((1,), torch.uint8),
        ((2, 2), torch.float64),
        ((0,), torch.int32),
    ]
    sources = {
        (str(at),): torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) + at
        for at, (shape, dtype) in enumerate(forms)
    }
    sources["0",] = sources["0",].bool()
    mirrors = transfer.mirrors({**sources, ("again",): sources["1",]})
    assert mirrors["again",] is mirrors["1",]
    assert all(own.data_ptr() % 16 == 0 for own in mirrors.values())

    def outputs() -> Any:
        """Return the same values, one of them with gaps."""
        outs = {key: mirrors[key].clone() for key in sources}
        outs["3",] = outs["3",].repeat(2, 2)[::2, :3]
        return tuple(outs.values())

    act = transfer.wrap(outputs)
    for _ in range(2):
        device.log.clear()
        outs = act()
        assert [entry.partition(" ")[0] for entry in device.copies] == ["up", "down"]
        assert device.log[-1] == "host waits"
        for key, out in zip(sources, outs, strict=True):
            assert (out.dtype, out.shape) == (sources[key].dtype, sources[key].shape)
            expected = sources[key] if key != ("3",) else sources[key].repeat(2, 1)[::2]
            assert torch.equal(out, expected)
        for source in sources.values():
            source.copy_(source.flip(0) if source.ndim else source + 1)


def test_tensors_on_the_device_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    device.note_copies(monkeypatch)
    there, away = torch.ones(2), torch.ones(3)
    monkeypatch.setattr(Elsewhere, "_is_on_device", lambda _, own: own is there)
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    mirrors = transfer.mirrors({("there",): there, ("away",): away})
    assert mirrors["there",] is there
    transfer.wrap(lambda: ())()
    assert device.copies == ["up 12"]


def test_the_tensordict_for_a_policy_is_copied_from_pinned_memory(
    apart: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_all(td: Any) -> Any:
        return td.set("action", (td["seen"][..., 0] % 2).long())

    apart.note_copies(monkeypatch)
    with SyncDataCollector([[Keys]], takes_all, frames_per_batch=10) as collector:
        collector.next()
        apart.log.clear()
        collector.next()
        assert apart.log == ["up 4064", "down 8", "host waits"] * 10


def test_outputs_of_another_shape_are_noticed(apart: FakeDevice) -> None:
    def grows(seen: torch.Tensor) -> Any:
        count[0] += 1
        return (seen[..., 0] % 2).long(), seen[..., : 1 + (count[0] > 3)]

    count = [0]
    policy = TensorDictModule(grows, ["seen"], ["action", "part"])
    with (
        SyncDataCollector([[Keys]], policy, frames_per_batch=10) as collector,
        refused(ValueError, "part"),
    ):
        collector.next()


def test_actions_are_cast_and_checked_on_the_host(
    apart: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking the values on the device would add a wait to each step."""
    wrong = [False]

    def act(seen: torch.Tensor) -> dict[str, torch.Tensor]:
        action = (seen[..., 0] % 2).float()
        return {"value": seen[..., :1], "action": action * float("nan") if wrong[0] else action}

    apart.note_copies(monkeypatch)
    with SyncDataCollector([[Keys]], act, frames_per_batch=10) as collector:
        collector.next()
        apart.log.clear()
        td = collector.next()
        assert apart.log == ["up 12", "down 68", "host waits"] * 10
        assert td["action"].tolist() == [[step % 2 for step in td["seen"][0, :, 0].int().tolist()]]
        wrong[0] = True
        with refused(ValueError, "policy") as caught:
            collector.next()
        assert "nan" in str(caught.value)


def test_outputs_are_read_only_after_the_device_is_done() -> None:
    device = FakeDevice()
    transfer = Elsewhere(CPU, CPU)
    transfer.use(device)
    source = torch.zeros(2)
    (mirror,) = transfer.mirrors({("x",): source}).values()
    act = transfer.wrap(lambda: (mirror + 1,))
    source.fill_(5)
    (out,) = act()
    assert device.log[-1] == "host waits"
    assert out.tolist() == [6.0, 6.0]
    source.fill_(7)
    (again,) = act()
    assert again.data_ptr() == out.data_ptr()
    assert again.tolist() == [8.0, 8.0]
