"""Where the policy of a source is called; a policy that workers call, and its weights."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeAlias

from tensordict import TensorDictBase

from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.data.weights import NO_WEIGHTS, Weights, check_loads, weights_from, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied

SERVER_DIED = "server_died"
"""Reason for lost frames of workers whose policy was called by a process that died."""


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
    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send weights from a source, or from a dict by worker, to workers.

        Args:
            source: Source of the weights; ``None`` sends the policy's own weights.
            worker_ids: Ids of the workers; ``None`` means all.
            wait: Whether to wait until the workers have received the weights.
        """

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


def for_all(source: Any, worker_ids: int | Sequence[int] | None, workers: Sequence[int]) -> Any:
    """Return the weights for all workers if one policy acts for them; None means the policy's.

    Args:
        workers: Ids of all workers.

    Raises:
        ValueError: Different weights are requested for some workers.
    """
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


def await_weights(sent: Sequence[tuple[WorkerRecord, Any]]) -> None:
    """Wait until workers have weights. One that dies is replaced later, and then gets them."""
    for worker, call in sent:
        with suppress(WorkerDied):
            worker.handle.answer(call)


TargetedWeights: TypeAlias = tuple[Weights, Sequence[WorkerRecord]]
"""Weights, and the workers that they are sent to."""


