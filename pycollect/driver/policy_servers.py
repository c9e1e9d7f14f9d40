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

NewestWeights = Callable[[], "tuple[Weights, int] | None"]
"""Returns weights and version for a server that starts, or ``None`` to keep its own weights."""


class NodeWeights:
    """Sends weights to servers, packed once for all of them. Any thread may do so."""

    def __init__(self, sender: WeightSender, newest: NewestWeights) -> None:
        self._sender, self._get_newest = sender, newest
        self._sending = threading.Lock()

    @property
    def newest(self) -> Weights:
        """The weights that were sent last; empty before the first update."""
        return self._sender.newest

    def send(
        self, servers: Sequence[WorkerRecord], weights: Weights, version: int, wait: bool
    ) -> None:
        """Send weights to servers; with `wait`, return only after all live servers have them."""
        with self._sending:
            sent = self._sender.send(weights, servers, version, wait)
        for server, call in sent if wait else ():
            with suppress(WorkerDied):
                server.handle.answer(call)

    def initialize(self, server: WorkerRecord) -> None:
        """Send the newest weights, if there are any, to a server that has just been built."""
        newest = self._get_newest()
        if newest is not None:
            self.send([server], *newest, wait=False)


@dataclass(frozen=True)
class NodePlan:
    """Plan of the servers of other nodes, and the engine that starts them.

    Attributes:
        plan: Makes the plan when the first worker is on another node; raises if the policy cannot
            be pickled.
        engine: Starts the servers.
    """

    plan: Callable[[], WorkerPlan]
    engine: NodeEngine


class NodeServer(PolicyServer):
    """The inference server of one node, started or restarted when a worker there needs it.

    A dead server is not restarted at once, because its node may be lost and the replacements of its
    workers may be on other nodes.

    Args:
        group: Worker group whose engine starts the server.
        options: How workers are managed.
        record: Record of the started server.
        weights: Sends the newest weights to the server.

    Attributes:
        was_built: Whether the server was ever built, so that `stats` can report it.
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
        self._end: WorkerDied | None = None  # death of the server, until it is restarted
        self._calls: dict[tuple[int, int], Any] = {}  # open requests, by worker and incarnation
        self._clients: dict[int, int] = {}  # incarnation of each worker that is a client

    @property
    def record(self) -> WorkerRecord:
        """Record of the server."""
        return self._record

    @property
    def is_running(self) -> bool:
        """Whether the server is built, and has not ended as far as is known."""
        return self.was_built and self._end is None and not self._record.starting

    def serves(self, worker: WorkerRecord) -> bool:
        """Return whether that worker, in its present incarnation, is a client of this server."""
        return self._clients.get(worker.index) == worker.incarnation

    def may_serve(self, worker: WorkerRecord) -> bool:
        """Return whether the worker is, or may become, a client; it may start on any node."""
        return worker.starting is not None or self.serves(worker)

    def death(self) -> WorkerDied | None:
        """See :meth:`PolicyServer.death`; ``None`` if the death was handled already."""
        return None if self._end is not None else super().death()

    def replace(self, death: WorkerDied) -> None:
        """End the server. It is restarted when a worker needs it."""
        self._stalls.note_progress(self._record)
        self._record.failure = f"{DIED}: {death}"
        self._record.process.kill()

    def replaced(self) -> None:
        """Remember the death until the server is restarted; all its workers were replaced."""
        self._end = self._death
        super().replaced()

    def policy_for(self, worker: WorkerSpec) -> bytes | None:
        """Return the pickled policy client for a worker, which is a client from then on.

        The result is ``None`` as long as the server is not ready.

        Raises:
            WorkerDied: The server died before it was built.
            WorkerError: The server died too often.
            Exception: Building the policy raised it.
        """
        if self._end is not None:
            self._restart(self._end)
        if self.death() is not None or not self._is_ready():
            return None  # after a death, the clients must be replaced first
        client = self._client_for(worker)
        if client is not None:
            self._clients[worker.index] = worker.incarnation
        return client

    def _restart(self, end: WorkerDied) -> None:
        self._calls.clear()
        self._group.restart(self._record, end, DIED)
        self._end = None

    def _is_ready(self) -> bool:
        """Return whether the server has its policy and the newest weights. Does not wait."""
        record = self._record
        if record.starting is None:
            return True
        overdue = self._group.is_overdue(record)
        if not (overdue or record.starting.has_answer or record.starting.is_dead):
            return False
        with Uninterrupted():  # a running server must always have the weights
            try:
                self._group.take(record)
            except Exception as error:
                self._end = without_frames(_as_death(record, error))
                record.process.kill()
                raise
            self.was_built = True
            self._weights.initialize(record)
        return True

    def _client_for(self, worker: WorkerSpec) -> bytes | None:
        handle, key = self._record.handle, (worker.index, worker.incarnation)
        if key not in self._calls:
            self._calls[key] = handle.request("policy_client", worker.index)
        if not handle.await_answer(self._calls[key], 0.0):
            return None
        with suppress(WorkerDied):  # the next check of the servers will find it
            client: bytes = handle.answer(self._calls.pop(key))
            return client
        return None

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` about the server."""
        return {"node": self._record.info.node, **super().report()}


