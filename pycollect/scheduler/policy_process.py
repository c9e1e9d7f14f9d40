"""The process that calls the policy for the workers of this machine: started, replaced."""

from __future__ import annotations

from dataclasses import dataclass

from pycollect.engines.protocol import Engine
from pycollect.errors import WorkerDied
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.policy_server import DIED, PolicyServer
from pycollect.scheduler.records import WorkerPlan, WorkerRecord
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.flow import Flow


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
