"""The worker's end of central inference: shared memory, messages and the policy's client.

The worker writes observations into its row, and the server writes outputs of the policy there.

A request is empty ("read my row"), or a `JoinRequest`, which describes the worker's environments.
The reply to an empty request is empty, and the reply to a `JoinRequest` is a `JoinReply`. Either
reply may be an exception instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect._core import (
    Bell,
    Layout,
    Leaf,
    Memory,
    Placement,
    RolloutControl,
    ServerSlots,
    SharedMemoryError,
    WorkerSlot,
)
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key, show_all
from pycollect.data.objects import pickled_tensors
from pycollect.data.slabs import MemoryAddress, slab_tensors
from pycollect.envs.base import EnvSpec
from pycollect.policy.remote import PolicyNeeds, RemotePolicy, RemoteRunner
from pycollect.policy.states import IS_INIT, STEP_COUNT, PolicyState
from pycollect.transport.pickling import ErrorReport, pack, unpack

_BEAT_SECONDS = 0.05  # interval at which a waiting worker shows that it has not stalled
_NO_CONTROL = RolloutControl()
_READ, _WRITTEN = "read", "written"
ANSWER = Leaf(("_pycollect_answer",), "int64", (1,))
"""If states stay with the policy, number of the answer that an environment continues from.

Workers carry it from step to step like a state. It is 0 if the states in shared memory apply.
"""

FRESH = Leaf(("_pycollect_fresh",), "bool", (1,))
"""Whether the values that the policy kept for an environment's next call must be dropped."""


@dataclass(frozen=True)
class IOLayout:
    """Layout of a SharedIO: a slab of one step with a row per client; can be pickled."""

    read: tuple[Leaf, ...]  # leaves that workers write and the policy reads
    written: tuple[Leaf, ...]  # leaves that the policy writes
    rows: int  # maximum number of clients
    envs: int  # number of environments of each client, P

    def _placement(self) -> Placement:
        leaves = [
            Leaf((side, *leaf.key), leaf.dtype, leaf.shape)
            for side, leaves_of_side in ((_READ, self.read), (_WRITTEN, self.written))
            for leaf in leaves_of_side
        ]
        return Placement(Layout(leaves), self.rows, self.envs, 1)

    @property
    def bytes(self) -> int:
        return self._placement().bytes


class SharedIO:
    """Shared memory that this process created or attached, as tensors ``[rows, P, *frame]``."""

    def __init__(self, layout: IOLayout, memory: Memory) -> None:
        slab = memory.slab(layout._placement(), 0)
        tensors = slab_tensors(slab, [layout.rows, layout.envs])
        self.read = _side(tensors, _READ)  # workers write these, by key; one row is contiguous
        self.written = _side(tensors, _WRITTEN)  # the policy writes these, by key

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
        can_reset=True,
    )


def are_equal(needs: PolicyNeeds, others: PolicyNeeds) -> bool:
    """Return whether the needs of two workers are equal, so that they share calls."""
    states, other_states = needs.policy_state or {}, others.policy_state or {}
    return (
        replace(needs, policy_state=None) == replace(others, policy_state=None)
        and [*states] == [*other_states]
        and all(map(_same, states.values(), other_states.values()))
    )


def _same(first: Any, second: Any) -> bool:
    """Return whether two shapes, or two initial values, are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(type(first) is type(second) and first == second)


@dataclass(frozen=True)
class JoinRequest:
    """Sent by a worker that is built except for its policy."""

    needs: PolicyNeeds  # requirements of the worker; `env` is its spec, as far as a policy reads it
    first: bytes  # its current observation, ``[P, *frame]`` by key, pickled


@dataclass(frozen=True)
class JoinReply:
    """The worker's row in shared memory, and the properties of the policy."""

    memory: MemoryAddress
    layout: IOLayout
    row: int
    inputs: tuple[Key, ...]  # as in PolicyRunner
    outputs: tuple[Leaf, ...]  # as in PolicyRunner
    states: tuple[tuple[Leaf, torch.Tensor], ...]  # leaf and initial value of each recorded state
    through_env: tuple[Leaf, ...]  # as in PolicyRunner
    reads: tuple[Key, ...]  # entries of the collector that the policy reads, such as "is_init"
    numbered: bool  # whether states stay with the policy and answers have numbers; see `ANSWER`


