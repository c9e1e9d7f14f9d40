"""Contents of a weight update: training modes, extra state, tied parameters, errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    NEST_STACK,
    STACK,
    Way,
    collecting,
    is_gone,
    marked,
)
from echo_envs import ENTRIES, wait_until
from envs_for_tests import CountingEnv
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import AsyncBatchedCollector, Evaluator, SyncDataCollector

T = 4
ONE = ENTRIES["one"]
REMOTE = marked(STACK, NEST_STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2])
ALL = [pytest.param(IN_PROCESS, id="in process"), *REMOTE]
SYNC = marked(STACK, NEST_STACK, MULTI_STACK)
VERSION = ("collector", "policy_version")


class Head(nn.Module):
    """A module with a gain in its extra state, neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: Any = 0.0

    def get_extra_state(self) -> Any:
        return {"gain": self.gain}

    def set_extra_state(self, state: Any) -> None:
        self.gain = state["gain"]


class Largest(nn.Module):
    """Return the index of the largest number."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.argmax(-1)


class Shows(nn.Module):
    """Output the training modes (of the module, `body` and `head`) and the gain."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1), Head()

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        modes = torch.tensor([part.training for part in (self, self.body, self.head)])
        gain = torch.as_tensor(self.head.gain, dtype=torch.float32).sum()
        return torch.zeros(lead, dtype=torch.int64), modes.expand(*lead, 3), gain.expand(lead)


def shows() -> TensorDictModule:
    return TensorDictModule(Shows(), ["observation"], ["action", "modes", "gain"])


def next_of_version(collector: Any, version: int) -> Any:
    """Return the frames of this version in the first batch that contains any."""
    for _ in range(30):
        batch = collector.next()
        frames = batch[batch[VERSION] == version]
        if len(frames):
            return frames
    raise AssertionError(f"no frame of version {version}")


def seen_modes(frames: Any) -> set[tuple[bool, ...]]:
    return {tuple(row) for row in frames["modes"].reshape(-1, 3).tolist()}


@pytest.mark.parametrize("way", ALL)
def test_eval_and_train_reach_workers(way: Way) -> None:
    policy = shows()
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        assert seen_modes(next_of_version(collector, 0)) == {(True, True, True)}
        policy.eval()
        collector.update_policy_weights_(wait=True)
        assert seen_modes(next_of_version(collector, 1)) == {(False, False, False)}
        policy.module.body.train()  # one submodule alone
        collector.update_policy_weights_(wait=True)
        assert seen_modes(next_of_version(collector, 2)) == {(False, True, False)}
        policy.train()
        collector.update_policy_weights_(policy, wait=True)
        assert seen_modes(next_of_version(collector, 3)) == {(True, True, True)}


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("form", ["none", "module", "state dict", "nested dicts"])
def test_extra_state_reaches_workers(way: Way, form: str) -> None:
    policy, other = shows(), shows()
    source = policy if form == "none" else other
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        # Values of several sizes and types: a number, a large list, a tensor.
        for version, gain in enumerate((2.0, [1.0] * 5000, torch.full((3,), 5.0)), 1):
            source.module.head.gain = gain
            state = source.state_dict()
            nested = {"module": {"head": {"_extra_state": {"gain": gain}}}}
            given = {"none": None, "module": other, "state dict": state, "nested dicts": nested}
            collector.update_policy_weights_(given[form], wait=True)
            frames = next_of_version(collector, version)
            assert frames["gain"].unique().tolist() == [torch.as_tensor(gain).sum().item()]


@pytest.mark.parametrize("way", REMOTE)
def test_changes_of_only_modes_or_extra_state_are_pushed(way: Way) -> None:
    """`update_after_each_batch` pushes only if it finds a change."""
    policy = shows()
    arguments = {"update_after_each_batch": True, "track_policy_version": True}
    with collecting(way, ONE, policy, frames=T, **arguments) as collector:
        collector.next()
        policy.eval()
        while seen_modes(collector.next()) != {(False, False, False)}:
            pass
        policy.module.head.gain = torch.full((2,), 2.0)
        while collector.next()["gain"].unique().tolist() != [4.0]:
            pass


