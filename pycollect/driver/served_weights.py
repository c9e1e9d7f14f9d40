"""Weights of a policy that an inference server calls for workers.

Workers that share no memory with the driver call copies of the policy, which need the weights too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollect.data.weights import Weights, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_server import PolicyProcess
from pycollect.driver.records import WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.weights import (
    LivePolicy,
    PolicyCaller,
    PolicyUpdates,
    await_weights,
    for_all,
)
from pycollect.driver.workers import WorkerGroup


class PolicyCopies:
    """Copies of a policy in workers that share no memory with the driver.

    Args:
        flow: Counters and ids of the stream.
        group: All workers. Those that a server serves have no weights.
    """

    def __init__(self, flow: Flow, group: WorkerGroup) -> None:
        self._flow, self._group = flow, group
        self._sent_after = 0  # delivered batches at the last update

    @property
    def workers(self) -> list[WorkerRecord]:
        """The built workers that have a copy."""
        return [own for own in self._group.present if not (own.starting or own.in_place)]

    def send(
        self,
        weights: Weights,
        version: int,
        acknowledge: bool = False,
        workers: Sequence[WorkerRecord] | None = None,
    ) -> list[tuple[WorkerRecord, Any]]:
        """Send weights to copies; return the workers and calls that can be awaited.

        Args:
            weights: The weights.
            version: Policy version of the weights.
            acknowledge: Whether the workers must confirm that they have the weights.
            workers: Workers with a copy; ``None`` means all.
        """
        chosen = self.workers if workers is None else [own for own in workers if not own.in_place]
        if not chosen:
            return []
        self._sent_after = self._flow.statistics.batches
        return self._group.weights.send(weights, chosen, version, acknowledge)

    def have(self, weights: Weights) -> bool:
        """Return whether the copies have these weights."""
        sent = self._group.weights.newest
        return bool(sent) and weights.equal(sent)

    @property
    def batches_since_update(self) -> int:
        """Number of delivered batches since the last update."""
        return self._flow.statistics.batches - self._sent_after


class LiveWeights(LivePolicy):
    """Weights of a policy that the driver calls for workers.

    Args:
        flow: Counters and ids of the stream.
        caller: Calls the policy for all workers.
        policy: The user's policy.
        is_owned: Whether a factory made the policy, so that only the collector has it.
        group: The workers.
        options: How workers are managed.
    """

    def __init__(
        self,
        flow: Flow,
        caller: PolicyCaller,
        policy: Any,
        is_owned: bool,
        group: WorkerGroup,
        options: RemoteOptions,
    ) -> None:
        super().__init__(flow, caller, policy, is_owned, group.ids)
        self._options, self._copies = options, PolicyCopies(flow, group)
        self._sending = threading.Lock()

    def start(self) -> None:
        """Send the weights to copies, because a factory may have made them with others."""
        self._send_to_copies()

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the user's weights, if it has a copy."""
        self._send_to_copies(workers=[worker])

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because any worker can use the policy."""

    def served(self, worker: WorkerRecord) -> None:
        """Do nothing, because workers that are served receive no updates."""

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take these weights for all workers, because they share one policy."""
        self.receive(source)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Write weights into the user's policy at once, and send them to copies."""
        super().update(source, worker_ids, wait)
        sent = self._send_to_copies(wait)
        if wait:
            await_weights(sent)

    def receive(self, source: Any) -> None:
        """Write weights into the user's policy and send them to copies, as no new version."""
        super().receive(source)
        self._send_to_copies()

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Count one version for weights that the caller writes within the context."""
        with super().one_version():
            yield
        self._send_to_copies()

    def due(self) -> Sequence[int]:
        """Return all workers if copies are due for an update, else none."""
        if not self._copies.workers:
            return ()
        interval = self._options.update_interval
        is_due = interval and self._copies.batches_since_update >= interval
        return self._workers() if self._options.update_each or is_due else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the user's weights to copies as a new version, unless they have the same."""
        if not (self._sends and self._copies.workers):
            return
        weights = self.current()
        if weights and not self._copies.have(weights):
            self._flow.version.count()
            self._send_to_copies()

    def resume(self, state: CollectorState) -> None:
        """Send the weights of a resumed state, which the user's policy holds."""
        self.renew_copy()
        self._send_to_copies()

    def _send_to_copies(
        self, acknowledge: bool = False, workers: Sequence[WorkerRecord] | None = None
    ) -> list[tuple[WorkerRecord, Any]]:
        if not (self._sends and self._copies.workers):
            return []
        with self._sending:  # any thread may update; the newest weights must be sent last
            version = self._flow.version.number
            return self._copies.send(self.current(), version, acknowledge, workers)


class ServerWeights(PolicyUpdates):
    """Weights of a policy that an inference process calls for workers.

    Args:
        flow: Counters and ids of the stream.
        process: The inference process.
        group: The workers.
        options: How workers are managed.
        policy: The caller's policy, or ``None``.
    """

    def __init__(
        self,
        flow: Flow,
        process: PolicyProcess,
        group: WorkerGroup,
        options: RemoteOptions,
        policy: Any,
    ) -> None:
        super().__init__(flow, process.group, options, policy)
        self._process, self._workers = process, group.ids
        self._copies = PolicyCopies(flow, group)

    def start(self) -> None:
        """Send the weights of this process's policy to all that built theirs from a factory."""
        super().start()
        if newest := self._process.group.weights.newest:
            self._copies.send(newest, self._flow.version.number)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send the process and all copies weights from a source; ``None`` sends the policy's."""
        super().update(for_all(source, worker_ids, self._workers()), None, wait)

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the weights that were sent to the process, if it has a copy."""
        if newest := self._process.group.weights.newest:
            self._copies.send(newest, self._flow.version.number, workers=[worker])

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because workers that are served need no weights."""

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
        """Send the weights and version of a state to the process and to all copies."""
        if state.policy:
            record, version = self._process.record, state.policy_version
            self._process.group.weights.send(state.policy, [record], version)
            self._copies.send(state.policy, version)

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to the process and all copies, unless they have the same."""
        sent = self._first.updated(self._process.group.weights.newest)
        if not weights_of(self._policy).equal(sent):
            super().push([self._process.record.index])

    def _send_to_copies(
        self, weights: Weights, acknowledge: bool
    ) -> Sequence[tuple[WorkerRecord, Any]]:
        return self._copies.send(weights, self._flow.version.number, acknowledge)
