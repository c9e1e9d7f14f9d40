"""What a CWorker asks of the components that it is given.

PyTorchRL's actors, algorithms, storages and vector environments have these methods, and so do those
of :mod:`pycollect.scheme.gym`. P are the environments of one worker. Observations and hidden states
are tensors ``[P, ...]``, or dicts of such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Tree = Tensor | dict[str, Tensor]
"""A tensor, or a dict of tensors."""

Data = dict[str, Any]
"""What a storage gives away: tensors or arrays ``[steps, P, ...]`` by name, or dicts of such."""


class VecEnv(Protocol):
    """P environments that reset themselves when an episode ends."""

    @property
    def num_envs(self) -> int:
        """P."""

    def reset(self) -> Tree:
        """Reset all; observations ``[P, ...]``."""

    def step(self, action: Tensor) -> tuple[Tree, Tensor, Tensor, Any]:
        """Step all by actions ``[P, ...]``.

        Returns:
            Observations ``[P, ...]``, the first of the next episode where one has ended; rewards
            ``[P, 1]``; done flags ``[P, 1]``, 1.0 where an episode has ended; infos, one per
            environment, in which ``"episode"`` of an episode's last one holds numbers, its return
            as ``"r"``. Or one dict of arrays ``[P]``.
        """

    def close(self) -> Any:
        """Free what they hold."""


class Actor(Protocol):
    """A module that acts: its parameters and buffers are what weights are."""

    def actor_initial_states(self, obs: Tree) -> tuple[Tree, Tree, Tensor]:
        """First observations as they are, first hidden states, and done flags ``[P, 1]`` of 0."""

    def try_load_from_checkpoint(self) -> None:
        """Load weights of an earlier run, if it knows of some."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """As of a torch module."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """As of a torch module."""

    def train(self, mode: bool = True) -> Any:
        """As of a torch module."""

    def eval(self) -> Any:
        """As of a torch module."""


class Algorithm(Protocol):
    """How its actor is asked, and how often what is done."""

    @property
    def start_steps(self) -> int:
        """Steps of the vector environment that are stored before the first rollout."""

    @property
    def update_every(self) -> int | None:
        """Steps of the vector environment in one rollout; None: as many as the storage holds."""

    @property
    def num_epochs(self) -> int:
        """How often a rollout is learnt from."""

    @property
    def num_mini_batch(self) -> int:
        """In how many updates each time."""

    @property
    def test_every(self) -> int:
        """Updates between two evaluations."""

    @property
    def num_test_episodes(self) -> int:
        """Episodes in each; 0: there is none."""

    def acting_step(
        self, obs: Tree, rhs: Tree, done: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tree, dict[str, Any]]:
        """Actions, the same clipped to the action space, new hidden states, what else to store."""

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set one of its attributes."""


class Storage(Protocol):
    """Keeps the steps of a rollout."""

    @property
    def max_size(self) -> int:
        """How many steps of the vector environment it holds."""

    def insert_transition(self, sample: dict[str, Any]) -> None:
        """Copy one step of all environments, by PyTorchRL's names of its entries."""

    def get_all_buffer_data(self, data_to_cpu: bool = False) -> Data:
        """All that is stored, which may be its own memory."""

    def reset(self) -> None:
        """Forget it."""

    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set one of its attributes."""


class ActorFactory(Protocol):
    """Makes an actor on a device."""

    def __call__(self, device: torch.device, /) -> Any:
        """Make it."""


class AlgorithmFactory(Protocol):
    """Makes an algorithm for an actor; `envs` is None where a worker does not collect."""

    def __call__(self, device: torch.device, actor: Any, envs: Any, /) -> Any:
        """Make it."""


class StorageFactory(Protocol):
    """Makes a storage; `envs` is None where a worker does not collect."""

    def __call__(self, device: torch.device, actor: Any, algorithm: Any, envs: Any, /) -> Any:
        """Make it."""


class TrainEnvsFactory(Protocol):
    """Makes the environments to collect from, or None."""

    def __call__(self, device: torch.device, index_worker: int, index_parent: int, /) -> Any:
        """Make them."""


class TestEnvsFactory(Protocol):
    """Makes the environments to evaluate in, or None; `mode` is ``"test"``."""

    def __call__(
        self, device: torch.device, index_worker: int, index_parent: int, mode: str, /
    ) -> Any:
        """Make them."""


Infos = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""What environments tell beside a step: one dict each, or one dict of arrays ``[P]``."""
