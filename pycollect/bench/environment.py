"""What the whole collectors of the benchmark step: frames that cost nothing to make."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

FRAME_BYTES = 4 * 84 * 84


class FreeFrames(gymnasium.Env[Any, Any]):
    """Frames of 4x84x84 bytes that are there already; episodes have 1000 steps."""

    def __init__(self) -> None:
        """Draw the four frames that are shown in turn."""
        self.observation_space = Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        frames = np.random.default_rng(0).integers(0, 256, (4, 4, 84, 84), dtype=np.uint8)
        self._frames = list(frames)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._steps = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self._steps += 1
        return self._frames[self._steps & 3], 1.0, False, self._steps == 1000, {}


class Still(nn.Module):
    """A policy that is given the frame and does nothing with it."""

    def __init__(self) -> None:
        """Make the one parameter, so that there are weights to send."""
        super().__init__()
        self.action = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """The same action for every frame."""
        return self.action.expand(*observation.shape[:-3], 1).clone()
