"""An on-policy and an off-policy algorithm, with their actors and storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from pycollect.scheme.names import ACT, DONE, DONE2, INFO, LOGP, OBS, OBS2, REW, VAL, valid_rows
from pycollect.scheme.protocols import ActorFactory, AlgorithmFactory, StorageFactory, Tree


class _Actor(nn.Module):
    """Base of both actors: they take single-tensor observations and have no memory."""

    @classmethod
    def create_factory(
        cls, observation_space: spaces.Box, action_space: spaces.Space[Any], hidden: int = 64
    ) -> ActorFactory:
        """Return a function that makes an actor on a device; arguments as in the class."""
        return lambda device: cls(observation_space, action_space, hidden).to(device)

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
        action_space: Discrete from 0 on, or a Box of one dimension.
        hidden: Width of the two hidden layers (default: 64).

    Raises:
        ValueError: A space has another type.
    """

    _low: Tensor | None
    _high: Tensor | None

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Space[Any], hidden: int = 64
    ) -> None:
        super().__init__()
        inputs = _size(observation_space)
        low = high = None
        if isinstance(action_space, spaces.Discrete) and action_space.start == 0:
            outputs, self.log_std = int(action_space.n), None
        elif isinstance(action_space, spaces.Box) and len(action_space.shape) == 1:
            outputs = action_space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(outputs))
            low, high = torch.from_numpy(action_space.low), torch.from_numpy(action_space.high)
        else:
            raise ValueError(
                "action_space: expected Discrete from 0 on or a Box of one dimension, got "
                f"{action_space}"
            )
        self.register_buffer("_low", low)
        self.register_buffer("_high", high)
        self.policy = _layers(inputs, hidden, outputs, 0.01)
        self.critic = _layers(inputs, hidden, 1, 1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits or means ``[N, A]`` and values ``[N]`` for observations ``[N, ...]``."""
        flat = obs.reshape(len(obs), -1).float()
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
        action_space: Discrete from 0 on.
        hidden: Width of the two hidden layers (default: 64).

    Raises:
        ValueError: A space has another type.
    """

    def __init__(
        self, observation_space: spaces.Box, action_space: spaces.Discrete, hidden: int = 64
    ) -> None:
        super().__init__()
        if not isinstance(action_space, spaces.Discrete) or action_space.start != 0:
            raise ValueError(f"action_space: expected Discrete from 0 on, got {action_space}")
        self.values = _layers(_size(observation_space), hidden, int(action_space.n), 1.0)

    def forward(self, obs: Tensor) -> Tensor:
        """Return values ``[N, A]`` for observations ``[N, ...]``."""
        values: Tensor = self.values(obs.reshape(len(obs), -1).float())
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


@dataclass
class AlgorithmBase:
    """Base of the algorithms; see :class:`pycollect.scheme.protocols.Algorithm`."""

    start_steps: int = 0
    update_every: int | None = None
    num_epochs: int = 1
    num_mini_batch: int = 1
    test_every: int = 1
    num_test_episodes: int = 0
    actor: Any = None

    @classmethod
    def create_factory(cls, **settings: Any) -> AlgorithmFactory:
        """Return a function that makes an algorithm; `settings` are its other attributes."""
        cls(**settings)  # raises for a wrong name now
        return lambda device, actor, envs: cls(actor=actor, **settings)

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the algorithm."""
        setattr(self, parameter_name, new_parameter_value)


@dataclass
class OnPolicy(AlgorithmBase):
    """Sample actions, and store their log-probabilities and the state values.

    Attributes:
        actor: An ActorCritic.
        gamma: Discount factor (default: 0.99).
    """

    gamma: float = 0.99

    def acting_step(
        self, obs: Tree, rhs: Tree, done: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tree, dict[str, Any]]:
        """Return actions ``[P, ...]`` (Discrete: ``[P, 1]``), clipped ones, hidden states, value.

        The last item is a dict with the state values and the log-probabilities.
        """
        with torch.no_grad():
            parameters, value = self.actor(obs)
            distribution = self.actor.distribution(parameters)
            action = distribution.mode if deterministic else distribution.sample()
            others = {VAL: value.unsqueeze(-1), LOGP: distribution.log_prob(action).unsqueeze(-1)}
        action = action.unsqueeze(-1) if action.ndim == 1 else action
        return action, self.actor.clipped(action), rhs, others


class RolloutStorage:
    """T steps of P environments, and the state after the last step.

    Observations and done flags have rows 0 to T; other entries have rows 0 to T - 1 and a row of
    zeros. If an episode was truncated, ``gamma`` times the value of its last observation is added
    to the reward, as in Stable-Baselines3. The next row belongs to another episode.

    Attributes:
        max_size: Number of steps, T.

    Args:
        size: Number of steps, T.
        device: Device of the stored data.
        actor: An ActorCritic.
        algo: An OnPolicy.
    """

    def __init__(self, size: int, device: torch.device, actor: Any, algo: Any) -> None:
        self.max_size = size
        self.actor, self.algo = actor, algo
        self._device = device
        self._data: dict[str, Tensor] = {}
        self._step = 0

    @classmethod
    def create_factory(cls, size: int) -> StorageFactory:
        """Return a function that makes a storage for an actor and an algorithm."""
        return lambda device, actor, algo, envs: cls(size, device, actor, algo)

    def insert_transition(self, sample: dict[str, Any]) -> None:
        """Copy one step; after `max_size` steps, start again from the current state."""
        if not self._data:
            for name in (OBS, DONE, ACT, REW, VAL, LOGP):
                rows = (self.max_size + 1, *sample[name].shape)
                self._data[name] = torch.zeros(rows, dtype=sample[name].dtype, device=self._device)
        step, data = self._step % self.max_size, self._data
        for name in (OBS, DONE, ACT, VAL, LOGP):
            data[name][step].copy_(sample[name])
        data[REW][step].copy_(self._reward(sample))
        data[OBS][step + 1].copy_(sample[OBS2])
        data[DONE][step + 1].copy_(sample[DONE2])
        self._step += 1

    def _reward(self, sample: dict[str, Any]) -> Tensor:
        reward: Tensor = sample[REW]
        for place, info in enumerate(sample[INFO]):
            if info.get("terminated") is False:
                with torch.no_grad():
                    _, value = self.actor(info["final_observation"].unsqueeze(0))
                reward = reward.clone()
                reward[place] += self.algo.gamma * value
        return reward

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> dict[str, Any]:
        """Return tensors ``[T + 1, P, ...]`` by name, which may be the storage's own memory.

        If fewer than T steps are stored, they are copies of the valid rows.
        """
        data = valid_rows(self._data, self._step)
        return {k: v.cpu() if data_to_cpu else v for k, v in data.items()}

    def reset(self) -> None:
        """Start again at the first row."""
        self._step = 0

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the storage; a new `max_size` empties it."""
        setattr(self, parameter_name, new_parameter_value)
        self._data, self._step = {}, 0


@dataclass
class OffPolicy(AlgorithmBase):
    """Take the action with the highest value, or a random one with probability epsilon.

    Attributes:
        actor: A QNetwork.
        epsilon: Probability of a random action; change it by `update_algorithm_parameter` (default:
            0.1).
    """

    epsilon: float = 0.1

    def acting_step(
        self, obs: Tree, rhs: Tree, done: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tree, dict[str, Any]]:
        """Return actions ``[P, 1]`` twice, the hidden states, and no other entries."""
        with torch.no_grad():
            values = self.actor(obs)
        action = values.argmax(-1, keepdim=True)
        if not deterministic:
            random = torch.randint_like(action, values.shape[-1])
            chance = torch.rand(action.shape, device=action.device)
            action = torch.where(chance < self.epsilon, random, action)
        return action, action, rhs, {}


class TransitionStorage:
    """Transitions of P environments since the last rollout, ready for a replay buffer.

    The successor of an episode's last step is the final observation. The done flag is set only if
    the episode terminated, not if it was truncated.

    Attributes:
        max_size: Maximum number of steps.

    Args:
        size: Maximum number of steps; storing more is an error.
    """

    def __init__(self, size: int) -> None:
        self.max_size = size
        self._steps: list[dict[str, Tensor]] = []

    @classmethod
    def create_factory(cls, size: int) -> StorageFactory:
        """Return a function that makes a storage."""
        return lambda device, actor, algo, envs: cls(size)

    def insert_transition(self, sample: dict[str, Any]) -> None:
        """Store one step of all environments.

        Raises:
            RuntimeError: The storage is full.
        """
        if len(self._steps) == self.max_size:
            raise RuntimeError(f"size: all {self.max_size} steps are used; pass a larger size")
        after, done = sample[OBS2], sample[DONE2]
        for place, info in enumerate(sample[INFO]):
            if "episode" in info:
                after, done = after.clone(), done.clone()
                after[place] = info["final_observation"]
                done[place] = float(info["terminated"])
        self._steps.append(
            {OBS: sample[OBS], ACT: sample[ACT], REW: sample[REW], OBS2: after, DONE2: done}
        )

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> dict[str, Any]:
        """Return copies as tensors ``[steps, P, ...]`` by name."""
        if not self._steps:
            return {}
        stacked = {k: torch.stack([step[k] for step in self._steps]) for k in self._steps[0]}
        return {k: v.cpu() if data_to_cpu else v for k, v in stacked.items()}

    def reset(self) -> None:
        """Delete all stored data."""
        self._steps = []

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the storage."""
        setattr(self, parameter_name, new_parameter_value)
