"""An algorithm that samples from its actor, and a storage of one rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycollect.scheme.names import ACT, DONE, DONE2, INFO, LOGP, OBS, OBS2, REW, VAL
from pycollect.scheme.protocols import AlgorithmFactory, StorageFactory, Tree


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
            others = {
                VAL: value.unsqueeze(-1),
                LOGP: distribution.log_prob(action).unsqueeze(-1),
            }
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
        step, data = self._step, self._data
        for name, source in ((OBS, OBS), (DONE, DONE), (ACT, ACT), (VAL, VAL), (LOGP, LOGP)):
            data[name][step].copy_(sample[source])
        data[REW][step].copy_(self._reward(sample))
        data[OBS][step + 1].copy_(sample[OBS2])
        data[DONE][step + 1].copy_(sample[DONE2])
        self._step = (step + 1) % self.max_size

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
        """Return tensors ``[T + 1, P, ...]`` by name, which may be the storage's own memory."""
        return {k: v.cpu() if data_to_cpu else v for k, v in self._data.items()}

    def reset(self) -> None:
        """Start again at the first row."""
        self._step = 0

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the storage; a new `max_size` empties it."""
        setattr(self, parameter_name, new_parameter_value)
        self._data, self._step = {}, 0
