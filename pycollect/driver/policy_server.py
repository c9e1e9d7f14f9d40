"""A process that calls the policy for workers: how it is watched, seeded and replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import StallDetector, WorkerPlan, WorkerRecord
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied, without_frames
from pycollect.transport.process import Engine

DIED = "server_died"
"""Reason for lost frames of workers whose inference server died."""

_NEWS_SECONDS = 10.0  # maximum time until a live server answers, or its death is known


class PolicyServer(ABC):
    """An inference server in another process, which its engine treats as a worker.

    Args:
        options: How workers are managed.
        place: Distinguishes its random stream from those of other servers; empty for the first one.
    """

    def __init__(self, options: RemoteOptions, place: Sequence[int] = ()) -> None:
        self._options, self._place = options, tuple(place)
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None

    @property
    @abstractmethod
    def record(self) -> WorkerRecord:
        """Record of the server, once it was started."""

    @abstractmethod
    def replace(self, death: WorkerDied) -> None:
        """Make the server's workers ready to be replaced: start another server, or end this one.

        It may be called again after an interrupt, and then continues.

        Raises:
            WorkerError: The server died too often.
        """

    def death(self) -> WorkerDied | None:
        """Return the error of a server that died or stalled in a call, or ``None`` if it serves.

        The error is returned until `replaced` is called.
        """
        if self._death is None:
            self._death = self._new_death()
        return self._death

    def has_died(self) -> bool:
        """Return whether the server has died; wait until this process knows it.

        Workers can see its death earlier than this process.
        """
        record = self.record
        if self.death() is None and not record.starting:
            call = record.handle.request("steps")
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
            record.handle.answer(record.handle.request("steps"))
        except WorkerDied as death:
            return without_frames(death)
        raise AssertionError("handle: expected WorkerDied from an ended process, got an answer")

    def recent_log(self) -> str:
        """Return the last lines that the server logged, as far as they are available."""
        return self.record.process.recent_log()

    def replaced(self) -> None:
        """Forget the death, because all workers of the server were replaced."""
        self._death = None

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy.

        If the server has died or hangs, its replacement is seeded.
        """
        record = self.record
        record.initial_call = ("set_seed", self._place, root)
        if record.starting:
            return
        call = record.handle.request(*record.initial_call)
        while not record.handle.await_answer(call, self._stalls.next_check):
            if self.death() is not None:
                return
        with suppress(WorkerDied):
            record.handle.answer(call)

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` about the server."""
        record = self.record
        return {
            "pid": record.info.pid,
            "restarts": record.restarts,
            "failure": record.failure,
        }


@dataclass(frozen=True)
class ProcessPlan:
    """Plan of an inference process, and the engine that starts it."""

    plan: WorkerPlan
    engine: Engine


class PolicyProcess(PolicyServer):
    """An inference process on this machine.

    Attributes:
        group: Worker group that contains only this process.
    """

    def __init__(self, flow: Flow, options: RemoteOptions, plan: ProcessPlan) -> None:
        super().__init__(options)
        self._engine, self._plan = plan.engine, plan.plan
        self.group = WorkerGroup(flow, plan.engine, options)

    def start(self) -> None:
        """Start the process, and wait until it has the policy."""
        self.group.start([self._plan])

    @property
    def record(self) -> WorkerRecord:
        """Record of the process, once it was started."""
        return self.group.present[0]

    def replace(self, death: WorkerDied) -> None:
        """Start a replacement with the same weights, and wait until it serves.

        It may be called again after an interrupt, and then continues.

        Raises:
            WorkerError: The process died too often.
        """
        record = self.record
        self._stalls.note_progress(record)
        if record.incarnation == death.incarnation or record.process.is_dead:
            self.group.restart(record, death, DIED)
        self.group.await_replaced(record, DIED)
        self.group.send_all(record)

    def close(self, timeout: float | None) -> None:
        """End the process and leave its engine. Idempotent."""
        self.group.close(timeout)
        self._engine.leave()
