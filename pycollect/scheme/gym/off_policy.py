"""An epsilon-greedy algorithm, and a storage of transitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycollect.scheme.gym.on_policy import AlgorithmBase
from pycollect.scheme.names import ACT, DONE2, INFO, OBS, OBS2, REW
from pycollect.scheme.protocols import StorageFactory, Tree


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
