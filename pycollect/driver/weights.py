"""New weights of the policy: for a policy in this process, and for workers elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class WorkerWeights(PolicyWeights, Protocol):
    """The policy's weights, for workers that come and go."""

    def start(self) -> None:
        """The first workers are there."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless the newest weights fit workers that were added."""

    def served(self, worker: WorkerRecord) -> None:
        """Async: its rollout is the one that was delivered last."""

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Give one worker weights of its own."""


def by_worker(source: Any) -> dict[int, Any] | None:
    """A dict by worker id as such; None for any other source of weights."""
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
    own = by_worker(source)
    if own is not None:
        ids = check_worker_ids(list(own), known, "policy_or_weights")
    if len(known) > 1 and sorted(set(ids)) != known:
        raise ValueError(
            f"worker_ids: expected all workers because they share one policy, got {ids}"
        )
    if own is None:
        return source
    if len(own) > 1:
        raise ValueError(
            "policy_or_weights: expected the same weights for all workers because they share one "
            "policy, got a dict by worker id"
        )
    return own[known[0]]


Gift: TypeAlias = tuple[Weights, Sequence[WorkerRecord]]
"""Weights, and the workers that they are for."""


class PolicyUpdates:
    """Gives workers the weights that whoever calls brings, or those of the caller's policy.

    Any thread may call `update` and `push_own`, also while a batch is collected.

    Args:
        policy: the caller's; None: random actions, or built by workers.

    """

    def __init__(self, flow: Flow, group: WorkerGroup, options: RemoteOptions, policy: Any) -> None:
        self._flow, self._group, self._options = flow, group, options
        self._policy = policy
        self._sends = flow.options.sends
        self._pushing = threading.Lock()
        self._first = self._policy_now()
        self._sent_others = False  # the last update sent other weights than the policy's
        self._overruled: Weights | None = None  # the policy's, when workers were given others
        self._shared_version: int | None = None  # 0: within an update that gave nothing yet
        self._last_served: WorkerRecord | None = None

    def start(self) -> None:
        """Workers that built their policy get the weights of the one that is here beside."""
        if self._options.built_by_workers and self._first:
            everyone, sender = self._group.present, self._group.weights
            sender.check(self._first, everyone)
            sender.send(self._first, everyone, self._flow.version.number)

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless the newest weights fit workers that were added."""
        weights = self.current()
        if weights:
            self._group.weights.check(weights, workers)

    def served(self, worker: WorkerRecord) -> None:
        """Async: its rollout is the one that was delivered last."""
        self._last_served = worker

    def current(self) -> Weights:
        """Return the policy's weights, updated with those that were sent instead of them."""
        own, newest = weights_of(self._policy), self._group.weights.newest
        return own.updated(newest) if self._sent_others or not own else own

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
        """Give these workers weights from a source, or by worker; None: the policy's."""
        check_open(self._flow.closed)
        if not self._sends:
            return
        gifts = self._gifts(source, worker_ids)
        for weights, workers in gifts:
            self._group.weights.check(weights, workers)
        self._sent_others = source is not None and source is not self._policy
        by_itself = self._options.update_each or self._options.update_interval
        self._overruled = self._policy_now() if by_itself and source is not None else None
        sent = self._push(gifts, wait, by_worker(source) is not None)
        if wait:
            for worker, call in sent:
                worker.handle.answer(call)

    def receive(self, source: Any) -> None:
        """Give all workers weights from a source, whatever brought them."""
        self.update(source, None, False)

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Give one worker weights of its own."""
        weights = weights_from(source)
        self._group.weights.check(weights, [worker])
        self._push([(weights, [worker])], False, own=True)

    def _gifts(self, source: Any, worker_ids: int | Sequence[int] | None) -> list[Gift]:
        """Which weights go to which workers."""
        known = sorted(worker.index for worker in self._group.present)
        own = by_worker(source)
        if own is not None:
            check_worker_ids(list(own), known, "policy_or_weights")
            ids = check_worker_ids(list(own) if worker_ids is None else worker_ids, sorted(own))
            return [(weights_from(own[index]), self._group.of([index])) for index in ids]
        ids = check_worker_ids(worker_ids, known)
        if source is None and self._options.built_by_workers and self._policy is None:
            raise no_weights_given()
        weights = weights_of(self._policy) if source is None else weights_from(source)
        return [(weights, self._group.of(ids))]

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """What is given within is one update."""
        self._shared_version = 0
        try:
            yield
        finally:
            self._shared_version = None

    def due(self) -> Sequence[int]:
        """The workers that are to get the policy's weights now: sync all, async who was served."""
        each, every = self._options.update_each, self._options.update_interval
        if not (each or every):
            return ()
        present, served = self._group.present, self._last_served
        return [
            worker.index
            for worker in present
            if (each and (self._options.sync or worker is served))
            or (every and worker.since_update >= every)
        ]

    def push(self, worker_ids: Sequence[int]) -> None:
        """Give them to these, unless they are the ones that the workers were made with.

        Others that workers were given since stay until the policy's change.
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
        self, gifts: Sequence[Gift], acknowledge: bool, own: bool = False
    ) -> list[tuple[WorkerRecord, Any]]:
        """One more version for these workers; the calls that can be waited for.

        Args:
            own: each of them is to have its own weights.
        """
        version = self._flow.version
        with self._pushing:
            if not self._shared_version:
                version.count()
            if self._shared_version is not None:
                self._shared_version = version.number
            return [
                sent
                for weights, workers in gifts
                for sent in self._group.weights.send(
                    weights, workers, version.number, acknowledge, own
                )
            ]


class PolicyCaller(Protocol):
    """Whoever calls the policy in this process."""

    @property
    def policy(self) -> Any:
        """The caller's own, or a copy of it on another device."""

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into it, in place."""


class LivePolicy:
    """The weights of a policy that is called where the caller has it.

    Args:
        caller: calls it for all workers.
        policy: the user's; where it is called on another device than it lies on, `caller` has a
            copy.
        is_ours: nobody else has it: a factory made it.
        workers: tells the ids of those that there are.

    Attributes:
        policy: The user's.
    """

    def __init__(
        self,
        flow: Flow,
        caller: PolicyCaller,
        policy: Any,
        is_ours: bool,
        workers: Callable[[], Sequence[int]],
    ) -> None:
        self._flow, self._caller = flow, caller
        self.policy, self._is_ours, self._workers = policy, is_ours, workers
        self._sends = flow.options.sends

    def current(self) -> Weights:
        """The caller's."""
        return weights_of(self.policy)

    def check(self, weights: Weights) -> None:
        """Raise ValueError unless they fit the policy."""
        check_loads(self.policy, weights)

    def update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Write them into the caller's policy, at once."""
        check_open(self._flow.closed)
        source = for_all(source, worker_ids, self._workers())
        if source is None and self._is_ours and self._sends:
            raise no_weights_given()
        with self._flow.policy_stream.ordered():
            if self._sends:
                self._load(source)
            self.renew_copy()
        self._flow.version.count()

    def receive(self, source: Any) -> None:
        """Write them into the caller's policy; no version is counted."""
        with self._flow.policy_stream.ordered():
            self._load(source)
            self.renew_copy()

    def _load(self, source: Any) -> None:
        if source is not None and source is not self.policy:
            load_weights(self.policy, weights_from(source))

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Whoever gives weights within writes into the caller's policy himself."""
        with self._flow.policy_stream.ordered():
            yield
            self.renew_copy()
        self._flow.version.count()

    def renew_copy(self) -> None:
        """Where it is a copy that is called, it gets what the caller's holds now."""
        if self._sends and self._caller.policy is not self.policy:
            self._caller.load_weights(self.current())

    def due(self) -> Sequence[int]:
        """Nobody: they are live."""
        return ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """There is nobody to give them to."""
