"""A policy that is called in another process, as a worker has it: what stands for it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pycollect._core import Leaf, RolloutControl
from pycollect.data.cast import ObservationCast
from pycollect.data.extras import Extra, ExtraValues
from pycollect.data.layout import Key
from pycollect.envs.base import EnvBatch
from pycollect.policy.calling import Calling
from pycollect.policy.states import PolicyState


class RunnerElsewhere(ABC):
    """Offers what a PolicyRunner does, see there; each `act` is a question to another process.

    Attributes:
        current: the memory in which it is shown the current observation, by key: whoever collects
            writes into it between two calls of `act`.
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
    def ask(self) -> None:
        """Begin the call that the next `act` waits for: the current observation is there."""

    @abstractmethod
    def act(self) -> tuple[torch.Tensor, ...]:
        """What the policy says to the current observation. Waits; asks, unless `ask` did."""

    @abstractmethod
    def begin(self, control: RolloutControl, tell_version: Callable[[int], None]) -> None:
        """A rollout begins.

        Args:
            control: counts a step now and then while `act` waits: whoever waits has not stalled.
            tell_version: is called within `act`, with the version of the policy that acts from that
                step on.
        """

    def refresh(self, steps: int) -> None:  # noqa: B027 (nothing to do for any)
        """Whoever calls the policy looks at it himself."""

    def forget(self) -> None:  # noqa: B027 (nothing to do for any)
        """Nothing is noted here for the next call."""

    def said(self) -> ExtraValues:
        """A policy elsewhere says tensors alone."""
        return {}


class PolicyElsewhere(ABC):
    """Stands for a policy in a worker's process, in its place; pickles."""

    @abstractmethod
    def of_group(self, place: int) -> PolicyElsewhere:
        """What stands for it in that group of the worker's environments, by its place."""

    @abstractmethod
    def runner(
        self,
        env: EnvBatch,
        current: Mapping[Key, torch.Tensor],
        policy_state: Mapping[Any, Any] | None,
        counts_steps: bool,
        calling: Calling,
        cast: ObservationCast | None,
    ) -> RunnerElsewhere:
        """What asks it; arguments and errors are those of :func:`make_policy_runner`."""