class NodeServers:
    """The inference servers of all other nodes that have workers of one collector.

    Args:
        flow: Counters and ids of the stream.
        options: How workers are managed.
        plan: Plan of the servers.
        newest: Returns the weights for a server that starts.
    """

    def __init__(
        self,
        flow: Flow,
        options: RemoteOptions,
        plan: NodePlan,
        newest: NewestWeights,
    ) -> None:
        self._options = options
        self._make_plan, self._engine = plan.plan, plan.engine
        self._plan: WorkerPlan | None = None
        self._group = WorkerGroup(flow, plan.engine, options)
        self._weights = NodeWeights(self._group.weights, newest)
        self._servers: dict[str, NodeServer] = {}  # replaced, not changed: other threads read it
        self._started = 0
        self._root: int | None = None
        plan.engine.set_node_policies(self)

    def policy_at(self, node: str, spec: WorkerSpec, options: Mapping[str, Any]) -> bytes | None:
        """Return the pickled policy client for a worker on a node, or ``None`` if it is not ready.

        If the node has no server, it is started. Raises the errors of `NodeServer.policy_for`.
        """
        if node not in self._servers:
            self._servers = {**self._servers, node: self._start(node, options)}
        return self._servers[node].policy_for(spec)

    def _start(self, node: str, options: Mapping[str, Any]) -> NodeServer:
        self._plan = self._plan or self._make_plan()
        self._started += 1  # each server has its own id and random stream
        index = self._plan.spec.index - self._started
        role = f"policy server on node {node[:8]}"
        plan = self._plan.named(index, role, self._engine.server_options(node, options))
        record = self._group.begin(plan)
        server = NodeServer(self._group, self._options, record, self._weights)
        if self._root is not None:
            server.seed(self._root)
        return server

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End the servers that none of these workers, which are all workers, needs."""
        served = {
            node: server
            for node, server in self._servers.items()
            if any(server.may_serve(worker) for worker in workers)
        }
        idle = [server for server in self.servers if server not in served.values()]
        self._servers = served
        for server in idle:
            server.record.process.kill()

    @property
    def servers(self) -> Sequence[NodeServer]:
        """One server for each node that has workers, or may have some soon."""
        return list(self._servers.values())

    @property
    def weights(self) -> Weights:
        """The weights that were sent last; empty before the first update."""
        return self._weights.newest

    def send(self, weights: Weights, version: int, wait: bool = False) -> None:
        """Send weights to all servers; with `wait`, return only after all live servers have them.

        Any thread may call it. Servers that start later get the weights that are newest then.
        """
        running = [server.record for server in self.servers if server.is_running]
        if running:
            self._weights.send(running, weights, version, wait)

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy on each node."""
        self._root = root
        for server in self.servers:
            server.seed(root)

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` about the servers, by Ray's node id."""
        servers = dict(self._servers)
        return {node: server.report() for node, server in servers.items() if server.was_built}

    def close(self, timeout: float | None) -> None:
        """End all servers. Idempotent."""
        self._engine.wait_closed([server.record.process for server in self.servers], timeout)


def _as_death(record: WorkerRecord, error: Exception) -> WorkerDied:
    """Return the error of a server that could not be built as a WorkerDied."""
    if isinstance(error, WorkerDied):
        return error
    text = f"{record.plan.spec.name} raised {type(error).__name__}: {error}"
    return WorkerDied(text, record.index, record.incarnation, "")


class PolicyServers:
    """The inference servers of a collector, the workers that they serve, and their deaths.

    Args:
        process: Inference process of this machine; ``None`` if this process or the workers call the
            policy.
        nodes: Servers of other nodes; ``None`` if there are none.
    """

    def __init__(
        self, process: PolicyProcess | None = None, nodes: NodeServers | None = None
    ) -> None:
        self.process, self.nodes = process, nodes
        self._dead: PolicyServer | None = None  # the server whose death was reported last

    @property
    def _all(self) -> list[PolicyServer]:
        local = [] if self.process is None else [self.process]
        return [*local, *(() if self.nodes is None else self.nodes.servers)]

    def start(self) -> None:
        """Start the process. Servers of other nodes start when workers need them."""
        if self.process is not None:
            self.process.start()

    def dead(self) -> list[tuple[PolicyServer, WorkerDied]]:
        """Return the dead servers and their errors, until each server's `replaced` is called."""
        found = [(server, server.death()) for server in self._all]
        return [(server, death) for server, death in found if death is not None]

    def served_by(
        self, server: PolicyServer, workers: Sequence[WorkerRecord]
    ) -> list[WorkerRecord]:
        """Return the workers that this server serves."""
        return [worker for worker in workers if self._server_of(worker) is server]

    def _server_of(self, worker: WorkerRecord) -> PolicyServer | None:
        nodes = () if self.nodes is None else self.nodes.servers
        return next((server for server in nodes if server.serves(worker)), self.process)

    def have_lost(self, worker: WorkerRecord) -> bool:
        """Return whether the server of that worker has died; wait briefly until this is known."""
        server = self._server_of(worker)
        return server is not None and server.has_died()

    def death(self) -> WorkerDied | None:
        """Return the error of a dead server, or ``None`` if all serve."""
        for server, death in self.dead():
            self._dead = server
            return death
        return None

    def recent_log(self) -> str:
        """Return the last lines that the dead server logged, as far as they are available."""
        return "" if self._dead is None else self._dead.recent_log()

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End the node servers that none of these workers, which are all workers, needs."""
        if self.nodes is not None:
            self.nodes.end_idle(workers)

    def have_failed(self, failure: str | None) -> bool:
        """Return whether this is the reason of a server's last replacement."""
        return failure is not None and any(server.record.failure == failure for server in self._all)

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` about the servers."""
        local = {} if self.process is None else {"server": self.process.report()}
        return local if self.nodes is None else {**local, "node_servers": self.nodes.report()}

    def close_nodes(self, timeout: float | None) -> None:
        """End the servers of other nodes, before the workers' engine is left. Idempotent."""
        if self.nodes is not None:
            self.nodes.close(timeout)

    def close_process(self, timeout: float | None) -> None:
        """End the process on this machine. Idempotent."""
        if self.process is not None:
            self.process.close(timeout)
