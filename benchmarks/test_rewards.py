"""Vectors of rewards: MO-Gymnasium's deep sea treasure, two rewards per frame."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.race import Side
from pycollect.bench.sides import ours, read, read_tensors, torchrls

STEPS = 1000
PEER = "TorchRL's wrapper and collector"


def make() -> gymnasium.Env:
    """Return the environment."""
    import mo_gymnasium

    return mo_gymnasium.make("deep-sea-treasure-v0")


def wrapped() -> Any:
    """Return the environment in TorchRL's wrapper."""
    from torchrl.envs import MOGymWrapper

    return MOGymWrapper(make(), categorical_action_encoding=True)


class Choice(nn.Module):
    """A linear layer, and the best of four actions."""

    def __init__(self) -> None:
        """Create the layer."""
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 4)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the action for a position."""
        return self.layer(observation.float()).argmax(-1)


def policy() -> TensorDictModule:
    """Return the policy."""
    return TensorDictModule(Choice(), in_keys=["observation"], out_keys=["action"])


def plain_loop() -> Iterator[int]:
    """Run a loop by hand with preallocated arrays."""
    env, choose = make(), Choice()
    observations = np.empty((2, STEPS, 2), np.int32)
    actions, flags = np.empty(STEPS, np.int64), np.empty((2, STEPS), bool)
    rewards = np.empty((STEPS, 2), np.float32)
    shown, _ = env.reset(seed=0)
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                observations[0, t] = shown
                actions[t] = choose(torch.from_numpy(observations[0, t])).numpy()
                shown, rewards[t], flags[0, t], flags[1, t], _ = env.step(actions[t])
                observations[1, t] = shown
                if flags[0, t] or flags[1, t]:
                    shown, _ = env.reset()
        read_tensors(*map(torch.from_numpy, (observations, actions, rewards)))
        yield STEPS


def test_rewards(compare: Callable[..., None]) -> None:
    """Compare with a loop by hand and with TorchRL's collector."""
    pytest.importorskip("mo_gymnasium")
    work = {"collector": "SyncDataCollector", "policy": policy, "frames_per_batch": STEPS}
    compare(
        f"two rewards: deep-sea-treasure-v0, linear policy, in process, {STEPS} frames",
        [
            Side("pycollect", ours, {**work, "env": make, "read": read}),
            Side("plain loop", plain_loop),
            Side(PEER, torchrls, {**work, "env": wrapped, "read": read}, needs="torchrl"),
        ],
        frame_bytes=2 * 2 * 4 + 8 + 2 * 4,
        wanted={"plain loop": 0.9, PEER: 5.0},
    )