@pytest.mark.processes
def test_an_unchanged_extra_state_is_not_pushed() -> None:
    """Central inference in a process compares the policy with the last update."""
    policy = shows()
    policy.module.head.gain = torch.ones(2)
    arguments = {"inference": "central", "update_after_each_batch": True}
    with collecting(MULTI_ASYNC[2], ONE, policy, frames=T, **arguments) as collector:
        for _ in range(6):
            collector.next()
        assert collector.policy_version == 0


@pytest.mark.parametrize("way", SYNC)
def test_a_replacement_has_modes_and_extra_state(way: Way) -> None:
    policy = shows()
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        collector.next()
        policy.eval()
        policy.module.head.gain = 3.0
        collector.update_policy_weights_()
        policy.train()
        policy.module.head.gain = 0.0
        collector.next()
        pid = collector.stats()["workers"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid))
        central = "inference" in way.arguments  # there the policy is live
        for _ in range(2):
            frames = next_of_version(collector, 1)
            assert seen_modes(frames) == {(central,) * 3}
            assert frames["gain"].unique().tolist() == [0.0 if central else 3.0]


@pytest.mark.parametrize("way", [ALL[0], *SYNC])
def test_a_state_has_modes_and_extra_state(way: Way) -> None:
    policy, fresh = shows(), shows()
    policy.eval()
    policy.module.head.gain = 3.0
    with collecting(way, ONE, policy, frames=T) as collector:
        collector.next()
        state = collector.state_dict()
    assert state["policy"]["module.head._extra_state"] == {"gain": 3.0}
    with collecting(way, ONE, fresh, frames=T) as collector:
        collector.next()
        collector.load_state_dict(state)
        batch = collector.next()
        assert seen_modes(batch) == {(False, False, False)}
        assert batch["gain"].unique().tolist() == [3.0]
        assert (fresh.training, fresh.module.head.gain) == (False, 3.0)


@pytest.mark.parametrize("way", [ALL[0], *marked(MULTI_STACK)])
def test_a_state_with_a_refused_extra_state_changes_nothing(way: Way) -> None:
    policy = shows()
    with collecting(way, lambda w: partial(CountingEnv, w, 100), policy, frames=T) as collector:
        collector.next()
        state = collector.state_dict()
        state["policy"]["module.head._extra_state"] = 3  # not a dict
        state["policy"]["module.body.bias"].fill_(7.0)
        with refused(ValueError, "policy_or_weights") as caught:
            collector.load_state_dict(state)
        assert "module.head._extra_state" in str(caught.value)
        assert policy.module.body.bias != 7.0
        assert collector.stats()["batches"] == 1
        assert collector.next()["observation"][..., 2].max() == 2 * T - 1  # no reset


@pytest.mark.parametrize("way", [pytest.param(MULTI_STACK, marks=pytest.mark.processes)])
def test_added_workers_have_modes_and_extra_state(way: Way) -> None:
    policy = shows()
    with collecting(way, ONE, policy, frames=T) as collector:
        policy.eval()
        policy.module.head.gain = 3.0
        collector.update_policy_weights_()
        collector.next()
        collector.add_collectors([ONE(2)])
        with pytest.warns(UserWarning, match="3 workers"):
            batch = collector.next()
        assert len(batch) == 3
        assert seen_modes(batch) == {(False, False, False)}
        assert batch["gain"].unique().tolist() == [3.0]


