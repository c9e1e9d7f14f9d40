"""A process that calls the policy for workers: watched, seeded, replaced."""

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
"""Why workers are replaced whose policy was called there."""

_NEWS_SECONDS = 10.0  # until one that lives has answered, or is known to be dead


class PolicyServer(ABC):
    """To its engine a worker.

    Args:
        place: tells its random stream from those of other servers; none for the first one.
    """

    def __init__(self, options: RemoteOptions, place: Sequence[int] = ()) -> None:
        self._options, self._place = options, tuple(place)
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None

    @property
    @abstractmethod
    def record(self) -> WorkerRecord:
        """What is known of it, once it was started."""

    @abstractmethod
    def replace(self, death: WorkerDied) -> None:
        """See to it that those whom it served find another one, and can be replaced now.

        After an interrupt it may be called again, and goes on.

        Raises:
            WorkerError: it died too often.
        """

    def death(self) -> WorkerDied | None:
        """How it ended, or that it is given up, as a call takes too long; None: it serves.

        It is told until `replaced` is.
        """
        if self._death is None:
            self._death = self._new_death()
        return self._death

    def has_died(self) -> bool:
        """Whether it has. Others may see that before this process does: it waits until it knows."""
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
        raise AssertionError("a process that is gone has answered")

    def recent_log(self) -> str:
        """The last lines that it logged, as far as they can be had."""
        return self.record.process.recent_log()

    def replaced(self) -> None:
        """Those whom it served were replaced, too."""
        self._death = None

    def seed(self, root: int) -> None:
        """What the policy draws follows from that root from now on, also in another process.

        Where it has ended, or hangs, whoever takes its place is seeded so.
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
        """Of `stats`."""
        record = self.record
        return {
            "pid": record.info.pid,
            "restarts": record.restarts,
            "failure": record.failure,
        }


@dataclass(frozen=True)
class ProcessPlan:
    """What it is made from, and who starts it."""

    plan: WorkerPlan
    engine: Engine


class PolicyProcess(PolicyServer):
    """A process of this machine, the only one of a group of its own.

    Attributes:
        group: of it alone.
    """

    def __init__(self, flow: Flow, options: RemoteOptions, plan: ProcessPlan) -> None:
        super().__init__(options)
        self._engine, self._plan = plan.engine, plan.plan
        self.group = WorkerGroup(flow, plan.engine, options)

    def start(self) -> None:
        """Start it, and wait until it has the policy."""
        self.group.start([self._plan])

    @property
    def record(self) -> WorkerRecord:
        """What is known of it, once it has started."""
        return self.group.present[0]

    def replace(self, death: WorkerDied) -> None:
        """Start another one in its place, with the same weights, and wait until it serves.

        After an interrupt it may be called again, and goes on.

        Raises:
            WorkerError: it died too often.
        """
        record = self.record
        self._stalls.heard_of(record)
        if record.incarnation == death.incarnation or record.process.is_dead:
            self.group.restart(record, death, DIED)
        self.group.await_replaced(record, DIED)
        self.group.give_all(record)

    def close(self, timeout: float | None) -> None:
        """End it, and leave its engine. Idempotent."""
        self.group.close(timeout)
        self._engine.leave()