class PolicyClient(RemotePolicy):
    """Stands for the policy in one worker and its replacements; `slot` is its first slot."""

    def __init__(self, slots: MemoryAddress, slot: int, bell: MemoryAddress) -> None:
        self._slots, self._slot, self._bell = slots, slot, bell

    def __call__(self, *inputs: Any) -> Any:
        """Raise NotImplementedError, because the policy is called through `runner`."""
        raise NotImplementedError("policy: called in the inference server, not in workers")

    def for_group(self, place: int) -> PolicyClient:
        """Return the client of one group of the worker's environments, with its own slot."""
        return PolicyClient(self._slots, self._slot + place, self._bell)

    def runner(self, needs: PolicyNeeds, current: Mapping[Key, torch.Tensor]) -> RemoteRunner:
        """Return a runner that sends requests to the server, after the server has accepted it."""
        batch = needs.env.rows
        needs = replace(needs, env=read_by_policy(needs.env))
        try:
            slot = WorkerSlot(self._slots, self._slot, self._bell)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                "inference: 'central' needs shared memory between workers and the inference server "
                f"of their machine; use inference=None: {error}"
            ) from error
        first = {key: tensor if batch else tensor[None] for key, tensor in current.items()}
        message, memory = pack(JoinRequest(needs, pickled_tensors(first)), ServerSlots.BYTES)
        answered = slot.ask(message, _BEAT_SECONDS)
        while not answered:
            answered = slot.wait_answer(_BEAT_SECONDS)
        joined: JoinReply | ErrorReport = unpack(slot.answer())
        del memory  # the server could read it until the reply
        if isinstance(joined, ErrorReport):
            raise joined.original
        return ClientRunner(slot, joined, current, batch)


class ClientRunner(RemoteRunner):
    """Sends the server one request per step; the current observation is its row of shared memory.

    The constructor moves `current` there. `batch` is (P,), or () for a single environment.
    """

    def __init__(
        self,
        slot: WorkerSlot,
        joined: JoinReply,
        current: Mapping[Key, torch.Tensor],
        batch: tuple[int, ...],
    ) -> None:
        self._slot = slot
        self._is_waiting = False  # whether a request has no reply yet
        self._control = _NO_CONTROL
        self._report_version: Callable[[int], None] = lambda _: None
        self._version = -1
        io = SharedIO(joined.layout, Memory.attach(joined.memory))
        read = rows_of(io.read, joined.row, batch)
        self.current = {key: read[key] for key in current}
        for key, tensor in current.items():
            self.current[key].copy_(tensor)
        self.inputs, self.outputs = joined.inputs, joined.outputs
        self.through_env = joined.through_env
        self.states = tuple(
            PolicyState(leaf, read[leaf.key], initial) for leaf, initial in joined.states
        )
        if joined.numbered:
            start = torch.zeros(ANSWER.shape, dtype=torch.int64, device="cpu")
            self.states += (PolicyState(ANSWER, read[ANSWER.key], start, recorded=False),)
        for state in self.states:
            state.current.copy_(state.initial)
        self._fresh = read[FRESH.key].fill_(True)
        self.is_init = read[IS_INIT].fill_(True) if IS_INIT in joined.reads else None
        self.step_count = read[STEP_COUNT].zero_() if STEP_COUNT in joined.reads else None
        self._answer = tuple(rows_of(io.written, joined.row, batch).values())

    def begin(self, control: RolloutControl, report_version: Callable[[int], None]) -> None:
        self._control, self._report_version, self._version = control, report_version, -1
        if self._is_waiting:  # for a step of an interrupted rollout
            self._wait(answered=False)

    def forget(self) -> None:
        self._fresh.fill_(True)

    def request(self) -> None:
        self._is_waiting = True
        self._slot.ask()

    def act(self) -> tuple[torch.Tensor, ...]:
        slot = self._slot
        if self._is_waiting:
            self._wait(answered=slot.wait_answer(_BEAT_SECONDS))
        else:
            self._is_waiting = True
            self._wait(answered=slot.ask(b"", _BEAT_SECONDS))
        failure = slot.answer()
        if failure:
            report: ErrorReport = unpack(failure)
            raise report.original
        if slot.note != self._version:
            self._version = slot.note
            self._report_version(self._version)
        return self._answer

    def _wait(self, answered: bool) -> None:
        while not answered:
            self._control.count_step()
            answered = self._slot.wait_answer(_BEAT_SECONDS)
        self._is_waiting = False


class ClientSlots:
    """Slots of all workers, in memory of the driver, which outlive workers and servers.

    Attributes:
        bell: Bell that workers knock at when they send a request.
        groups: Number of groups of each worker's environments.
        slots: One slot for each group of each worker, former workers included. The slots of a
            worker are consecutive, and its replacements use the same slots.
    """

    def __init__(self, bell: Bell, groups: int) -> None:
        self.slots = ServerSlots()
        self.bell, self.groups = bell, groups

    def policies(self, count: int) -> list[PolicyClient]:
        """Return the policy clients of new workers."""
        each = [[self.slots.add() for _ in range(self.groups)] for _ in range(count)]
        return [PolicyClient(self.slots.address, slots[0], self.bell.address) for slots in each]
