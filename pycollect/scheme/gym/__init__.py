"""Small components over Gymnasium for a CWorkerSet, on-policy and off-policy.

Each has ``create_factory``, like PyTorchRL's components. They cover collection; the learning is up
to you, as in ``examples/scheme.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pycollect.checks import check_positive, check_seed
from pycollect.envs.make import make_env_batch
from pycollect.envs.spaces import action_cast
from pycollect.scheme.gym.algorithms import (
    ActorCritic,
    OffPolicy,
    OnPolicy,
    QNetwork,
    RolloutStorage,
    TransitionStorage,
)
from pycollect.scheme.protocols import TrainEnvsFactory, Tree

__all__ = [
    "ActorCritic",
    "GymEnvs",
    "OffPolicy",
    "OnPolicy",
    "QNetwork",
    "RolloutStorage",
    "TransitionStorage",
]


class GymEnvs:
    """P environments that are reset when their episodes end.

    Observations keep their dtypes; a Dict space gives dicts by name. At the end of an episode, the
    info contains ``"episode"`` (its return "r" and length "l"), ``"final_observation"`` (tensors
    ``[...]``) and ``"terminated"`` (``False`` if it was truncated). Other infos are empty.

    Attributes:
        num_envs: Number of environments, P.

    Args:
        entry: A list of callables that return single environments, or of Gymnasium ids; or a vector
            environment or a callable that returns one.
        device: Device of the tensors.
        env_kwargs: Keyword arguments for the callables (default: ``None``).
        seed: Seed of the environments. ``None`` leaves them unseeded (default: ``None``).

    Raises:
        ValueError: The environments have several rewards, or are neither a list nor a vector
            environment whose rows can be reset one by one.
    """

    def __init__(
        self,
        entry: Any,
        device: torch.device,
        env_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self._seed = None if seed is None else check_seed(seed)
        self._env = make_env_batch(entry, env_kwargs)
        spec = self._env.spec
        if spec.reward.shape != (1,):
            self._env.close()
            raise ValueError(
                "entry: expected environments with one reward per step, got "
                f"{spec.reward.shape[0]} from {entry!r}; combine them with a wrapper"
            )
        if spec.skips_after_done or not spec.batch_size or spec.own_flags:
            self._env.close()
            raise ValueError(
                "entry: expected a list of callables, or a Gymnasium vector environment whose rows "
                f"can be reset one by one, got {entry!r}"
            )
        self._device = device
        self.num_envs = spec.num_envs
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, int)

    @classmethod
    def create_factory(
        cls,
        entry: Any,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        seed: int | None = None,
    ) -> TrainEnvsFactory:
        """Return a function that makes the environments, for training and for evaluation.

        Args:
            entry: As in the class; with `num_envs`, an id or a callable that returns a single
                environment.
            env_kwargs: Keyword arguments for the callables (default: ``None``).
            num_envs: Number of environments to make with that callable. Defaults to ``None``:
                `entry` determines it.
            seed: Seed from which each worker's environments get their own seeds. ``None`` leaves
                them unseeded (default: ``None``).
        """
        each = entry if num_envs is None else [entry] * check_positive("num_envs", num_envs)
        root = None if seed is None else check_seed(seed)

        def make(
            device: torch.device, index_worker: int, index_parent: int, mode: str = "train"
        ) -> GymEnvs:
            """Make the environments of one worker."""
            place = (index_parent, index_worker, int(mode == "test"))
            own = None
            if root is not None:
                own = int(np.random.SeedSequence(root, spawn_key=place).generate_state(1)[0])
            return cls(each, device, env_kwargs, own)

        return make

    def reset(self) -> Tree:
        """Reset all environments; return observations ``[P, ...]``."""
        self._returns[:] = 0.0
        self._lengths[:] = 0
        seeds = None
        if self._seed is not None:  # seed only once, so that later episodes differ
            seeds = [self._seed + place for place in range(self._env.num_seeds)]
            self._seed = None
        return self._tensors(self._env.reset(seeds))

    def step(self, action: Tensor) -> tuple[Tree, Tensor, Tensor, list[dict[str, Any]]]:
        """Step all environments; see :meth:`pycollect.scheme.protocols.VecEnv.step`.

        Args:
            action: A single tensor ``[P, ...]``; ``[P, 1]`` is also accepted for a Discrete space.
        """
        (leaf,) = self._env.spec.action
        chosen = action.detach().cpu().numpy().reshape(self.num_envs, *leaf.shape)
        cast = action_cast(leaf, chosen.dtype)
        arrays, reward, terminated, truncated = self._env.step(cast(chosen))
        done = np.logical_or(terminated, truncated)
        obs = self._tensors(arrays)
        self._returns += reward
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            for place in np.flatnonzero(done):
                infos[place] = self._end(obs, int(place), bool(terminated[place]))
            rows = torch.from_numpy(done).to(self._device)

            def merged(new: Tensor, old: Tensor) -> Tensor:
                return torch.where(rows.view(-1, *[1] * (old.ndim - 1)), new, old)

            obs = tree_map(merged, self._tensors(self._env.reset_done(done)), obs)
        return obs, self._column(reward), self._column(done), infos

    def _end(self, obs: Tree, place: int, terminated: bool) -> dict[str, Any]:
        """Return the info of an ended episode."""
        episode = {"r": float(self._returns[place]), "l": int(self._lengths[place])}
        self._returns[place] = self._lengths[place] = 0
        last = tree_map(lambda tensor: tensor[place], obs)
        return {"episode": episode, "final_observation": last, "terminated": terminated}

    def _column(self, values: Any) -> Tensor:
        """Return one number per environment, ``[P, 1]`` float32."""
        column = torch.as_tensor(np.asarray(values, np.float32), device=self._device)
        return column.reshape(self.num_envs, 1)

    def _tensors(self, arrays: Any) -> Tree:
        """Copy arrays to tensors, because environments may overwrite their arrays."""
        leaves = self._env.spec.observation
        if len(leaves) == 1 and len(leaves[0].key) == 1:
            return torch.tensor(np.asarray(arrays), device=self._device)
        values = arrays if len(leaves) > 1 else (arrays,)
        return {
            ".".join(leaf.key): torch.tensor(np.asarray(value), device=self._device)
            for leaf, value in zip(leaves, values, strict=True)
        }

    def close(self) -> None:
        """Close all environments. Idempotent."""
        self._env.close()
