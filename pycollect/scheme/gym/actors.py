"""Small actors with two hidden layers: a policy with a critic, and a Q-network."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from pycollect.scheme.protocols import ActorFactory, Tree


class _Actor(nn.Module):
    """Base of both actors: they take single-tensor observations and have no memory."""

    def actor_initial_states(self, obs: Tree) -> tuple[Tree, Tree, Tensor]:
        """Return the observations, empty hidden states, and done flags of 0."""
        assert isinstance(obs, Tensor)
        nothing = torch.zeros(len(obs), 1, device=obs.device)
        return obs, {}, nothing

    def try_load_from_checkpoint(self) -> None:
        """Do nothing: these actors have no checkpoints."""


class ActorCritic(_Actor):
    """An action distribution and a state value.

    Args:
        observation_space: A Box.
        action_space: Discrete, or a Box of one dimension.
        hidden: Width of the two hidden layers (default: 64).

    Raises:
        ValueError: A space has another type.
    """

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Space[Any], hidden: int = 64
    ) -> None:
        super().__init__()
        inputs = _size(observation_space)
        self._low: Tensor | None = None
        self._high: Tensor | None = None
        if isinstance(action_space, spaces.Discrete):
            outputs, self.log_std = int(action_space.n), None
        elif isinstance(action_space, spaces.Box) and len(action_space.shape) == 1:
            outputs = action_space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(outputs))
            self.register_buffer("_low", torch.from_numpy(action_space.low))
            self.register_buffer("_high", torch.from_numpy(action_space.high))
        else:
            raise ValueError(
                f"action_space: expected Discrete or a Box of one dimension, got {action_space}"
            )
        self.policy = _layers(inputs, hidden, outputs, 0.01)
        self.critic = _layers(inputs, hidden, 1, 1.0)

    @classmethod
    def create_factory(
        cls, observation_space: spaces.Box, action_space: spaces.Space[Any], hidden: int = 64
    ) -> ActorFactory:
        """Return a function that makes an actor on a device; arguments as in the class."""
        return lambda device: cls(observation_space, action_space, hidden).to(device)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits or means ``[N, A]`` and values ``[N]`` for observations ``[N, ...]``."""
        flat = obs.flatten(1).float()
        return self.policy(flat), self.critic(flat).squeeze(-1)

    def distribution(self, parameters: Tensor) -> Distribution:
        """Return the action distribution with these logits or means ``[N, A]``."""
        if self.log_std is None:
            return Categorical(logits=parameters, validate_args=False)
        spread = Normal(parameters, self.log_std.exp(), validate_args=False)
        return Independent(spread, 1, validate_args=False)

    def clipped(self, action: Tensor) -> Tensor:
        """Return the action clipped to the action space."""
        return action if self._low is None else action.clamp(self._low, self._high)


class QNetwork(_Actor):
    """The values of all actions of a Discrete space.

    Args:
        observation_space: A Box.
        action_space: Discrete.
        hidden: Width of the two hidden layers (default: 64).

    Raises:
        ValueError: The observation space has another type.
    """

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Discrete, hidden: int = 64
    ) -> None:
        super().__init__()
        self.values = _layers(_size(observation_space), hidden, int(action_space.n), 1.0)

    @classmethod
    def create_factory(
        cls, observation_space: spaces.Box, action_space: spaces.Discrete, hidden: int = 64
    ) -> ActorFactory:
        """Return a function that makes an actor on a device; arguments as in the class."""
        return lambda device: cls(observation_space, action_space, hidden).to(device)

    def forward(self, obs: Tensor) -> Tensor:
        """Return values ``[N, A]`` for observations ``[N, ...]``."""
        values: Tensor = self.values(obs.flatten(1).float())
        return values


def _size(space: spaces.Box) -> int:
    if not isinstance(space, spaces.Box):
        raise ValueError(f"observation_space: expected a Box, got {space}")
    return int(torch.Size(space.shape).numel())


def _layers(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    last = nn.Linear(hidden, outputs)
    net = nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), last)
    )
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain if layer is last else 2**0.5)
            nn.init.zeros_(layer.bias)
    return net
