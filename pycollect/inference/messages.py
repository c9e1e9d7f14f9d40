"""Messages between a worker and its inference server, in addition to the shared memory.

A request is empty ("read my row"), or a `JoinRequest`, which describes the worker's environments.
The reply to an empty request is empty, and the reply to a `JoinRequest` is a `JoinReply`. Either
reply may be an exception instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect._core import Leaf
from pycollect.data.cast import ObservationCast
from pycollect.data.layout import Key
from pycollect.data.slabs import MemoryAddress
from pycollect.envs.base import EnvSpec
from pycollect.inference.shared_io import IOLayout
from pycollect.policy.calling import CallOptions
from pycollect.policy.program.steps import show_all


def checked(env: EnvSpec) -> EnvSpec:
    """Return the spec of a worker's environments.

    Raises:
        NotImplementedError: An action is not a tensor, or an observation is on a device.
    """
    if extras := [extra.key for extra in env.action_extras]:
        raise NotImplementedError(
            "inference: 'central' needs actions that are tensors of fixed shapes, but "
            f"{show_all(extras)} are other data; use inference=None"
        )
    if env.device_keys:
        raise NotImplementedError(
            "inference: 'central' needs environments on the CPU, but these are on "
            f"{env.device}; use inference=None"
        )
    return env


@dataclass(frozen=True)
class PolicyNeeds:
    """Requirements of a worker on the policy; workers with equal requirements share calls.

    Attributes:
        env: Spec of the worker's environments.
        counts_steps: Whether steps are counted, so that a policy can read their number.
        call_options: How the policy is called.
        cast: Cast of observations for the policy.
        state_forms: Items of `policy_state`.
    """

    env: EnvSpec
    counts_steps: bool
    call_options: CallOptions
    cast: ObservationCast | None
    state_forms: tuple[tuple[Any, Any], ...]

    def equals(self, other: PolicyNeeds) -> bool:
        """Return whether the requirements are equal."""
        if len(self.state_forms) != len(other.state_forms):
            return False
        pairs = zip(self.state_forms, other.state_forms, strict=True)
        return replace(self, state_forms=()) == replace(other, state_forms=()) and all(
            first[0] == second[0] and _same(first[1], second[1]) for first, second in pairs
        )


def _same(first: Any, second: Any) -> bool:
    """Return whether two shapes, or two initial values, are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(type(first) is type(second) and first == second)


@dataclass(frozen=True)
class JoinRequest:
    """Sent by a worker that is built except for its policy.

    Attributes:
        needs: Requirements of the worker.
        first: Its current observation, ``[P, *frame]`` by key.
    """

    needs: PolicyNeeds
    first: Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class JoinReply:
    """The worker's row in shared memory, and the properties of the policy.

    Attributes:
        memory: Address of the shared memory.
        layout: Layout of the shared memory.
        row: Row of the worker.
        inputs: As in PolicyRunner.
        outputs: As in PolicyRunner.
        states: Leaf and initial value of each recorded state.
        through_env: As in PolicyRunner.
        reads: Entries of the collector that the policy reads, such as "is_init".
        numbered: Whether states stay with the policy and answers have numbers; see `ANSWER`.
    """

    memory: MemoryAddress
    layout: IOLayout
    row: int
    inputs: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[tuple[Leaf, torch.Tensor], ...]
    through_env: tuple[Leaf, ...]
    reads: tuple[Key, ...]
    numbered: bool
