"""Ways to give a policy, with TorchRL's collector and with ours: the same batches."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDictBase

import pycollect

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    pytest.importorskip("torchrl")
    from policy_kinds import TAKES_TENSORDICTS, TAKES_TENSORS, Make
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
    from torchrl_support import assert_alike, seeded

FRAMES = 12


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


ENVS = {
    "one": pendulum,
    "transformed": lambda: TransformedEnv(pendulum(), RewardSum()),
    "two": lambda: SerialEnv(2, pendulum),
}


def batches(collector_class: Any, make_env: Any, make_policy: Make) -> list[TensorDictBase]:
    """Two of them; whatever draws from torch's global generator draws the same each time."""
    env = seeded(make_env)
    torch.manual_seed(1)
    policy = make_policy(env)
    collector = collector_class(
        env, policy, frames_per_batch=FRAMES, total_frames=2 * FRAMES, max_frames_per_traj=5
    )
    torch.manual_seed(2)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def compare(make_env: Any, make_policy: Make) -> None:
    theirs = batches(Collector, make_env, make_policy)
    assert_alike(batches(pycollect.Collector, make_env, make_policy), theirs)


@pytest.mark.parametrize("env", list(ENVS))
@pytest.mark.parametrize("kind", list(TAKES_TENSORDICTS))
def test_policies_that_take_a_tensordict(kind: str, env: str) -> None:
    compare(ENVS[env], TAKES_TENSORDICTS[kind])


@pytest.mark.parametrize("env", ["one", "two"])
@pytest.mark.parametrize("kind", list(TAKES_TENSORS))
def test_policies_that_take_tensors(kind: str, env: str) -> None:
    compare(ENVS[env], TAKES_TENSORS[kind])


@pytest.mark.parametrize("kind", ["RandomPolicy without a spec", "noise without a spec"])
def test_specs_of_a_gymnasium_env(kind: str) -> None:
    """There is no environment of TorchRL's that has specs; the space tells as much."""
    env = gymnasium.make("Pendulum-v1")
    policy = TAKES_TENSORDICTS[kind](env)
    with pycollect.Collector(env, policy, frames_per_batch=50, total_frames=50) as collector:
        action = next(collector)["action"]
    assert action.shape == (50, 1)
    assert action.abs().max() <= 2
    assert action.unique().numel() > 25