@pytest.mark.parametrize("way", SYNC)
def test_a_module_sends_its_modes_but_a_state_dict_does_not(way: Way) -> None:
    """The modes also reach policies that workers built from a factory."""
    learner = shows()
    arguments = {"policy_factory": shows, "track_policy_version": True}
    with collecting(way, ONE, None, frames=T, **arguments) as collector:
        collector.update_policy_weights_(learner.eval(), wait=True)
        assert seen_modes(next_of_version(collector, 1)) == {(False, False, False)}
        collector.update_policy_weights_(learner.train().state_dict(), wait=True)
        assert seen_modes(next_of_version(collector, 2)) == {(False, False, False)}


class Merging(nn.Linear):
    """Merge the adapter into the weight in evaluation mode, as LoRA layers do."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.adapter = nn.Parameter(torch.ones(1))

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.weight.data += -self.adapter if mode else self.adapter
        return super().train(mode)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        weight = self.weight + self.adapter if self.training else self.weight
        return torch.zeros(lead, dtype=torch.int64), weight.sum().expand(lead)


@pytest.mark.processes
def test_the_train_method_of_a_module_is_called() -> None:
    policy = TensorDictModule(Merging(), ["observation"], ["action", "weight"])
    with collecting(MULTI_STACK, ONE, policy, frames=T) as collector:
        expected = collector.next()["weight"]
        for mode in (False, True):
            policy.train(mode)
            collector.update_policy_weights_()
            torch.testing.assert_close(collector.next()["weight"], expected)


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.b.weight = self.a.weight

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        weight = (self.a.weight + self.b.weight).sum()
        return torch.zeros(lead, dtype=torch.int64), weight.expand(lead)


@pytest.mark.parametrize("way", [ALL[0], *SYNC])
def test_tied_parameters_may_have_all_their_names(way: Way) -> None:
    policy = TensorDictModule(Tied(), ["observation"], ["action", "weight"])
    forms: list[Callable[[Any], Any]] = [
        lambda module: module.state_dict(),
        lambda module: TensorDict.from_module(module).data,
        lambda module: {"module.b.weight": module.module.b.weight},
        lambda module: module,
    ]
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        for version, form in enumerate(forms, 1):
            nn.init.constant_(policy.module.a.weight, float(version))
            collector.update_policy_weights_(form(policy), wait=True)
            frames = next_of_version(collector, version)
            assert frames["weight"].unique().tolist() == [2.0 * version]


def test_parameters_tied_after_construction() -> None:
    policy = TensorDictModule(Tied(), ["observation"], ["action", "weight"])
    policy.module.b.weight = nn.Parameter(torch.ones(1, 1))
    with collecting(MULTI_STACK, ONE, policy, frames=T, track_policy_version=True) as collector:
        policy.module.b.weight = policy.module.a.weight
        nn.init.constant_(policy.module.a.weight, 3.0)
        collector.update_policy_weights_(wait=True)
        assert next_of_version(collector, 1)["weight"].unique().tolist() == [6.0]


def test_parameters_untied_after_construction() -> None:
    policy = TensorDictModule(Tied(), ["observation"], ["action", "weight"])
    with collecting(MULTI_STACK, ONE, policy, frames=T) as collector:
        policy.module.b.weight = nn.Parameter(torch.ones(1, 1))
        with refused(ValueError, "policy_or_weights") as caught:
            collector.update_policy_weights_()
    assert "module.b.weight" in str(caught.value)


class Scaled(nn.Module):
    """A module with a constant buffer that torch cannot write into."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.tensor([2.0]).expand(3))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        return torch.zeros(lead, dtype=torch.int64), (self.scale + self.shift).expand(*lead, 3)


@pytest.mark.parametrize("way", [ALL[0], *marked(MULTI_STACK)])
def test_a_read_only_buffer_may_remain_unchanged(way: Way) -> None:
    policy = TensorDictModule(Scaled(), ["observation"], ["action", "scale"])
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        nn.init.constant_(policy.module.shift, 1.0)
        collector.update_policy_weights_()
        assert next_of_version(collector, 1)["scale"].unique().tolist() == [3.0]


