"""The methods that a CWorker needs from its components.

PyTorchRL's actors, algorithms, storages and vector environments have these methods, and so do those
of :mod:`pycollect.scheme.gym`. P is the number of environments of one worker. Observations and
hidden states are tensors ``[P, ...]``, or dicts of such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Tree = Tensor | dict[str, Tensor]
"""A tensor, or a dict of tensors."""

Data = dict[str, Any]
"""Contents of a storage: tensors or arrays ``[steps, P, ...]`` by name, or dicts of these."""


class VecEnv(Protocol):
    """P environments that reset themselves when an episode ends."""

    @property
    def num_envs(self) -> int:
        """Number of environments, P."""

    def reset(self) -> Tree:
        """Reset all environments; return observations ``[P, ...]``."""

    def step(self, action: Tensor) -> tuple[Tree, Tensor, Tensor, Any]:
        """Step all environments with actions ``[P, ...]``.

        Returns:
            A tuple of four items.

            - Observations ``[P, ...]``. After the end of an episode, the first one of the next.
            - Rewards ``[P, 1]``.
            - Done flags ``[P, 1]``, 1.0 if the episode has ended.
            - Infos, one dict per environment. At the end of an episode its ``"episode"`` is a dict
              of numbers, with the return as ``"r"``. Or a single dict of arrays ``[P]``.
        """

    def close(self) -> Any:
        """Close all environments."""


class Actor(Protocol):
    """A module that chooses actions; its parameters and buffers are the weights."""

    def actor_initial_states(self, obs: Tree) -> tuple[Tree, Tree, Tensor]:
        """Return the observations, initial hidden states, and done flags ``[P, 1]`` of 0."""

    def try_load_from_checkpoint(self) -> None:
        """Load the weights of an earlier run, if there is a checkpoint."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the weights, like a torch module."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Load weights, like a torch module."""

    def train(self, mode: bool = True) -> Any:
        """Set training mode, like a torch module."""

    def eval(self) -> Any:
        """Set evaluation mode, like a torch module."""


class Algorithm(Protocol):
    """Chooses actions with its actor, and defines how often to collect, learn and test."""

    @property
    def start_steps(self) -> int:
        """Steps of the vector environment to store before the first rollout."""

    @property
    def update_every(self) -> int | None:
        """Steps of the vector environment in one rollout; ``None`` fills the storage."""

    @property
    def num_epochs(self) -> int:
        """Number of passes over each rollout in training."""

    @property
    def num_mini_batch(self) -> int:
        """Number of updates per pass."""

    @property
    def test_every(self) -> int:
        """Number of updates between two evaluations."""

    @property
    def num_test_episodes(self) -> int:
        """Number of episodes per evaluation; 0 disables it."""

    def acting_step(
        self, obs: Tree, rhs: Tree, done: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tree, dict[str, Any]]:
        """Return actions, the same clipped to the action space, hidden states and extra entries."""

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the algorithm."""


class Storage(Protocol):
    """Stores the steps of a rollout."""

    @property
    def max_size(self) -> int:
        """Maximum number of steps of the vector environment."""

    def insert_transition(self, sample: dict[str, Any]) -> None:
        """Copy one step of all environments, with PyTorchRL's names of its entries."""

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> Data:
        """Return all stored data, which may be the storage's own memory."""

    def reset(self) -> None:
        """Delete all stored data."""

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the storage."""


ActorFactory = Callable[[torch.device], Any]
"""Makes an actor on a device."""

AlgorithmFactory = Callable[[torch.device, Any, Any], Any]
"""Makes an algorithm from device, actor and environments, which may be ``None``."""

StorageFactory = Callable[[torch.device, Any, Any, Any], Any]
"""Makes a storage from device, actor, algorithm and environments, which may be ``None``."""

TrainEnvsFactory = Callable[[torch.device, int, int], Any]
"""Makes environments for collection from device, `index_worker` and `index_parent`, or ``None``."""

TestEnvsFactory = Callable[[torch.device, int, int, str], Any]
"""Makes environments for evaluation from the same and ``"test"``, or ``None``."""

Infos = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Infos of a step: one dict per environment, or one dict of arrays ``[P]``."""
