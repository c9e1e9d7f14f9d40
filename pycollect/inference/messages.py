"""Shared memory of a worker and its inference server, and the messages between them.

The worker writes observations into its row, and the server writes outputs of the policy there.

A request is empty ("read my row"), or a `JoinRequest`, which describes the worker's environments.
The reply to an empty request is empty, and the reply to a `JoinRequest` is a `JoinReply`. Either
reply may be an exception instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect._core import Layout, Leaf, Memory, Placement
from pycollect.data.cast import ObservationCast
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key
from pycollect.data.slabs import MemoryAddress, slab_tensors
from pycollect.envs.base import EnvSpec
from pycollect.policy.calling import CallOptions
from pycollect.policy.program.steps import show_all

_READ, _WRITTEN = "read", "written"
ANSWER = Leaf(("_pycollect_answer",), "int64", (1,))
"""If states stay with the policy, number of the answer that an environment continues from.

Workers carry it from step to step like a state. It is 0 if the states in shared memory apply.
"""


@dataclass(frozen=True)
class IOLayout:
    """Layout of a SharedIO: a slab of one step with a row per client; can be pickled.

    Attributes:
        read: Leaves that workers write and the policy reads.
        written: Leaves that the policy writes.
        rows: Maximum number of clients.
        envs: Number of environments of each client, P.
    """

    read: tuple[Leaf, ...]
    written: tuple[Leaf, ...]
    rows: int
    envs: int

    def _placement(self) -> Placement:
        leaves = [
            Leaf((side, *leaf.key), leaf.dtype, leaf.shape)
            for side, leaves_of_side in ((_READ, self.read), (_WRITTEN, self.written))
            for leaf in leaves_of_side
        ]
        return Placement(Layout(leaves), self.rows, self.envs, 1)

    @property
    def bytes(self) -> int:
        """Number of bytes of shared memory."""
        return self._placement().bytes


class SharedIO:
    """Shared memory that this process created or attached.

    Attributes:
        read: Tensors ``[rows, P, *frame]`` that workers write, by key; one row is contiguous.
        written: Tensors ``[rows, P, *frame]`` that the policy writes, by key.
    """

    def __init__(self, layout: IOLayout, memory: Memory) -> None:
        slab = memory.slab(layout._placement(), 0)
        tensors = slab_tensors(slab, [layout.rows, layout.envs])
        self.read = _side(tensors, _READ)
        self.written = _side(tensors, _WRITTEN)

    @staticmethod
    def shared(layout: IOLayout) -> tuple[SharedIO, Memory]:
        """Create shared memory; return it with its Memory, which has an address."""
        memory = Memory.share(layout.bytes)
        return SharedIO(layout, memory), memory


def rows_of(
    tensors: dict[Key, torch.Tensor], row: int, batch: Sequence[int]
) -> dict[Key, torch.Tensor]:
    """Return one client's row of each tensor, ``[P, *frame]``, or ``[*frame]`` without a batch."""
    return {key: tensor[row] if batch else tensor[row, 0] for key, tensor in tensors.items()}


def _side(tensors: dict[Key, torch.Tensor], side: str) -> dict[Key, torch.Tensor]:
    return {key[1:]: tensor for key, tensor in tensors.items() if key[0] == side}


def read_by_policy(env: EnvSpec) -> EnvSpec:
    """Return the spec with a batch dimension and without what a policy ignores.

    So workers whose environments differ only in that share calls.

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
    return replace(
        env,
        batch_size=(env.num_envs,),
        reward=ONE_REWARD,
        rewards=(),
        step_only=(),
        step_extras=(),
        root_only=frozenset(),
        skips_after_done=False,
        steps_rows=False,
        overlaps=False,
        can_reset=True,
        time_limit=False,
    )


@dataclass(frozen=True)
class PolicyNeeds:
    """Requirements of a worker on the policy; workers with equal requirements share calls.

    Attributes:
        env: Spec of the worker's environments, as far as a policy reads it.
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
