"""The worker's end of central inference: the policy's stand-in, and its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pycollect._core import Bell, Memory, RolloutControl, ServerSlots, SharedMemoryError, WorkerSlot
from pycollect.data.cast import ObservationCast
from pycollect.data.layout import Key
from pycollect.data.slabs import MemoryAddress
from pycollect.envs.base import EnvBatch
from pycollect.inference.messages import EnvForm, Joined, Joining, PolicyNeeds
from pycollect.inference.shared_io import ANSWER, Board, rows_of
from pycollect.policy.calling import CallOptions
from pycollect.policy.remote import RemotePolicy, RemoteRunner
from pycollect.policy.states import IS_INIT, STEP_COUNT, PolicyState
from pycollect.transport.messages import ErrorReport
from pycollect.transport.shared_value import pack, unpack

_BEAT_SECONDS = 0.05  # how often a worker that waits for the policy shows that it has not stalled
_NO_CONTROL = RolloutControl()


class CentralPolicy(RemotePolicy):
    """Stands for the policy in one worker, and in whoever takes its place.

    Args:
        slots: of all workers.
        slot: the number of the one through which it asks, or of the first of the worker's.
        bell: of the server.
    """

    def __init__(self, slots: MemoryAddress, slot: int, bell: MemoryAddress) -> None:
        self._slots, self._slot, self._bell = slots, slot, bell

    def __call__(self, *inputs: Any) -> Any:
        """It is asked through `runner`."""
        raise NotImplementedError("policy: called in the inference server, not in workers")

    def for_group(self, place: int) -> CentralPolicy:
        """Each group of the worker's environments asks through a slot of its own."""
        return CentralPolicy(self._slots, self._slot + place, self._bell)

    def runner(
        self,
        env: EnvBatch,
        current: Mapping[Key, torch.Tensor],
        policy_state: Mapping[Any, Any] | None,
        counts_steps: bool,
        call_options: CallOptions,
        cast: ObservationCast | None,
    ) -> RemoteRunner:
        """What asks the server; waits until it has answered for the first time."""
        forms = tuple((policy_state or {}).items())
        needs = PolicyNeeds(EnvForm.of(env), counts_steps, call_options, cast, forms)
        try:
            slot = WorkerSlot(self._slots, self._slot, self._bell)
        except SharedMemoryError as error:
            raise SharedMemoryError(
                "inference: 'central' needs shared memory between workers and the inference server "
                f"of their machine; use inference=None: {error}"
            ) from error
        batch = (env.num_envs,) if env.batched else ()
        first = {key: own if batch else own[None] for key, own in current.items()}
        message, memory = pack(Joining(needs, first), ServerSlots.BYTES)
        answered = slot.ask(message, _BEAT_SECONDS)
        while not answered:
            answered = slot.wait_answer(_BEAT_SECONDS)
        joined: Joined | ErrorReport = unpack(slot.answer())
        del memory  # until here the server may have read it
        if isinstance(joined, ErrorReport):
            raise joined.original
        return CentralRunner(slot, joined, current, batch)


class CentralRunner(RemoteRunner):
    """Asks the server once per step: its row of the board is the current observation.

    Args:
        current: the observation now, which is moved there.
        batch: (P,), or () for one environment that is no batch.
    """

    def __init__(
        self,
        slot: WorkerSlot,
        joined: Joined,
        current: Mapping[Key, torch.Tensor],
        batch: tuple[int, ...],
    ) -> None:
        self._slot = slot
        self._has_asked = False  # and was not answered yet, as far as this process knows
        self._control = _NO_CONTROL
        self._report_version: Callable[[int], None] = _nobody
        self._version = -1
        board = Board(joined.form, Memory.attach(joined.memory))
        read = rows_of(board.read, joined.row, batch)
        self.current = {key: read[key] for key in current}
        for key, own in current.items():
            self.current[key].copy_(own)
        self.inputs, self.outputs = joined.inputs, joined.outputs
        self.through_env = joined.through_env
        self.states = tuple(
            PolicyState(leaf, read[leaf.key], initial) for leaf, initial in joined.states
        )
        if joined.numbered:
            begun = torch.zeros(ANSWER.shape, dtype=torch.int64, device="cpu")
            self.states += (PolicyState(ANSWER, read[ANSWER.key], begun, recorded=False),)
        for state in self.states:
            state.current.copy_(state.initial)
        self.is_init = read[IS_INIT].fill_(True) if IS_INIT in joined.reads else None
        self.step_count = read[STEP_COUNT].zero_() if STEP_COUNT in joined.reads else None
        self._answer = tuple(rows_of(board.written, joined.row, batch).values())

    def begin(self, control: RolloutControl, report_version: Callable[[int], None]) -> None:
        """See :meth:`RemoteRunner.begin`."""
        self._control, self._report_version, self._version = control, report_version, -1
        if self._has_asked:  # for a step that was given up
            self._wait(answered=False)

    def request(self) -> None:
        """See :meth:`RemoteRunner.request`."""
        self._has_asked = True
        self._slot.ask()

    def act(self) -> tuple[torch.Tensor, ...]:
        """What the policy says; what it raised is raised here."""
        slot = self._slot
        if self._has_asked:
            self._wait(answered=slot.wait_answer(_BEAT_SECONDS))
        else:
            self._has_asked = True
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
        self._has_asked = False


def _nobody(version: int) -> None:
    """No rollout has begun."""


class Seats:
    """Slots, in memory of this process: they outlive workers, and a server in another process.

    It is the driver, or, on another node, who calls the policy there.

    Args:
        bell: at which workers knock when they ask.
        groups: of each worker's environments.

    Attributes:
        bell, groups: these.
        slots: one for each group of each worker that there ever was, but for those that took
            another's place; a worker's follow each other.
    """

    def __init__(self, bell: Bell, groups: int) -> None:
        self.slots = ServerSlots()
        self.bell, self.groups = bell, groups
        self._by_worker: dict[int, CentralPolicy] = {}

    def policies(self, count: int) -> list[CentralPolicy]:
        """What stands for the policy in so many more workers.

        Raises:
            ValueError: there are 1024 slots already.
        """
        each = [[self.slots.add() for _ in range(self.groups)] for _ in range(count)]
        return [CentralPolicy(self.slots.address, own[0], self.bell.address) for own in each]

    def policy_of(self, worker: int) -> CentralPolicy:
        """What stands for it in the worker of that id, and in whoever takes its place.

        Raises as `policies`.
        """
        if worker not in self._by_worker:
            (self._by_worker[worker],) = self.policies(1)
        return self._by_worker[worker]
