"""Who calls the policy for workers on other nodes than the driver's: one server for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycollect._core import Uninterrupted
from pycollect.batch.weights import Weights
from pycollect.engines.messages import WorkerSpec
from pycollect.engines.protocol import NodeEngine
from pycollect.errors import WorkerDied, without_frames
from pycollect.scheduler.node_weights import Newest, NodeWeights
from pycollect.scheduler.options import RemoteOptions
from pycollect.scheduler.policy_server import DIED, PolicyServer
from pycollect.scheduler.records import WorkerPlan, WorkerRecord
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.flow import Flow


@dataclass(frozen=True)
class NodePlan:
    """What the servers of other nodes are made from, and who starts them.

    Attributes:
        plan: makes it, once there is a worker on another node; it raises what does not pickle.
    """

    plan: Callable[[], WorkerPlan]
    engine: NodeEngine


class NodeServer(PolicyServer):
    """The server of one node. It is started once a worker there needs it, also after its death.

    So it is not started on a node that was lost: whoever takes its workers' places may be
    elsewhere.

    Args:
        group: whose engine starts it.
        record: of it, which has been started.
        weights: gives it the newest.

    Attributes:
        was_built: so that there is something to be told of it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        options: RemoteOptions,
        record: WorkerRecord,
        weights: NodeWeights,
    ) -> None:
        super().__init__(options, [-record.index])
        self._group, self._record, self._weights = group, record, weights
        self.was_built = False
        self._end: WorkerDied | None = None  # until another one is started
        self._calls: dict[tuple[int, int], Any] = {}  # for seats, by worker and incarnation
        self._seated: dict[int, int] = {}  # the incarnation of each worker that has a seat

    @property
    def record(self) -> WorkerRecord:
        """What is known of it."""
        return self._record

    @property
    def is_there(self) -> bool:
        """Whether it is built, and has not ended as far as is known."""
        return self.was_built and self._end is None and not self._record.starting

    def serves(self, worker: WorkerRecord) -> bool:
        """Whether that worker, in its present incarnation, was told to ask here."""
        return self._seated.get(worker.index) == worker.incarnation

    def may_serve(self, worker: WorkerRecord) -> bool:
        """Whether it does so, or may do so soon: where one that starts will be is not known."""
        return worker.starting is not None or self.serves(worker)

    def death(self) -> WorkerDied | None:
        """See :meth:`PolicyServer.death`; None also where all know of it."""
        return None if self._end is not None else super().death()

    def replace(self, death: WorkerDied) -> None:
        """End what is left of it. Another one is started once a worker comes."""
        self._stalls.heard_of(self._record)
        self._record.failure = f"{DIED}: {death}"
        self._record.process.kill()

    def replaced(self) -> None:
        """Those whom it served were replaced, too."""
        self._end = self._death
        super().replaced()

    def policy_for(self, worker: WorkerSpec) -> bytes | None:
        """What stands for the policy in a worker, which sits here from then on; None: not yet.

        Raises:
            WorkerDied: it ended before it was built; or what its policy raised.
            WorkerError: it died too often.
        """
        if self._end is not None:
            self._start_anew(self._end)
        if self.death() is not None or not self._has_begun():
            return None  # whom it served is told first
        seat = self._seat(worker)
        if seat is not None:
            self._seated[worker.index] = worker.incarnation
        return seat

    def _start_anew(self, end: WorkerDied) -> None:
        self._calls.clear()
        self._group.restart(self._record, end, DIED)
        self._end = None

    def _has_begun(self) -> bool:
        """Whether it has its policy, and the newest weights. Does not wait."""
        record = self._record
        if record.starting is None:
            return True
        overdue = self._group.is_overdue(record)
        if not (overdue or record.starting.has_answer or record.starting.is_dead):
            return False
        with Uninterrupted():  # it is never there without its weights
            try:
                self._group.take(record)
            except Exception as error:
                self._end = without_frames(_as_death(record, error))
                record.process.kill()
                raise
            self.was_built = True
            self._weights.begin(record)
        return True

    def _seat(self, worker: WorkerSpec) -> bytes | None:
        handle, key = self._record.handle, (worker.index, worker.incarnation)
        if key not in self._calls:
            self._calls[key] = handle.request("seat", worker.index)
        if not handle.await_answer(self._calls[key], 0.0):
            return None
        with suppress(WorkerDied):  # whoever looks after it will see that
            seat: bytes = handle.answer(self._calls.pop(key))
            return seat
        return None

    def report(self) -> dict[str, Any]:
        """Of `stats`."""
        return {"node": self._record.info.node, **super().report()}


