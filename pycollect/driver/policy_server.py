"""The inference process of a collector: how it is watched, seeded and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import StallDetector, WorkerPlan, WorkerRecord
from pycollect.driver.workers import WorkerGroup, with_log
from pycollect.errors import WorkerDied, without_frames
from pycollect.transport.engine import Engine
from pycollect.transport.spec import set_seed

DIED = "server_died"
"""Reason for lost frames of workers whose inference server died."""

_NEWS_SECONDS = 10.0  # maximum time until a live server answers, or its death is known


@dataclass(frozen=True)
class ProcessPlan:
    """Plan of an inference process, and the engine that starts it."""

    plan: WorkerPlan
    engine: Engine


class PolicyProcess:
    """Calls the policy for workers in a process of this machine, which is managed like a worker.

    Args:
        flow: Counters and ids of the stream.
        options: How workers are managed.
        plan: Plan of the process.

    Attributes:
        group: Worker group that contains only this process.
    """

    def __init__(self, flow: Flow, options: RemoteOptions, plan: ProcessPlan) -> None:
        self._options, self._engine, self._plan = options, plan.engine, plan.plan
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None
        self.group = WorkerGroup(flow, plan.engine, options)

    def start(self) -> None:
        """Start the process, and wait until it has the policy."""
        self.group.start([self._plan])

    @property
    def record(self) -> WorkerRecord:
        """Record of the process, once it was started."""
        return self.group.present[0]

    def served(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Return the workers that the process serves, or that start and may be served."""
        return [worker for worker in workers if worker.starting or worker.in_place]

    def death(self) -> WorkerDied | None:
        """Return the error of the process if it died or stalled in a call, else ``None``.

        The error is returned until `replaced` is called.
        """
        if self._death is None:
            self._death = self._new_death()
        return self._death

    def check(self) -> None:
        """Raise WorkerError, with the last lines of the log, if the process has died."""
        if death := self.death():
            raise with_log(death, str(death), self.record.newest.recent_log()) from death

    def has_died(self) -> bool:
        """Return whether the process has died; wait until the driver knows it.

        Workers can see its death earlier than the driver.
        """
        record = self.record
        if self.death() is None and not record.starting:
            call = record.handle.ping()
            if record.handle.await_answer(call, _NEWS_SECONDS):
                try:
                    record.handle.answer(call)
                except WorkerDied as death:
                    self._death = without_frames(death)
        return self.death() is not None

    def _new_death(self) -> WorkerDied | None:
        record = self.record
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
        record = self.record
        self._stalls.note_progress(record)
        if record.incarnation == death.incarnation or record.newest.is_dead:
            self.group.restart(record, death, DIED)
        self.group.await_replaced(record, DIED)
        self.group.send_all(record)

    def replaced(self) -> None:
        """Forget the death, because all workers that the process served were replaced."""
        self._death = None

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy.

        If the process has died or hangs, its replacement is seeded.
        """
        record = self.record
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
        record = self.record
        return {
            "pid": record.info.pid,
            "restarts": record.restarts,
            "failure": record.failure,
        }

    def close(self, timeout: float | None) -> None:
        """End the process and leave its engine. Idempotent."""
        self.group.close(timeout)
        self._engine.leave()