class InWorkers(PolicyPlace):
    """A policy that each worker calls, with weights that a caller passes or its policy has.

    Any thread may call `update` and `push_to_worker`, even while a batch is collected.

    Args:
        flow: Counters and ids of the stream.
        group: The workers.
        options: How workers are managed.
        policy: The caller's policy; ``None`` for random actions, or if workers build the policy.
    """

    def __init__(self, flow: Flow, group: WorkerGroup, options: RemoteOptions, policy: Any) -> None:
        self._flow, self._group, self._options = flow, group, options
        self.policy = policy
        self._sends = flow.options.sends
        self._pushing = threading.Lock()
        self._first = self._policy_now()
        self._sent_others = False  # whether the last update sent other weights than the policy's
        self._overruled: Weights | None = None  # the policy's, when others were sent explicitly
        self._shared_version: int | None = None  # of `one_version`; 0 before its first update
        self._last_served: WorkerRecord | None = None

    def send_first(self) -> None:
        """Send the weights of this process's policy to workers that built theirs from a factory."""
        if self._options.built_by_workers and self._first:
            workers, sender = self._group.present, self._group.weights
            sender.check(self._first, workers)
            sender.send(self._first, workers, self._flow.version.number)

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless the newest weights fit workers that were added."""
        weights = self.current()
        if weights:
            self._group.weights.check(weights, workers)

    def served(self, worker: WorkerRecord) -> None:
        """Async: record that a rollout of this worker was returned last."""
        self._last_served = worker

    def current(self) -> Weights:
        """Return the policy's weights, updated with those that were sent instead of them."""
        weights, newest = weights_of(self.policy), self._group.weights.newest
        return weights.updated(newest) if self._sent_others or not weights else weights

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless a state's weights fit all workers' policies."""
        if not self._options.built_by_workers:
            check_loads(self.policy, weights)
        elif weights:
            self._group.weights.check(weights, self._group.present)
        elif self._group.weights.newest:
            raise ValueError(
                "state_dict: expected policy weights, got none; it was saved before the workers "
                "first received weights, so load it before update_policy_weights_()"
            )

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send workers the weights of a source, or of a dict by worker; None sends the policy's."""
        check_open(self._flow.closed)
        if not self._sends:
            return
        targets = self._targets(source, worker_ids)
        for weights, workers in targets:
            self._group.weights.check(weights, workers)
        self._sent_others = source is not None and source is not self.policy
        automatic = self._options.update_each or self._options.update_interval
        self._overruled = self._policy_now() if automatic and source is not None else None
        chosen = {worker.index for _, workers in targets for worker in workers}
        others = [worker for worker in self._group.present if worker.index not in chosen]
        self._group.weights.skip(others, self._first)
        sent = self._push(targets, wait, by_worker(source) is not None)
        if wait:
            await_weights(sent)

    def receive(self, source: Any) -> None:
        """Send all workers the weights of a source."""
        self.update(source, None, False)

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Send one worker individual weights."""
        weights = weights_from(source)
        self._check_for_all([worker.index])
        self._group.weights.check(weights, [worker])
        self._push([(weights, [worker])], False, individual=True)

    def _targets(
        self, source: Any, worker_ids: int | Sequence[int] | None
    ) -> list[TargetedWeights]:
        """Return weights and the workers that must receive them."""
        known = sorted(worker.index for worker in self._group.present)
        each = by_worker(source)
        if each is not None:
            check_worker_ids(list(each), known, "policy_or_weights")
            ids = check_worker_ids(list(each) if worker_ids is None else worker_ids, sorted(each))
            self._check_for_all(ids)
            return [(weights_from(each[index]), self._group.of([index])) for index in ids]
        ids = check_worker_ids(worker_ids, known)
        self._check_for_all(ids)
        if source is None and self._options.built_by_workers and self.policy is None:
            raise no_weights_given()
        weights = weights_of(self.policy) if source is None else weights_from(source)
        return [(weights, self._group.of(ids))]

    def _check_for_all(self, ids: Sequence[int]) -> None:
        """Raise ValueError if `max_policy_lag` would drop the rollouts of all other workers."""
        others = [own.index for own in self._group.present if own.index not in ids]
        if others and self._flow.options.max_policy_lag is not None:
            raise ValueError(
                f"worker_ids: expected all workers because of max_policy_lag, got {list(ids)}; "
                f"rollouts of {others} would become too old to be delivered"
            )

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Count all updates within the context as one policy version."""
        self._shared_version = 0
        try:
            yield
        finally:
            self._shared_version = None

    def due(self) -> Sequence[int]:
        """Return the workers due for the policy's weights: all if sync, the served one if async.

        With `max_policy_lag`, all workers are due if one is.
        """
        each, every = self._options.update_each, self._options.update_interval
        if not (each or every):
            return ()
        present, served = self._group.present, self._last_served
        due = [
            worker.index
            for worker in present
            if (each and (self._options.sync or worker is served))
            or (every and worker.since_update >= every)
        ]
        limited = self._flow.options.max_policy_lag is not None
        return self._group.ids() if limited and due else due

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to these workers, unless they were built with the same.

        Other weights that were sent explicitly stay in use until the policy's weights change.
        """
        weights = weights_of(self.policy) if self._sends else NO_WEIGHTS
        if not weights:
            return
        untouched = self._flow.version.number == 0 and self._flow.statistics.batches == 0
        if untouched and weights.equal(self._first):
            return
        if self._overruled is not None and weights.equal(self._overruled):
            return
        self._overruled, self._sent_others = None, False
        self._push([(weights, self._group.of(worker_ids))], False)

    def _policy_now(self) -> Weights:
        return weights_of(self.policy).copied()

    def _push(
        self, targets: Sequence[TargetedWeights], acknowledge: bool, individual: bool = False
    ) -> list[tuple[WorkerRecord, Any]]:
        """Count a new version and send it; return the workers and calls that can be awaited.

        Args:
            targets: Weights and the workers that must receive them.
            acknowledge: Whether the workers must confirm that they have the weights.
            individual: Whether the weights are individual to each of these workers.
        """
        version = self._flow.version
        with self._pushing:
            if not self._shared_version:
                version.count()
            if self._shared_version is not None:
                self._shared_version = version.number
            return [
                sent
                for weights, workers in targets
                for sent in (
                    *self._group.weights.send(
                        weights, workers, version.number, acknowledge, individual
                    ),
                    *self._send_to_copies(weights, acknowledge),
                )
            ]

    def _send_to_copies(
        self, weights: Weights, acknowledge: bool
    ) -> Sequence[tuple[WorkerRecord, Any]]:
        """Send nothing: no worker has a copy besides those that get the weights anyway."""
        return ()


PlaceMaker: TypeAlias = Callable[[Flow, WorkerGroup, RemoteOptions, Any], PolicyPlace]
"""Makes the PolicyPlace of a scheduler; called with the arguments of :class:`InWorkers`."""


def copies_among(workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Return the built workers that call a copy of the policy."""
    return [own for own in workers if not (own.starting or own.in_place)]
