"""Weights of a policy that inference servers call for workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollect.data.weights import Weights, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_server import PolicyProcess
from pycollect.driver.policy_servers import NodeServers
from pycollect.driver.records import WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.weights import (
    LivePolicy,
    PolicyCaller,
    PolicyUpdates,
    TargetedWeights,
    for_all,
)


class LiveWeights(LivePolicy):
    """Weights of a policy that the driver calls for workers.

    Workers need no weights. Servers of other nodes call a copy, so they receive the caller's
    weights.

    Args:
        flow: Counters and ids of the stream.
        caller: Calls the policy for all workers.
        policy: The user's policy.
        is_owned: Whether a factory made the policy, so that only the collector has it.
        workers: Returns the ids of the present workers.
        options: How workers are managed.
        nodes: Servers of other nodes; ``None`` if there are none.
    """

    def __init__(
        self,
        flow: Flow,
        caller: PolicyCaller,
        policy: Any,
        is_owned: bool,
        workers: Callable[[], Sequence[int]],
        options: RemoteOptions,
        nodes: NodeServers | None,
    ) -> None:
        super().__init__(flow, caller, policy, is_owned, workers)
        self._options, self._nodes = options, nodes
        self._sent_after = 0  # delivered batches at the last update of the nodes

    def start(self) -> None:
        """Do nothing, because workers need no weights and servers get theirs when they start."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because any worker can use the policy."""

    def served(self, worker: WorkerRecord) -> None:
        """Do nothing, because workers receive no updates."""

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take these weights for all workers, because they share one policy."""
        self.receive(source)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Write weights into the user's policy at once, and send them to servers of other nodes."""
        super().update(source, worker_ids, wait)
        self._send_to_nodes(wait)

    def receive(self, source: Any) -> None:
        """Write weights into the user's policy and send them to other nodes, as no new version."""
        super().receive(source)
        self._send_to_nodes()

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Count one version for weights that the caller writes within the context."""
        with super().one_version():
            yield
        self._send_to_nodes()

    def due(self) -> Sequence[int]:
        """Return all workers if other nodes are due for an update, else none."""
        if self._nodes is None or not self._nodes.servers:
            return ()
        interval = self._options.update_interval
        batches = self._flow.statistics.batches - self._sent_after
        is_due = self._options.update_each or (interval and batches >= interval)
        return self._workers() if is_due else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the user's weights to other nodes as a new version, unless they have the same."""
        weights = self.current()
        if self._nodes is None or not self._sends or not weights:
            return
        sent = self._nodes.weights
        if not sent or not weights.equal(sent):
            self._flow.version.count()
            self._send_to_nodes()

    def resume(self, state: CollectorState) -> None:
        """Send the weights of a resumed state, which the user's policy holds, to all servers."""
        self.renew_copy()
        self._send_to_nodes()

    def _send_to_nodes(self, wait: bool = False) -> None:
        if self._nodes is not None and self._sends:
            self._sent_after = self._flow.statistics.batches
            self._nodes.send(self.current(), self._flow.version.number, wait)


class ServerWeights(PolicyUpdates):
    """Weights of a policy that an inference process calls for workers, perhaps with node servers.

    Args:
        flow: Counters and ids of the stream.
        process: The inference process.
        nodes: Servers of other nodes; ``None`` if there are none.
        options: How workers are managed.
        policy: The caller's policy, or ``None``.
        workers: Returns the ids of the present workers.
    """

    def __init__(
        self,
        flow: Flow,
        process: PolicyProcess,
        nodes: NodeServers | None,
        options: RemoteOptions,
        policy: Any,
        workers: Callable[[], Sequence[int]],
    ) -> None:
        super().__init__(flow, process.group, options, policy)
        self._process, self._nodes, self._workers = process, nodes, workers

    def start(self) -> None:
        """Send the weights of this process's policy to servers that built theirs from a factory."""
        super().start()
        if self._process.group.weights.newest:
            self._send_to_nodes(self._process.group.weights.newest, self._flow.version.number)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send all servers weights from a source; ``None`` sends the policy's."""
        super().update(for_all(source, worker_ids, self._workers()), None, wait)

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because workers need no weights."""

    def served(self, worker: WorkerRecord) -> None:
        """Count a delivered batch of any worker."""
        self._process.record.since_update += 1
        super().served(self._process.record)

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take these weights for all workers, because they share one policy."""
        self.receive(source)

    def due(self) -> Sequence[int]:
        """Return all workers if an automatic update is due, else none."""
        return self._workers() if super().due() else ()

    def resume(self, state: CollectorState) -> None:
        """Send the weights and version of a state to all servers."""
        if state.policy:
            record, version = self._process.record, state.policy_version
            self._process.group.weights.send(state.policy, [record], version)
            self._send_to_nodes(state.policy, version)

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to all servers, unless they have the same."""
        sent = self._first.updated(self._process.group.weights.newest)
        if not weights_of(self._policy).equal(sent):
            super().push([self._process.record.index])

    def _push(
        self, targets: Sequence[TargetedWeights], acknowledge: bool, individual: bool = False
    ) -> list[tuple[WorkerRecord, Any]]:
        sent = super()._push(targets, acknowledge, individual)
        for weights, _ in targets:
            self._send_to_nodes(weights, self._flow.version.number, acknowledge)
        return sent

    def _send_to_nodes(self, weights: Weights, version: int, wait: bool = False) -> None:
        if self._nodes is not None:
            self._nodes.send(weights, version, wait)
