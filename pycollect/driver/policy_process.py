"""A policy that a process of its own calls for workers: its weights, its seed, its replacement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pycollect.data.weights import Weights, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_place import SERVER_DIED, InWorkers, copies_among, for_all
from pycollect.driver.records import StallDetector, WorkerPlan, WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.workers import WorkerGroup, with_log
from pycollect.errors import WorkerDied, without_frames
from pycollect.transport.engine import Engine
from pycollect.transport.messages import set_seed

_NEWS_SECONDS = 10.0  # maximum time until a live server answers, or its death is known


class InPolicyProcess(InWorkers):
    """A policy that a process of this machine calls for workers. It is managed like a worker.

    Workers that share no memory with it call copies of the policy.

    Args:
        plan: Plan of the process.
        engine: Starts the process. It is left when the place is closed.
        flow: Counters and ids of the stream.
        group: The workers.
        options: How workers are managed.
        policy: The caller's policy, or ``None``.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        engine: Engine,
        flow: Flow,
        group: WorkerGroup,
        options: RemoteOptions,
        policy: Any,
    ) -> None:
        super().__init__(flow, WorkerGroup(flow, engine, options), options, policy)
        self._engine, self._plan, self._workers = engine, plan, group
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None

    def start(self) -> None:
        """Start the process, and wait until it has the policy."""
        self._group.start([self._plan])

    @property
    def _record(self) -> WorkerRecord:
        """Record of the process, once it was started."""
        return self._group.present[0]

    # Weights

    def send_first(self) -> None:
        """Send the weights of this process's policy to all that built theirs from a factory."""
        super().send_first()
        self._send_newest()

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the weights that were sent to the process, if it has a copy."""
        self._send_newest([worker])

    def _send_newest(self, workers: Sequence[WorkerRecord] | None = None) -> None:
        if newest := self._group.weights.newest:
            self._send_to_copies(newest, workers=workers)

    def _send_to_copies(
        self,
        weights: Weights,
        acknowledge: bool = False,
        workers: Sequence[WorkerRecord] | None = None,
    ) -> Sequence[tuple[WorkerRecord, Any]]:
        chosen = copies_among(self._workers.present if workers is None else workers)
        version = self._flow.version.number
        return self._workers.weights.send(weights, chosen, version, acknowledge) if chosen else ()

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because workers that are served need no weights."""

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send the process and all copies weights from a source; ``None`` sends the policy's."""
        super().update(for_all(source, worker_ids, self._workers.ids()), None, wait)

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take these weights for all workers, because they share one policy."""
        self.receive(source)

    def served(self, worker: WorkerRecord) -> None:
        """Count a delivered batch of any worker."""
        self._record.since_update += 1
        super().served(self._record)

    def due(self) -> Sequence[int]:
        """Return all workers if an automatic update is due, else none."""
        return self._workers.ids() if super().due() else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to the process and all copies, unless they have the same."""
        sent = self._first.updated(self._group.weights.newest)
        if not weights_of(self.policy).equal(sent):
            super().push([self._record.index])

    def resume(self, state: CollectorState) -> None:
        """Send the weights and version of a state to the process and to all copies."""
        if state.policy:
            self._group.weights.send(state.policy, [self._record], state.policy_version)
            self._send_to_copies(state.policy)

    # The process

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """Reason for the last replacement of the process, or ``None``."""
        return self._record.failure

    def death(self) -> WorkerDied | None:
        """Return the error of the process if it died or stalled in a call, else ``None``.

        The error is returned until `replaced` is called.
        """
        if self._death is None:
            self._death = self._new_death()
        return self._death

    def check_alive(self) -> None:
        """Raise WorkerError, with the last lines of the log, if the process has died."""
        if death := self.death():
            raise with_log(death, str(death), self._record.newest.recent_log()) from death

    def has_died(self) -> bool:
        """Return whether the process has died; wait until the driver knows it.

        Workers can see its death earlier than the driver.
        """
        record = self._record
        if self.death() is None and not record.starting:
            call = record.handle.ping()
            if record.handle.await_answer(call, _NEWS_SECONDS):
                try:
                    record.handle.answer(call)
                except WorkerDied as death:
                    self._death = without_frames(death)
        return self.death() is not None

    def _new_death(self) -> WorkerDied | None:
        record = self._record
        if record.starting:
            return None
        if self._stalls.stalled([record]):
            text = (
                f"{record.plan.spec.name}: a call of the policy took longer than "
                f"{self._options.timeout} s (worker_timeout)"
            )
            return WorkerDied(text, record.index, record.incarnation, "")
        if not record.handle.is_dead:
            return None
        try:
            record.handle.answer(record.handle.ping())
        except WorkerDied as death:
            return without_frames(death)
        raise AssertionError("handle: expected WorkerDied from an ended process, got an answer")

    def replace(self, death: WorkerDied) -> None:
        """Start a replacement with the same weights, and wait until it serves.

        It may be called again after an interrupt, and then continues.

        Raises:
            WorkerError: The process died too often.
        """
        record = self._record
        self._stalls.note_progress(record)
        if record.incarnation == death.incarnation or record.newest.is_dead:
            self._group.restart(record, death, SERVER_DIED)
        self._group.await_replaced(record, SERVER_DIED)
        self._group.send_all(record)

    def replaced(self) -> None:
        """Forget the death, because all workers that the process served were replaced."""
        self._death = None

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy.

        If the process has died or hangs, its replacement is seeded.
        """
        record = self._record
        record.initial_call = (set_seed, (), root)
        if record.starting:
            return
        call = record.handle.run(*record.initial_call)
        while not record.handle.await_answer(call, self._stalls.next_check):
            if self.death() is not None:
                return
        with suppress(WorkerDied):
            record.handle.answer(call)

    def report(self) -> dict[str, Any]:
        """Return the entry "server" of `stats`."""
        record = self._record
        entry = {"pid": record.info.pid, "restarts": record.restarts, "failure": record.failure}
        return {"server": entry}

    def close(self, timeout: float | None) -> None:
        """End the process and leave its engine. Idempotent."""
        self._group.close(timeout)
        self._engine.leave()