class Mixed(nn.Module):
    """A module with a sparse buffer, which torch cannot compare."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(2).to_sparse())

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        diagonal = (self.mix @ torch.ones(2, 1)).flatten()
        return torch.zeros(lead, dtype=torch.int64), diagonal.expand(*lead, 2)


def test_a_policy_in_process_may_have_sparse_buffers() -> None:
    policy = TensorDictModule(Mixed(), ["observation"], ["action", "diagonal"])
    with collecting(IN_PROCESS, ONE, policy, frames=T) as collector:
        assert collector.next()["diagonal"].unique().tolist() == [1.0]


def no_pickle(policy: Any) -> Any:
    policy.module.head.gain = threading.Lock()
    return policy.state_dict()


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no pickle": (no_pickle, TypeError, "module.head._extra_state"),
    "unknown module": (lambda _: {"other._extra_state": 1}, ValueError, "other._extra_state"),
    "no setter": (lambda _: {"module.body._extra_state": 1}, ValueError, "body._extra_state"),
    "no tensor": (lambda _: {"module": {"body": {"bias": 1}}}, TypeError, "module.body.bias"),
    "no values": (
        lambda _: {"module.body.bias": torch.zeros(1, device="meta")},
        ValueError,
        "module.body.bias",
    ),
    "no values in a module": (lambda policy: policy.to("meta"), ValueError, "module.body.weight"),
    "sparse": (
        lambda _: {"module.body.bias": torch.ones(1).to_sparse()},
        ValueError,
        "module.body.bias",
    ),
}


@pytest.mark.parametrize("way", [ALL[0], *marked(MULTI_STACK)])
def test_a_value_that_cannot_be_sent_is_refused_by_its_name(way: Way) -> None:
    policy = shows()
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        for make, error, name in REFUSED.values():
            with refused(error, "policy_or_weights") as caught:
                collector.update_policy_weights_(make(shows()))
            assert name in str(caught.value)
        assert collector.policy_version == 0
        assert seen_modes(next_of_version(collector, 0)) == {(True, True, True)}


@pytest.mark.parametrize(
    "backend", ["thread", pytest.param("process", marks=pytest.mark.processes)]
)
def test_an_evaluator_takes_extra_state_and_stays_in_evaluation_mode(backend: str) -> None:
    policy, seen = shows(), []

    def look(batch: Any) -> dict[str, float]:
        seen.append(seen_modes(batch[batch["collector", "mask"]]))
        return {"gain": batch["gain"].max().item()}

    with Evaluator(ONE(0), policy, num_trajectories=1, backend=backend, metrics_fn=look) as own:
        for gain, weights in ((2.0, None), (3.0, policy)):
            policy.module.head.gain = gain
            assert own.evaluate(weights)["eval/gain"] == gain
    assert seen == [{(False, False, False)}] * 2


def test_an_extra_state_that_no_module_takes_is_not_part_of_the_weights() -> None:
    class Tells(nn.Linear):
        def get_extra_state(self) -> Any:
            return 3

    env = partial(gymnasium.make, "CartPole-v1")
    policy = TensorDictModule(nn.Sequential(Tells(4, 2), Largest()), ["observation"], ["action"])
    with SyncDataCollector(env, policy, frames_per_batch=T) as collector:
        collector.next()
        collector.load_state_dict(collector.state_dict())


@pytest.mark.processes
def test_an_async_batched_collector_follows_the_modes() -> None:
    policy = shows()
    env = partial(gymnasium.make, "CartPole-v1")
    with AsyncBatchedCollector([env] * 2, policy=policy, frames_per_batch=T) as collector:
        batches = iter(collector)
        next(batches)
        policy.module.head.gain = 2.0
        policy.eval()
        while True:
            batch = next(batches)
            if seen_modes(batch) == {(False, False, False)}:
                break
        assert batch["gain"].unique().tolist() == [2.0]
