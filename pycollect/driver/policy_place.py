"""Where the policy of a source is called, and a policy that is called in this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tensordict import TensorDictBase

from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.data.weights import (
    Weights,
    check_loads,
    load_weights,
    other_names,
    weights_from,
    weights_of,
)
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied
from pycollect.policy.device import PolicyStream
from pycollect.worker.worker import Worker

if TYPE_CHECKING:  # at run time, imported only for central inference
    from pycollect.inference.server import InferenceServer

SERVER_DIED = "server_died"
"""Reason for lost frames of workers whose policy was called by a process that died."""

WorkerIds: TypeAlias = int | Sequence[int] | None
"""Id or ids of workers; ``None`` means all."""

SentWeights: TypeAlias = Sequence[tuple[WorkerRecord, Any]]
"""Workers that weights were sent to, and the call of each that can be awaited."""


class PolicyPlace(ABC):
    """Where the policy of a source is called, and how it gets new weights.

    It is called in this process (:class:`LivePolicy`), there also for workers elsewhere
    (:class:`InDriver`), in the workers (:class:`InWorkers`), or in a process that acts for them
    (:class:`InPolicyProcess`). Only a scheduler calls the methods that take workers.

    Attributes:
        policy: The caller's policy; ``None`` for random actions, or if workers build the policy.
        failure: Reason for the last replacement of the process that calls the policy, or ``None``.
    """

    policy: Any
    failure: str | None = None

    # Weights

    @abstractmethod
    def current(self) -> Weights:
        """Return the weights as far as this process knows them."""

    @abstractmethod
    def check(self, weights: Weights) -> None:
        """Raise ValueError unless the weights of a state fit the policies of all workers."""

    @abstractmethod
    def update(self, source: Any, worker_ids: WorkerIds, wait: bool) -> None:
        """Send workers weights from a source or a dict by worker; ``None``: the policy's own."""

    @abstractmethod
    def receive(self, source: Any) -> None:
        """Take weights for all workers from a source, for example a weight-sync scheme."""

    @abstractmethod
    def one_version(self) -> AbstractContextManager[None]:
        """Count all updates within the context as one policy version."""

    def due(self) -> Sequence[int]:
        """Return the ids of the workers that must get the policy's weights automatically now."""
        return ()

    def push(self, worker_ids: Sequence[int]) -> None:  # noqa: B027 (live weights need no push)
        """Send the policy's weights to these workers if the weights have changed."""

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take the weights that the pipe of one worker received. All workers share one policy."""
        self.receive(source)

    # Workers that start and collect

    def send_first(self) -> None:  # noqa: B027 (live weights are not sent)
        """Send the initial weights after the first workers were started."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:  # noqa: B027 (any may fit)
        """Raise ValueError unless the newest weights fit workers that were added."""

    def initialize(self, worker: WorkerRecord) -> None:  # noqa: B027 (most have no copy)
        """Send a new worker or a replacement the weights of its copy, if it has one."""

    def served(self, worker: WorkerRecord) -> None:  # noqa: B027 (updates may ignore it)
        """Async: record that a rollout of this worker was returned last."""

    # Random draws and states

    def seed(self, root: int) -> None:  # noqa: B027 (workers are seeded with their environments)
        """Seed the random draws of a policy that is called outside the workers."""

    def resume(self, state: CollectorState) -> None:  # noqa: B027 (workers resume themselves)
        """Send the weights of a state to all that call the policy outside the workers."""

    # The process that calls the policy, if it has one of its own

    def start(self) -> None:  # noqa: B027 (optional)
        """Start the process, and wait until it has the policy."""

    def check_alive(self) -> None:  # noqa: B027 (optional)
        """Raise WorkerError if the process has died."""

    def death(self) -> WorkerDied | None:
        """Return the error of the process if it died or stalled, until `replaced` is called."""
        return None

    def has_died(self) -> bool:
        """Return whether the process has died; wait until the driver knows it."""
        return False

    def replace(self, death: WorkerDied) -> None:  # noqa: B027 (optional)
        """Start a replacement of the process, and wait until it serves."""

    def replaced(self) -> None:  # noqa: B027 (optional)
        """Forget the death, because all workers that the process served were replaced."""

    def report(self) -> dict[str, Any]:
        """Return the entries of `stats` that describe the process."""
        return {}

    def close(self, timeout: float | None) -> None:  # noqa: B027 (optional)
        """End the process. Idempotent."""


