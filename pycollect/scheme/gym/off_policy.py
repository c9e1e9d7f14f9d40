"""An algorithm that takes the best action but for some, and a storage of transitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycollect.scheme.gym.algorithm import AlgorithmBase
from pycollect.scheme.names import ACT, DONE2, INFO, OBS, OBS2, REW
from pycollect.scheme.protocols import StorageFactory, Tree


@dataclass
class OffPolicy(AlgorithmBase):
    """Takes the action of the highest value, and a random one with a probability.

    Attributes:
        actor: a QNetwork.
        epsilon: that probability; what `update_algorithm_parameter` is for.
    """

    epsilon: float = 0.1

    def acting_step(
        self, obs: Tree, rhs: Tree, done: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tree, dict[str, Any]]:
        """Actions ``[P, 1]``, twice, hidden states, and nothing else."""
        with torch.no_grad():
            values = self.actor(obs)
        action = values.argmax(-1, keepdim=True)
        if not deterministic:
            random = torch.randint_like(action, values.shape[-1])
            chance = torch.rand(action.shape, device=action.device)
            action = torch.where(chance < self.epsilon, random, action)
        return action, action, rhs, {}


class TransitionStorage:
    """The transitions of P environments since the last rollout, ready for a replay buffer.

    The successor of an episode's last step is the observation that ended it, and the done flag is
    set where it terminated, not where it was truncated.

    Attributes:
        max_size: for how many steps there is room.

    Args:
        size: for how many steps there is to be room; more than that is an error.
    """

    def __init__(self, size: int) -> None:
        self.max_size = size
        self._steps: list[dict[str, Tensor]] = []

    @classmethod
    def create_factory(cls, size: int) -> StorageFactory:
        """A function that makes one."""
        return lambda device, actor, algo, envs: cls(size)

    def insert_transition(self, sample: dict[str, Any]) -> None:
        """Keep one step of all environments.

        Raises:
            RuntimeError: there is no room.
        """
        if len(self._steps) == self.max_size:
            raise RuntimeError(f"size: expected room for another step, it is {self.max_size}")
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
        """Tensors ``[steps, P, ...]`` by name, copied."""
        if not self._steps:
            return {}
        stacked = {k: torch.stack([step[k] for step in self._steps]) for k in self._steps[0]}
        return {k: v.cpu() if data_to_cpu else v for k, v in stacked.items()}

    def reset(self) -> None:
        """Forget all."""
        self._steps = []

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set one of its attributes."""
        setattr(self, parameter_name, new_parameter_value)
