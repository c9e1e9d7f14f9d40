"""The worker's end of central inference: the policy's client, and its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pycollect._core import Bell, Memory, RolloutControl, ServerSlots, SharedMemoryError, WorkerSlot
from pycollect.data.cast import ObservationCast
from pycollect.data.layout import Key
from pycollect.data.slabs import MemoryAddress
from pycollect.envs.base import EnvSpec
from pycollect.inference.messages import (
    ANSWER,
    JoinReply,
    JoinRequest,
    PolicyNeeds,
    SharedIO,
    read_by_policy,
    rows_of,
)
from pycollect.policy.calling import CallOptions
from pycollect.policy.remote import RemotePolicy, RemoteRunner
from pycollect.policy.states import IS_INIT, STEP_COUNT, PolicyState
from pycollect.transport.pickling import ErrorReport, pack, unpack

_BEAT_SECONDS = 0.05  # interval at which a waiting worker shows that it has not stalled
_NO_CONTROL = RolloutControl()


class PolicyClient(RemotePolicy):
    """Stands for the policy in one worker and in its replacements.

    Args:
        slots: Address of the slots of all workers.
        slot: Number of the worker's slot, or of the first one of several.
        bell: Address of the server's bell.
    """

    def __init__(self, slots: MemoryAddress, slot: int, bell: MemoryAddress) -> None:
        self._slots, self._slot, self._bell = slots, slot, bell

    def __call__(self, *inputs: Any) -> Any:
        """Raise NotImplementedError, because the policy is called through `runner`."""
        raise NotImplementedError("policy: called in the inference server, not in workers")

    def for_group(self, place: int) -> PolicyClient:
        """Return the client of one group of the worker's environments, with its own slot."""
        return PolicyClient(self._slots, self._slot + place, self._bell)

    def runner(
        self,
        env: EnvSpec,
        current: Mapping[Key, torch.Tensor],
        policy_state: Mapping[Any, Any] | None,
        counts_steps: bool,
        call_options: CallOptions,
        cast: ObservationCast | None,
    ) -> RemoteRunner:
        """Return a runner that sends requests to the server, after the server has accepted it."""
        forms = tuple((policy_state or {}).items())
        needs = PolicyNeeds(read_by_policy(env), counts_steps, call_options, cast, forms)
        try:
            slot = WorkerSlot(self._slots, self._slot, self._bell)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                "inference: 'central' needs shared memory between workers and the inference server "
                f"of their machine; use inference=None: {error}"
            ) from error
        batch = env.rows
        first = {key: tensor if batch else tensor[None] for key, tensor in current.items()}
        message, memory = pack(JoinRequest(needs, first), ServerSlots.BYTES)
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

    Args:
        slot: Slot for requests and replies.
        joined: Reply of the server to the join request.
        current: The current observation, which is moved to shared memory.
        batch: (P,), or () for a single environment.
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
        self._report_version: Callable[[int], None] = _ignore
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
        self.is_init = read[IS_INIT].fill_(True) if IS_INIT in joined.reads else None
        self.step_count = read[STEP_COUNT].zero_() if STEP_COUNT in joined.reads else None
        self._answer = tuple(rows_of(io.written, joined.row, batch).values())

    def begin(self, control: RolloutControl, report_version: Callable[[int], None]) -> None:
        """See :meth:`RemoteRunner.begin`."""
        self._control, self._report_version, self._version = control, report_version, -1
        if self._is_waiting:  # for a step of an interrupted rollout
            self._wait(answered=False)

    def request(self) -> None:
        """See :meth:`RemoteRunner.request`."""
        self._is_waiting = True
        self._slot.ask()

    def act(self) -> tuple[torch.Tensor, ...]:
        """Return the policy's outputs, or raise the exception that the policy raised."""
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


def _ignore(version: int) -> None:
    """Do nothing, because no rollout has started."""


class ClientSlots:
    """Slots of all workers, in memory of the driver, which outlive workers and servers.

    Args:
        bell: Bell that workers knock at when they send a request.
        groups: Number of groups of each worker's environments.

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
        """Return the policy clients of new workers.

        Raises:
            ValueError: More than 1024 slots are needed.
        """
        each = [[self.slots.add() for _ in range(self.groups)] for _ in range(count)]
        return [PolicyClient(self.slots.address, slots[0], self.bell.address) for slots in each]