def by_worker(source: Any) -> dict[int, Any] | None:
    """Return a dict by worker id as a new dict; return None for any other source of weights."""
    if isinstance(source, TensorDictBase) or not isinstance(source, Mapping) or not source:
        return None
    ids = [key for key in source if isinstance(key, int) and not isinstance(key, bool)]
    return dict(source) if len(ids) == len(source) else None


def for_all(source: Any, worker_ids: WorkerIds, workers: Sequence[int]) -> Any:
    """Return the weights for all workers if one policy acts for them; None means the policy's."""
    known = sorted(workers)
    ids = check_worker_ids(worker_ids, known)
    each = by_worker(source)
    if each is not None:
        ids = check_worker_ids(list(each), known, "policy_or_weights")
    if len(known) > 1 and sorted(set(ids)) != known:
        raise ValueError(
            f"worker_ids: expected all workers because they share one policy, got {ids}"
        )
    if each is None:
        return source
    if len(each) > 1:
        raise ValueError(
            "policy_or_weights: expected the same weights for all workers because they share one "
            "policy, got a dict by worker id"
        )
    return each[known[0]]


def with_all_names(policy: Any) -> Weights:
    """Return the weights of a policy with all names of tied parameters and buffers."""
    weights = weights_of(policy)
    if not weights.tensors:
        return weights
    named = (policy.named_parameters, policy.named_buffers)
    every = {name: value.detach() for of in named for name, value in of(remove_duplicate=False)}
    return replace(weights, tensors=every)


def weights_like(policy: Any, first: Weights) -> Weights:
    """Return the weights of a policy under the names of its first weights.

    If parameters were tied since then, their common values are returned for each name.

    Raises:
        ValueError: The policy has other names now, for example because parameters are not tied any
            more. Copies of the policy could not take their values.
    """
    weights = weights_of(policy)
    now, names = weights.tensors.keys(), first.tensors.keys()
    if now == names:
        return weights
    every = with_all_names(policy).tensors
    if now - names or names - every.keys():
        raise other_names(names, names, now)
    return replace(weights, tensors={name: every[name] for name in names})


def await_weights(sent: SentWeights) -> None:
    """Wait until workers have weights. One that dies is replaced later, and then gets them."""
    for worker, call in sent:
        with suppress(WorkerDied):
            worker.handle.answer(call)


PlaceMaker: TypeAlias = Callable[[Flow, WorkerGroup, RemoteOptions, Any], PolicyPlace]
"""Makes the PolicyPlace of a scheduler; called with the arguments of :class:`InWorkers`."""


def copies_among(workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Return the built workers that call a copy of the policy."""
    return [own for own in workers if not (own.starting or own.in_place)]


class LivePolicy(PolicyPlace):
    """A policy that is called in the caller's process, so that it has new weights at once.

    Args:
        caller: Calls the policy. It has a copy if that is on another device.
        is_owned: Whether a factory made the policy, so that only the collector has it.
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
        return weights_of(self.policy)

    def check(self, weights: Weights) -> None:
        check_loads(self.policy, weights)

    def update(self, source: Any, worker_ids: WorkerIds, wait: bool) -> None:
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
        server.version = flow.version
        server.count_pending_by(group.pending)
        server.stream = flow.policy_stream = PolicyStream(server.device)

    def send_first(self) -> None:
        """Send the weights to copies, because a factory may have made them with others."""
        self._send_to_copies()

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the user's weights, if it has a copy."""
        self._send_to_copies(workers=[worker])

    def update(self, source: Any, worker_ids: WorkerIds, wait: bool) -> None:
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
        self._server.seed(root)

    def resume(self, state: CollectorState) -> None:
        """Send the weights of a resumed state, which the user's policy holds."""
        self.renew_copy()
        self._send_to_copies()

    def _send_to_copies(
        self, acknowledge: bool = False, workers: Sequence[WorkerRecord] | None = None
    ) -> SentWeights:
        with self._sending:  # any thread may update; the newest weights must be sent last
            chosen = copies_among(self._group.present if workers is None else workers)
            if not (self._sends and chosen):
                return []
            self._sent_after, version = self._flow.statistics.batches, self._flow.version.number
            return self._group.weights.send(self.current(), chosen, version, acknowledge)
