"""The process that calls the policy for all workers: started, given weights, replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycollect.batch.weights import same_values, weights_of
from pycollect.engines.protocol import Engine
from pycollect.errors import WorkerDied
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.records import WorkerPlan, WorkerRecord
from pycollect.scheduler.stalls import StallDetector
from pycollect.scheduler.updates import PolicyUpdates
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.flow import Flow
from pycollect.stream.state import CollectorState
from pycollect.stream.weight_calls import for_all

DIED = "server_died"
"""Why workers are replaced whose policy was called there."""

_LOOK_SECONDS = 0.5  # from one look at whether it hangs to the next


@dataclass(frozen=True)
class ProcessPlan:
    """What it is made from, and who starts it."""

    plan: WorkerPlan
    engine: Engine


class PolicyProcess:
    """To its engine a worker, the only one of a group of its own.

    Attributes:
        group: of it alone.
    """

    def __init__(self, flow: Flow, options: RemoteOptions, plan: ProcessPlan) -> None:
        self._engine, self._options, self._plan = plan.engine, options, plan.plan
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None
        self.group = WorkerGroup(flow, plan.engine, options)

    def start(self) -> None:
        """Start it, and wait until it has the policy."""
        self.group.start([self._plan])

    @property
    def record(self) -> WorkerRecord:
        """What is known of it, once it has started."""
        return self.group.present[0]

    def death(self) -> WorkerDied | None:
        """How it ended, or that it is given up, as a call takes too long; None: it serves.

        It is told until `replaced` is.
        """
        if self._death is None:
            self._death = self._new_death()
        return self._death

    def _new_death(self) -> WorkerDied | None:
        record = self.record
        if self._stalls.stalled([record]):
            text = (
                f"{record.plan.spec.name}: a call of the policy took longer than "
                f"{self._options.timeout} s (worker_timeout)"
            )
            return WorkerDied(text, record.index, record.incarnation, "")
        if not record.handle.is_dead:
            return None
        try:
            record.handle.answer(record.handle.request("steps"))
        except WorkerDied as death:
            return death
        raise AssertionError("a process that is gone has answered")

    def last_words(self) -> str:
        """The last lines that it logged, as far as they can be had."""
        return self.record.process.last_words()

    def replace(self, death: WorkerDied) -> None:
        """Start another one in its place, with the same weights, and wait until it serves.

        After an interrupt it may be called again, and goes on.

        Raises:
            WorkerError: it died too often.
        """
        record = self.record
        self._stalls.heard_of(record)
        if record.starting is None or record.process.is_dead:
            self.group.restart(record, death, DIED)
        self.group.await_built([record])
        self.group.give_all(record)

    def replaced(self) -> None:
        """Those whom it served were replaced, too."""
        self._death = None

    def seed(self, root: int) -> None:
        """What the policy draws follows from that root from now on, also in another process.

        Where it has ended, or hangs, whoever takes its place is seeded so.
        """
        record = self.record
        record.initial_call = ("set_seed", (), root)
        if record.starting:
            return
        call = record.handle.request(*record.initial_call)
        while not record.handle.await_answer(call, self._stalls.next_check(_LOOK_SECONDS)):
            if self.death() is not None:
                return
        with suppress(WorkerDied):
            record.handle.answer(call)

    def report(self) -> dict[str, Any]:
        """Of `stats`."""
        record = self.record
        return {
            "pid": record.info.pid,
            "restarts": record.restarts,
            "failure": record.failure,
        }

    def close(self, timeout: float | None) -> None:
        """End it, and leave its engine. Idempotent."""
        self.group.close(timeout)
        self._engine.leave()


class ServerWeights(PolicyUpdates):
    """The weights of a policy that a process of its own calls for all workers.

    Args:
        process: that does.
        workers: tells the ids of those that there are.
    """

    def __init__(
        self,
        flow: Flow,
        process: PolicyProcess,
        options: RemoteOptions,
        policy: Any,
        workers: Callable[[], Sequence[int]],
    ) -> None:
        super().__init__(flow, process.group, options, policy)
        self._process, self._workers = process, workers

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Give the process weights from a source; None: the policy's."""
        super().update(for_all(source, worker_ids, self._workers()), None, wait)

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """They need none."""

    def served(self, worker: WorkerRecord) -> None:
        """A batch was delivered, whoever's it is."""
        self._process.record.since_update += 1
        super().served(self._process.record)

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Whoever brings weights for one worker brings them for all."""
        self.receive(source)

    def due(self) -> Sequence[int]:
        """All workers, where it is time."""
        return self._workers() if super().due() else ()

    def resume(self, state: CollectorState) -> None:
        """The process gets a state's weights, and its version."""
        if state.policy:
            record = self._process.record
            self._process.group.weights.send(state.policy, [record], state.policy_version)

    def push(self, worker_ids: Sequence[int]) -> None:
        """Give the process the policy's, as `PolicyUpdates.push`, unless it has the same."""
        policy = weights_of(self._policy)
        has = {**self._first, **self._process.group.weights.newest}
        if not same_values(
            policy, {name: has[name].to(own.device) for name, own in policy.items()}
        ):
            super().push([self._process.record.index])
