"""State of TorchRL's policies between calls; `test_programs.py` compares their frames."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import pycollect

pytest.importorskip("torchrl")

from program_envs import ENVS
from program_policies import POLICIES
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

FRAMES = 60


def collector_of(collector_class: Any, env: str, policy: Any, **kwargs: Any) -> Any:
    pair = ENVS[env]
    entry = pair.theirs(policy)() if collector_class is Collector else pair.ours(policy)
    return collector_class(
        entry, policy, frames_per_batch=FRAMES, total_frames=3 * FRAMES, **kwargs
    )


def test_random_frames_before_a_policy_with_states() -> None:
    with collector_of(
        pycollect.Collector, "Pendulum, primed", POLICIES["GRU"](), init_random_frames=FRAMES
    ) as collector:
        td, following = next(collector), next(collector)
    assert (td["next", "recurrent_state"] == 0).all()
    assert (following["recurrent_state"][0] == 0).all()
    assert (following["next", "recurrent_state"] != 0).any(-1).all()


@pytest.mark.parametrize("env", ["Pendulum", "Pendulum, InitTracker"])
def test_correlated_noise_restarts_with_each_trajectory(env: str) -> None:
    """The noise module keeps its state under keys with "_"; both libraries provide `is_init`."""
    collector = collector_of(
        pycollect.Collector, env, POLICIES["correlated noise"](), max_frames_per_traj=20
    )
    with collector:
        td = next(collector)
    begins = torch.arange(FRAMES) % 20 == 0
    assert torch.equal(td["is_init"].squeeze(-1), begins)
    assert td.get("_ou_prev_noise", None) is None


def test_private_entries_for_the_next_call_are_not_delivered() -> None:
    def count(td: TensorDictBase) -> TensorDictBase:
        calls = td.get("_calls", torch.zeros(())) + 1
        td["_calls"], td["seen"] = calls, calls.clone()
        return td.set("action", torch.zeros(1))

    with collector_of(pycollect.Collector, "Pendulum", count) as collector:
        for _ in range(2):
            collector.set_seed(1)  # the next batch is the first of a new stream
            td = next(collector)
            assert td["seen"].tolist() == list(range(1, FRAMES + 1))
            assert td.get("_calls", None) is None
        assert next(collector)["seen"].tolist() == list(range(FRAMES + 1, 2 * FRAMES + 1))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool) -> None:
    def make_policy() -> TensorDictModule:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten(-2))
        policy = TensorDictModule(
            nn.Sequential(Row(net), nn.Linear(3, 1), nn.Tanh()), ["observation"], ["action"]
        )
        return policy.train(training)

    their_policy, our_policy = make_policy(), make_policy()
    theirs = list(collector_of(Collector, "Pendulum", their_policy))
    ours = list(collector_of(pycollect.Collector, "Pendulum", our_policy))
    steps = 3 * FRAMES if training else 0
    assert our_policy.state_dict()["module.0.net.1.num_batches_tracked"] == steps
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert our_batch["action"].shape == their_batch["action"].shape
        if not training:  # TorchRL counts the detection of outputs as a step
            torch.testing.assert_close(
                our_batch["action"], their_batch["action"], rtol=0, atol=1e-5
            )


pendulum = partial(GymEnv, "Pendulum-v1")


@pytest.mark.parametrize("made_by", ["policy", "policy_factory"])
def test_transforms_that_a_policy_requires_are_appended(made_by: str) -> None:
    """The environment shows them, once, and the frames are TorchRL's."""
    batches = []
    for cls in (Collector, pycollect.Collector):
        make = POLICIES["GRU"]
        given = {made_by: make() if made_by == "policy" else make}
        env = pendulum()
        assert "is_init" not in env.full_observation_spec.keys(True, True)
        torch.manual_seed(0)
        collector = cls(env, **given, frames_per_batch=4, auto_register_policy_transforms=True)
        keys = list(collector.env.full_observation_spec.keys(True, True))
        assert {"is_init", "recurrent_state"} <= set(keys)
        assert all(own.parent is not None for own in collector.env.transform)
        batches.append(next(iter(collector)))
        collector.shutdown()
    ours, theirs = (set(td.keys(True, True)) for td in reversed(batches))
    assert ours == theirs
    env = SerialEnv(2, lambda: TransformedEnv(pendulum(), InitTracker()))
    with pycollect.Collector(
        env, POLICIES["GRU"](), frames_per_batch=4, auto_register_policy_transforms=True
    ) as collector:
        keys = list(collector.env.full_observation_spec.keys(True, True))
        assert keys.count("is_init") == 1
        assert "recurrent_state" in keys
    with pycollect.Collector(pendulum(), POLICIES["GRU"](), frames_per_batch=4) as collector:
        assert "is_init" not in collector.env.full_observation_spec.keys(True, True)


class Row(nn.Module):
    """A net for batches, called with one row."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation.unsqueeze(0)).squeeze(0)
