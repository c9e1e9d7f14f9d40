"""The weights of a policy that is called for workers, wherever it is called."""

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
from pycollect.driver.weights import Gift, LivePolicy, PolicyCaller, PolicyUpdates, for_all


class LiveWeights(LivePolicy):
    """A live policy's weights, for workers that come and go: none of them is given any.

    Servers of other nodes are: they get the caller's, as workers do that have a copy.

    Args:
        is_ours: nobody else has it: a factory made it.
        workers: tells the ids of those that there are.
        nodes: these servers; None: there are none.
    """

    def __init__(
        self,
        flow: Flow,
        caller: PolicyCaller,
        policy: Any,
        is_ours: bool,
        workers: Callable[[], Sequence[int]],
        options: RemoteOptions,
        nodes: NodeServers | None,
    ) -> None:
        super().__init__(flow, caller, policy, is_ours, workers)
        self._options, self._nodes = options, nodes
        self._given_after = 0  # batches

    def start(self) -> None:
        """They have none to begin with, or what there is."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """They fit any worker."""

    def served(self, worker: WorkerRecord) -> None:
        """Nobody is owed an update."""

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Whoever brings weights for one worker brings them for all."""
        self.receive(source)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Write them into the caller's policy, at once, and give them to other nodes."""
        super().update(source, worker_ids, wait)
        self._give(wait)

    def receive(self, source: Any) -> None:
        """Write them into the caller's policy, and give them to other nodes, as no new version."""
        super().receive(source)
        self._give()

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Whoever gives weights within writes into the caller's policy himself."""
        with super().one_version():
            yield
        self._give()

    def due(self) -> Sequence[int]:
        """All, where it is time and some are on other nodes; else nobody: they are live."""
        if self._nodes is None or not self._nodes.servers:
            return ()
        every = self._options.update_interval
        batches = self._flow.statistics.batches - self._given_after
        is_time = self._options.update_each or (every and batches >= every)
        return self._workers() if is_time else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Give other nodes the caller's, as a new version, unless they have the same."""
        weights = self.current()
        if self._nodes is None or not self._sends or not weights:
            return
        has = self._nodes.weights
        if not has or not weights.equal(has):
            self._flow.version.count()
            self._give()

    def resume(self, state: CollectorState) -> None:
        """The caller's policy has a state's weights."""
        self.renew_copy()
        self._give()

    def _give(self, wait: bool = False) -> None:
        if self._nodes is not None and self._sends:
            self._given_after = self._flow.statistics.batches
            self._nodes.give(self.current(), self._flow.version.number, wait)


class ServerWeights(PolicyUpdates):
    """The weights of a policy that a process of its own calls for workers, or servers of nodes.

    Args:
        process: that does.
        nodes: these servers; None: there are none.
        workers: tells the ids of those that there are.
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
        """Whoever built its policy gets the weights of the one that is here beside."""
        super().start()
        if self._process.group.weights.newest:
            self._give(self._process.group.weights.newest, self._flow.version.number)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Give all servers weights from a source; None: the policy's."""
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
        """All servers get a state's weights, and its version."""
        if state.policy:
            record, version = self._process.record, state.policy_version
            self._process.group.weights.send(state.policy, [record], version)
            self._give(state.policy, version)

    def push(self, worker_ids: Sequence[int]) -> None:
        """Give all servers the policy's, as `PolicyUpdates.push`, unless they have the same."""
        has = self._first.updated(self._process.group.weights.newest)
        if not weights_of(self._policy).equal(has):
            super().push([self._process.record.index])

    def _push(
        self, gifts: Sequence[Gift], acknowledge: bool, own: bool = False
    ) -> list[tuple[WorkerRecord, Any]]:
        sent = super()._push(gifts, acknowledge, own)
        for weights, _ in gifts:
            self._give(weights, self._flow.version.number, acknowledge)
        return sent

    def _give(self, weights: Weights, version: int, wait: bool = False) -> None:
        if self._nodes is not None:
            self._nodes.give(weights, version, wait)
