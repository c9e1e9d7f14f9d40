"""Environments and policies of the benchmarks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict.nn import TensorDictModule
from torch import nn

FRAME_BYTES = 4 * 84 * 84


class FreeFrames(gymnasium.Env[Any, Any]):
    """Show four prepared frames of 4x84x84 bytes in turn; episodes have 1000 steps."""

    def __init__(self) -> None:
        """Draw the four frames."""
        self.observation_space = Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        frames = np.random.default_rng(0).integers(0, 256, (4, 4, 84, 84), dtype=np.uint8)
        self.frames = list(frames)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._steps = 0
        return self.frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self._steps += 1
        return self.frames[self._steps & 3], 1.0, False, self._steps == 1000, {}


class Still(nn.Module):
    """A policy that ignores the frame."""

    def __init__(self) -> None:
        """Make one parameter, so that weights can be sent."""
        super().__init__()
        self.action = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """The same action for every frame."""
        return self.action.expand(*observation.shape[:-3], 1).clone()


class NatureCNN(nn.Module):
    """The network of Mnih et al., "Human-level control through deep reinforcement learning",
    Nature 518 (2015), on frames of 4x84x84 bytes.
    """

    def __init__(self, outputs: int) -> None:
        """Make three convolutions, a hidden layer of 512 and the output layer."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, outputs),
        )
        self.outputs = outputs

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """[*lead, 4, 84, 84] uint8 to [*lead, outputs] float32."""
        lead = observation.shape[:-3]
        result: torch.Tensor = self.layers(observation.reshape(-1, 4, 84, 84).float() / 255)
        return result.reshape(*lead, self.outputs)


def nature_policy() -> TensorDictModule:
    """The network with one action in (-1, 1)."""
    net = nn.Sequential(NatureCNN(1), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
