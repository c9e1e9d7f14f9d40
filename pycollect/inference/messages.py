"""Messages between a worker and its inference server, beside the rows of the shared memory.

A request is empty ("read my row"), or a `Joining`, which describes the worker's environments. The
reply to the former is empty, to the latter a `Joined`. Either may be an exception instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect._core import Leaf
from pycollect.data.cast import ObservationCast
from pycollect.data.layout import Key, Node
from pycollect.data.slabs import MemoryAddress
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.inference.shared_io import BoardForm
from pycollect.policy.calling import CallOptions
from pycollect.policy.program.steps import show_all


@dataclass(frozen=True)
class EnvForm:
    """What a policy has to know of the environments of one worker; pickles.

    Attributes:
        num_envs: P.
        others: EnvBatch's of the same names.
    """

    num_envs: int
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    action_space: Any
    ends: tuple[Key, ...]
    takes_tensors: bool
    casts_actions: bool
    passes_states_on: bool
    nodes: tuple[tuple[Key, Node], ...]

    @classmethod
    def of(cls, env: EnvBatch) -> EnvForm:
        """Return the form of a worker's environments.

        Raises:
            NotImplementedError: An observation or action is not a tensor on the host.
        """
        extras = [extra.key for extra in (*env.extras, *env.action_extras)]
        if extras:
            raise NotImplementedError(
                "inference: 'central' needs observations and actions that are tensors of fixed "
                f"shapes, but {show_all(extras)} are other data; use inference=None"
            )
        if env.device_keys:
            raise NotImplementedError(
                "inference: 'central' needs environments on the CPU, but these are on "
                f"{env.device}; use inference=None"
            )
        return cls(
            env.num_envs,
            env.observation,
            env.action,
            env.action_space,
            env.ends,
            env.takes_tensors,
            env.casts_actions,
            env.passes_states_on,
            tuple(env.nodes.items()),
        )


class FormedEnv(EnvBatch):
    """Environments of that form, of several workers side by side. They are never stepped."""

    batched = True

    def __init__(self, form: EnvForm, workers: int) -> None:
        self.num_envs = form.num_envs * workers
        self.observation, self.action = form.observation, form.action
        self.action_space, self.ends = form.action_space, form.ends
        self.takes_tensors, self.casts_actions = form.takes_tensors, form.casts_actions
        self.passes_states_on, self.nodes = form.passes_states_on, dict(form.nodes)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """They are elsewhere."""
        raise NotImplementedError

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """They are elsewhere."""
        raise NotImplementedError

    def reset_done(self, done: BoolArray) -> Arrays:
        """They are elsewhere."""
        raise NotImplementedError

    def close(self) -> None:
        """They are elsewhere."""


@dataclass(frozen=True)
class PolicyNeeds:
    """What a worker says of how the policy is to be called; workers with the same share calls.

    Attributes:
        env: its environments.
        counts_steps: they are counted, so that a policy may read them.
        cast: of observations, for the policy.
        state_forms: `policy_state`, by key.
    """

    env: EnvForm
    counts_steps: bool
    call_options: CallOptions
    cast: ObservationCast | None
    state_forms: tuple[tuple[Any, Any], ...]

    def are(self, others: PolicyNeeds) -> bool:
        """Whether they are the same as those."""
        if len(self.state_forms) != len(others.state_forms):
            return False
        pairs = zip(self.state_forms, others.state_forms, strict=True)
        return replace(self, state_forms=()) == replace(others, state_forms=()) and all(
            ours[0] == theirs[0] and _same(ours[1], theirs[1]) for ours, theirs in pairs
        )


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two shapes, or two first values, are the same."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    return bool(type(ours) is type(theirs) and ours == theirs)


@dataclass(frozen=True)
class Joining:
    """A worker is built but for its policy.

    Attributes:
        first: its current observation, ``[P, *frame]`` by key.
    """

    needs: PolicyNeeds
    first: Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class Joined:
    """Where it finds its row, and what the policy turned out to be.

    Attributes:
        memory, form, row: of the board.
        inputs, outputs, through_env: as a PolicyRunner's.
        states: leaf and first value of each that is recorded.
        reads: which of the collector's own entries lie on the board, too.
        numbered: states lie beside the policy, and answers have numbers, see `ANSWER`.
    """

    memory: MemoryAddress
    form: BoardForm
    row: int
    inputs: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[tuple[Leaf, torch.Tensor], ...]
    through_env: tuple[Leaf, ...]
    reads: tuple[Key, ...]
    numbered: bool
