"""Setting torch's default device, as many programs do for a GPU, does not change the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import CENTRAL, IN_PROCESS, MULTI_STACK, Way, assert_equal, collecting
from echo_envs import ENTRIES
from state_support import seeded
from torch import nn

from pycollect import MultiStep, SyncDataCollector, split_trajectories

FRAMES = 3 * 7


@contextmanager
def elsewhere() -> Iterator[None]:
    """Set the default device to "meta": a tensor created there by mistake has no data."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def check(collect: Callable[[], list[Any]]) -> None:
    expected = collect()
    with elsewhere():
        collected = collect()
    assert len(collected) == len(expected) > 0
    for own, other in zip(collected, expected, strict=True):
        assert_equal(own, other)


@pytest.mark.parametrize(
    "arguments",
    [
        {"split_trajs": True},
        {"split_trajs": True, "compact_obs": True},
        {"trajs_per_batch": 2},
        {"postproc": MultiStep(0.9, 3)},
        {"observation_dtype": torch.float32, "observation_scale": 0.5},
        {"track_policy_version": True, "max_frames_per_traj": 2, "set_truncated": True},
    ],
    ids=lambda arguments: ", ".join(arguments),
)
def test_batches_of_one_process(arguments: dict[str, Any]) -> None:
    policy, shapes = seeded("GRUCell")

    def collect() -> list[Any]:
        given = {**arguments, "policy_state": shapes}
        with collecting(IN_PROCESS, ENTRIES["list"], policy, frames=FRAMES, **given) as collector:
            batches = [collector.next() for _ in range(2)]
            collector.load_state_dict(collector.state_dict())
            return batches

    check(collect)


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize("way", [MULTI_STACK, CENTRAL], ids=lambda way: way.name)
def test_batches_of_processes(way: Way) -> None:
    policy, shapes = seeded("GRUCell")

    def collect() -> list[Any]:
        with collecting(
            way, ENTRIES["list"], policy, frames=FRAMES, policy_state=shapes
        ) as collector:
            collector.update_policy_weights_()
            return [collector.next() for _ in range(2)]

    check(collect)


def test_layers_that_are_run_without_their_modules() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            action: torch.Tensor = self.net(observation).argmax(-1)
            return action

    policy = Greedy()

    def collect() -> list[Any]:
        make = [lambda: gymnasium.make("CartPole-v1")] * 3
        with SyncDataCollector(make, policy, frames_per_batch=30, total_frames=60) as collector:
            collector.set_seed(3)
            return [split_trajectories(batch) for batch in collector]

    check(collect)
