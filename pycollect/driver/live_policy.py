"""A policy that is called in the caller's process, for a worker there or for workers elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pycollect.checks import check_open, no_weights_given
from pycollect.data.weights import Weights, check_loads, load_weights, weights_from, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_place import PolicyPlace, await_weights, copies_among, for_all
from pycollect.driver.records import WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.workers import WorkerGroup
from pycollect.policy.device import PolicyStream
from pycollect.worker.worker import Worker

if TYPE_CHECKING:  # at run time, imported only for central inference
    from pycollect.inference.server import InferenceServer


class LivePolicy(PolicyPlace):
    """A policy that is called in the caller's process, so that it has new weights at once.

    Args:
        flow: Counters and ids of the stream.
        caller: Calls the policy. It has a copy if that is on another device.
        policy: The user's policy.
        is_owned: Whether a factory made the policy, so that only the collector has it.
        workers: Returns the ids of the present workers.
    """

    def __init__(
        self,
        flow: Flow,
        caller: Worker | InferenceServer,
        policy: Any,
        is_owned: bool,
        workers: Callable[[], Sequence[int]],
    ) -> None:
        self._flow, self._caller = flow, caller
        self.policy, self._is_owned, self._workers = policy, is_owned, workers
        self._sends = flow.options.sends

    def current(self) -> Weights:
        """Return the weights of the user's policy."""
        return weights_of(self.policy)

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless the weights fit the policy."""
        check_loads(self.policy, weights)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Write weights into the user's policy at once, and count a policy version."""
        check_open(self._flow.closed)
        source = for_all(source, worker_ids, self._workers())
        if source is None and self._is_owned and self._sends:
            raise no_weights_given()
        with self._flow.policy_stream.ordered():
            if self._sends:
                self._load(source)
            self.renew_copy()
        self._flow.version.count()

    def receive(self, source: Any) -> None:
        """Write weights into the user's policy without counting a version."""
        with self._flow.policy_stream.ordered():
            self._load(source)
            self.renew_copy()

    def _load(self, source: Any) -> None:
        if source is not None and source is not self.policy:
            load_weights(self.policy, weights_from(source))

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Count one version for weights that the caller writes within the context."""
        with self._flow.policy_stream.ordered():
            yield
            self.renew_copy()
        self._flow.version.count()

    def renew_copy(self) -> None:
        """Copy the user's weights to the policy that is called, if that is a copy."""
        if self._sends and self._caller.policy is not self.policy:
            self._caller.load_weights(self.current())


class InDriver(LivePolicy):
    """A policy that the driver calls for workers while it waits for them.

    Workers that share no memory with the driver call copies of it.

    Args:
        server: Calls the policy for all workers.
        flow: Counters and ids of the stream.
        group: The workers.
        options: How workers are managed.
        policy: The user's policy.
    """

    def __init__(
        self,
        server: InferenceServer,
        flow: Flow,
        group: WorkerGroup,
        options: RemoteOptions,
        policy: Any,
    ) -> None:
        super().__init__(flow, server, policy, server.is_owned, group.ids)
        self._group, self._options = group, options
        self._sending = threading.Lock()
        self._sent_after = 0  # delivered batches at the last update of copies
        self._server = server
        server.count_by(flow.version)
        server.count_pending_by(group.pending)
        flow.policy_stream = PolicyStream(server.device)
        server.call_on(flow.policy_stream)

    def send_first(self) -> None:
        """Send the weights to copies, because a factory may have made them with others."""
        self._send_to_copies()

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the user's weights, if it has a copy."""
        self._send_to_copies(workers=[worker])

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
        if not copies_among(self._group.present):
            return ()
        each, interval = self._options.update_each, self._options.update_interval
        is_due = interval and self._flow.statistics.batches - self._sent_after >= interval
        return self._workers() if each or is_due else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the user's weights to copies as a new version, unless they have the same."""
        if not (self._sends and copies_among(self._group.present)):
            return
        weights, sent = self.current(), self._group.weights.newest
        if weights and not (sent and weights.equal(sent)):
            self._flow.version.count()
            self._send_to_copies()

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy."""
        self._server.seed(root)

    def resume(self, state: CollectorState) -> None:
        """Send the weights of a resumed state, which the user's policy holds."""
        self.renew_copy()
        self._send_to_copies()

    def _send_to_copies(
        self, acknowledge: bool = False, workers: Sequence[WorkerRecord] | None = None
    ) -> list[tuple[WorkerRecord, Any]]:
        with self._sending:  # any thread may update; the newest weights must be sent last
            chosen = copies_among(self._group.present if workers is None else workers)
            if not (self._sends and chosen):
                return []
            self._sent_after, version = self._flow.statistics.batches, self._flow.version.number
            return self._group.weights.send(self.current(), chosen, version, acknowledge)
