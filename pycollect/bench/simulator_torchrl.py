"""The batched simulator as an environment of TorchRL."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from pycollect.bench.simulator import PointMasses


class PointMassesEnv(EnvBase):  # type: ignore[misc]
    """`PointMasses` as TorchRL's users write a batched environment.

    Args:
        envs: P.
        device: Device of all tensors.
    """

    def __init__(self, envs: int, device: torch.device | str) -> None:
        """Make the environments and their specs."""
        super().__init__(device=device, batch_size=[envs])
        self._env = PointMasses(envs, device)
        spaces = self._env.single_observation_space, self._env.single_action_space
        shapes = [(envs, *(space.shape or ())) for space in spaces]
        self.observation_spec = Composite(
            observation=Unbounded(shapes[0], device=device), shape=(envs,)
        )
        self.action_spec = Bounded(-1, 1, shapes[1], device=device)
        self.reward_spec = Unbounded((envs, 1), device=device)
        self._following = torch.zeros(shapes[0], device=device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        # A partial reset shows what the simulator has reset already.
        partial = tensordict is not None and "_reset" in tensordict
        observation = self._following if partial else self._env.reset()[0]
        flags = torch.zeros(*self.batch_size, 1, dtype=torch.bool, device=self.device)
        return TensorDict(
            {"observation": observation, "done": flags, "terminated": flags.clone()},
            self.batch_size,
            device=self.device,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._following, reward, terminated, truncated, info = self._env.step(
            tensordict.get("action")
        )
        return TensorDict(
            {
                "observation": info["final_obs"],
                "reward": reward.unsqueeze(-1),
                "done": (terminated | truncated).unsqueeze(-1),
                "terminated": terminated.unsqueeze(-1),
            },
            self.batch_size,
            device=self.device,
        )

    def _set_seed(self, seed: int | None) -> None:
        """The simulator draws nothing."""
