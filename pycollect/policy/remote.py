"""PolicyNeeds of a worker, and the interfaces of a policy that is called in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pycollect._core import Leaf, RolloutControl
from pycollect.data.cast import ObservationCast
from pycollect.data.extras import Extra, ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import EnvSpec
from pycollect.policy.calling import UNCHANGED, CallOptions
from pycollect.policy.states import PolicyState


@dataclass(frozen=True)
class PolicyNeeds:
    """Requirements of a worker on its policy.

    Attributes:
        env: Environment whose leaves and batch shape the policy must fit.
        policy_state: Shapes for one environment, or first values, of the policy's states by key.
            Needed for states that neither a primer nor an RNN layer of the policy defines.
        counts_steps: The recorder counts the steps of each trajectory in `step_count`.
        call_options: Whether to compile or capture the policy's modules.
        cast: Casts of observations, which the policy reads as batches contain them. Defaults to
            ``None``: no casts.
    """

    env: EnvSpec
    policy_state: Mapping[Any, Any] | None = None
    counts_steps: bool = False
    call_options: CallOptions = UNCHANGED
    cast: ObservationCast | None = None


class RemoteRunner(ABC):
    """A runner whose `act` requests actions from another process; see `PolicyRunner`.

    Attributes:
        current: Memory of the current observation by key. The recorder writes into it between two
            calls of `act`.
    """

    slow_path = False
    reuses_memory = True
    extra_outputs: tuple[Extra, ...] = ()
    inputs: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[PolicyState, ...]
    through_env: tuple[Leaf, ...]
    is_init: torch.Tensor | None
    step_count: torch.Tensor | None
    current: dict[Key, torch.Tensor]

    @abstractmethod
    def request(self) -> None:
        """Request actions for the current observation; the next `act` waits for the reply."""

    @abstractmethod
    def act(self) -> tuple[torch.Tensor, ...]:
        """Wait for the policy's outputs and return them; request them unless `request` has."""

    @abstractmethod
    def begin(self, control: RolloutControl, report_version: Callable[[int], None]) -> None:
        """Begin a rollout.

        Args:
            control: Counts a step from time to time while `act` waits, so that a waiting worker is
                not taken for a stalled one.
            report_version: Called within `act` with the version of the policy, when it changes.
        """

    def refresh(self, steps: int) -> None:  # noqa: B027 (nothing to do in any subclass)
        """Do nothing: the process that calls the policy checks it for changes."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the values that the policy keeps for its next call."""

    def extra_values(self) -> ExtraValues:
        """Return no extras: a remote policy returns only tensors."""
        return {}


class RemotePolicy(ABC):
    """Take the policy's place in a worker. Can be pickled."""

    @abstractmethod
    def for_group(self, place: int) -> RemotePolicy:
        """Return the remote policy for one group of the worker's environments."""

    @abstractmethod
    def runner(self, needs: PolicyNeeds, current: Mapping[Key, torch.Tensor]) -> RemoteRunner:
        """Return a runner; arguments and errors are those of :class:`PolicyRunner`."""
