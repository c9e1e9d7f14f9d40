"""All inference servers of a collector: on this machine, and one on each other node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pycollect._core import Uninterrupted
from pycollect.data.weights import Weights
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_server import DIED, PolicyProcess, PolicyServer
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.sending import WeightSender
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied, without_frames
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.process import NodeEngine

Newest = Callable[[], "tuple[Weights, int] | None"]
"""The weights that a server is to have when it begins, and their version; None: its own."""


class NodeWeights:
    """Sends weights to servers, packed once for all of them. Any thread may do so."""

    def __init__(self, sender: WeightSender, newest: Newest) -> None:
        self._sender, self._newest = sender, newest
        self._sending = threading.Lock()

    @property
    def given(self) -> Weights:
        """Those that were sent last; none before the first time."""
        return self._sender.newest

    def give(
        self, servers: Sequence[WorkerRecord], weights: Weights, version: int, wait: bool
    ) -> None:
        """Give servers weights; with `wait` those that live have them then."""
        with self._sending:
            sent = self._sender.send(weights, servers, version, wait)
        for server, call in sent if wait else ():
            with suppress(WorkerDied):
                server.handle.answer(call)

    def begin(self, server: WorkerRecord) -> None:
        """Give a server that has just been built the newest, if there are any."""
        newest = self._newest()
        if newest is not None:
            self.give([server], *newest, wait=False)


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
            self._calls[key] = handle.request("policy_client", worker.index)
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
        plan.engine.set_node_policies(self)

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
        plan = self._plan.named(index, role, self._engine.server_options(node, options))
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


class PolicyServers:
    """Who serves which worker, and who has died.

    Args:
        process: for workers of this machine; None: this process serves them, or they themselves.
        nodes: for those of other nodes; None: there are no such workers, or they are served here.
    """

    def __init__(
        self, process: PolicyProcess | None = None, nodes: NodeServers | None = None
    ) -> None:
        self.process, self.nodes = process, nodes
        self._dead: PolicyServer | None = None  # who was told of last

    @property
    def _all(self) -> list[PolicyServer]:
        here = [] if self.process is None else [self.process]
        return [*here, *(() if self.nodes is None else self.nodes.servers)]

    def start(self) -> None:
        """Start the process. Others are started once workers come to their nodes."""
        if self.process is not None:
            self.process.start()

    def dead(self) -> list[tuple[PolicyServer, WorkerDied]]:
        """Those that have died, and how; until they are told that they are replaced."""
        found = [(server, server.death()) for server in self._all]
        return [(server, death) for server, death in found if death is not None]

    def served_by(
        self, server: PolicyServer, workers: Sequence[WorkerRecord]
    ) -> list[WorkerRecord]:
        """Those of these workers to whom that server is all."""
        return [worker for worker in workers if self._server_of(worker) is server]

    def _server_of(self, worker: WorkerRecord) -> PolicyServer | None:
        nodes = () if self.nodes is None else self.nodes.servers
        return next((own for own in nodes if own.serves(worker)), self.process)

    def have_lost(self, worker: WorkerRecord) -> bool:
        """Whether whoever serves that worker has died. Waits a moment for the news of it."""
        server = self._server_of(worker)
        return server is not None and server.has_died()

    def death(self) -> WorkerDied | None:
        """How one of them ended; None: all serve."""
        for server, death in self.dead():
            self._dead = server
            return death
        return None

    def recent_log(self) -> str:
        """The last lines that this one logged, as far as they can be had."""
        return "" if self._dead is None else self._dead.recent_log()

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End those of nodes on which none of these workers is, which are all that there are."""
        if self.nodes is not None:
            self.nodes.end_idle(workers)

    def have_failed(self, failure: str | None) -> bool:
        """Whether that is why one of them was last replaced."""
        return failure is not None and any(own.record.failure == failure for own in self._all)

    def report(self) -> dict[str, Any]:
        """Of `stats`."""
        here = {} if self.process is None else {"server": self.process.report()}
        return here if self.nodes is None else {**here, "node_servers": self.nodes.report()}

    def close_nodes(self, timeout: float | None) -> None:
        """End those of other nodes, before the workers' engine is left. Idempotent."""
        if self.nodes is not None:
            self.nodes.close(timeout)

    def close_process(self, timeout: float | None) -> None:
        """End the process. Idempotent."""
        if self.process is not None:
            self.process.close(timeout)
