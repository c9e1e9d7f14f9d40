"""Updates of the policy's weights, for a policy in this process and for workers elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

from tensordict import TensorDictBase

from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.data.weights import (
    NO_WEIGHTS,
    Weights,
    check_loads,
    load_weights,
    weights_from,
    weights_of,
)
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import WorkerRecord
from pycollect.driver.source import PolicyWeights
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerDied


class WorkerWeights(PolicyWeights, Protocol):
    """The policy's weights, for workers that are added and removed."""

    def start(self) -> None:
        """Send the initial weights after the first workers were started."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless the newest weights fit workers that were added."""

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a new worker or a replacement its copy's weights, if a server acts for others."""

    def served(self, worker: WorkerRecord) -> None:
        """Async: record that a rollout of this worker was returned last."""

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Send one worker individual weights."""


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


class PolicyUpdates:
    """Sends workers the weights that a caller passes, or those of the caller's policy.

    Any thread may call `update` and `push_to_worker`, even while a batch is collected.

    Args:
        flow: Counters and ids of the stream.
        group: The workers.
        options: How workers are managed.
        policy: The caller's policy; ``None`` for random actions, or if workers build the policy.
    """

    def __init__(self, flow: Flow, group: WorkerGroup, options: RemoteOptions, policy: Any) -> None:
        self._flow, self._group, self._options = flow, group, options
        self._policy = policy
        self._sends = flow.options.sends
        self._pushing = threading.Lock()
        self._first = self._policy_now()
        self._sent_others = False  # whether the last update sent other weights than the policy's
        self._overruled: Weights | None = None  # the policy's, when others were sent explicitly
        self._shared_version: int | None = None  # of `one_version`; 0 before its first update
        self._last_served: WorkerRecord | None = None

    def start(self) -> None:
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

    def initialize(self, worker: WorkerRecord) -> None:
        """Do nothing, because no server acts for workers: all of them get the weights anyway."""

    def served(self, worker: WorkerRecord) -> None:
        """Async: record that a rollout of this worker was returned last."""
        self._last_served = worker

    def current(self) -> Weights:
        """Return the policy's weights, updated with those that were sent instead of them."""
        weights, newest = weights_of(self._policy), self._group.weights.newest
        return weights.updated(newest) if self._sent_others or not weights else weights

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless a state's weights fit all workers' policies."""
        if not self._options.built_by_workers:
            check_loads(self._policy, weights)
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
        self._sent_others = source is not None and source is not self._policy
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
        if source is None and self._options.built_by_workers and self._policy is None:
            raise no_weights_given()
        weights = weights_of(self._policy) if source is None else weights_from(source)
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
        weights = weights_of(self._policy) if self._sends else NO_WEIGHTS
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
        return weights_of(self._policy).copied()

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


class PolicyCaller(Protocol):
    """Calls the policy in this process."""

    @property
    def policy(self) -> Any:
        """The caller's policy, or a copy of it on another device."""

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into the policy, in place."""


class LivePolicy:
    """The weights of a policy that is called in the caller's process.

    Args:
        flow: Counters and ids of the stream.
        caller: Calls the policy for all workers.
        policy: The user's policy. If it is called on another device, `caller` has a copy.
        is_owned: Whether a factory made the policy, so that only the collector has it.
        workers: Returns the ids of the present workers.

    Attributes:
        policy: The user's policy.
    """

    def __init__(
        self,
        flow: Flow,
        caller: PolicyCaller,
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

    def due(self) -> Sequence[int]:
        """Return no workers, because the weights are live."""
        return ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Do nothing, because the weights are live."""