class NodeServers:
    """Those of all other nodes on which workers of one collector are.

    Args:
        newest: of weights.
    """

    def __init__(
        self,
        flow: Flow,
        options: RemoteOptions,
        plan: NodePlan,
        newest: Newest,
    ) -> None:
        self._options = options
        self._make_plan, self._engine = plan.plan, plan.engine
        self._plan: WorkerPlan | None = None
        self._group = WorkerGroup(flow, plan.engine, options)
        self._weights = NodeWeights(self._group.weights, newest)
        self._servers: dict[str, NodeServer] = {}  # a new one for each change: others read it
        self._started = 0
        self._root: int | None = None
        plan.engine.serve_by(self)

    def policy_at(self, node: str, spec: WorkerSpec, options: Mapping[str, Any]) -> bytes | None:
        """What stands for the policy in a worker that has come to a node, pickled; None: not yet.

        The node's server is started where there is none. Raises as `NodeServer.policy_for`.
        """
        if node not in self._servers:
            self._servers = {**self._servers, node: self._start(node, options)}
        return self._servers[node].policy_for(spec)

    def _start(self, node: str, options: Mapping[str, Any]) -> NodeServer:
        self._plan = self._plan or self._make_plan()
        self._started += 1  # each has an id and a random stream of its own
        index = self._plan.spec.index - self._started
        role = f"policy server on node {node[:8]}"
        plan = self._plan.named(index, role, self._engine.options_on(node, options))
        record = self._group.begin(plan)
        server = NodeServer(self._group, self._options, record, self._weights)
        if self._root is not None:
            server.seed(self._root)
        return server

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End those that none of these workers needs, which are all that there are."""
        served = {
            node: own
            for node, own in self._servers.items()
            if any(own.may_serve(worker) for worker in workers)
        }
        idle = [own for own in self.servers if own not in served.values()]
        self._servers = served
        for server in idle:  # what it holds ends with its process
            server.record.process.kill()

    @property
    def servers(self) -> Sequence[NodeServer]:
        """One for each node on which there are workers, or may be soon."""
        return list(self._servers.values())

    @property
    def weights(self) -> Weights:
        """Those that were given to them last; none before the first time."""
        return self._weights.given

    def give(self, weights: Weights, version: int, wait: bool = False) -> None:
        """Give them weights; with `wait` those that live have them then.

        Any thread may call it. Who begins later gets the newest by then.
        """
        there = [server.record for server in self.servers if server.is_there]
        if there:
            self._weights.give(there, weights, version, wait)

    def seed(self, root: int) -> None:
        """What the policy draws on each node follows from that root from now on."""
        self._root = root
        for server in self.servers:
            server.seed(root)

    def report(self) -> dict[str, Any]:
        """Of `stats`: what is known of each, by Ray's id of its node."""
        servers = dict(self._servers)
        return {node: own.report() for node, own in servers.items() if own.was_built}

    def close(self, timeout: float | None) -> None:
        """End them. Idempotent."""
        self._engine.wait_closed([own.record.process for own in self.servers], timeout)


def _as_death(record: WorkerRecord, error: Exception) -> WorkerDied:
    """How one ended that could not be built."""
    if isinstance(error, WorkerDied):
        return error
    text = f"{record.plan.spec.name} raised {type(error).__name__}: {error}"
    return WorkerDied(text, record.index, record.incarnation, "")
