"""The weights of a policy that acts in this process: live, for one worker or for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pycollect.batch.weight_slab import check_loads, load_weights
from pycollect.batch.weights import Weights, weights_from, weights_of
from pycollect.checks import check_open, no_weights_given
from pycollect.stream.flow import Flow
from pycollect.stream.weight_calls import for_all


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
        with self._flow.policy_stream.between():
            if self._sends:
                self._load(source)
            self.renew_copy()
        self._flow.version.count()

    def receive(self, source: Any) -> None:
        """Write them into the caller's policy; no version is counted."""
        with self._flow.policy_stream.between():
            self._load(source)
            self.renew_copy()

    def _load(self, source: Any) -> None:
        if source is not None and source is not self.policy:
            load_weights(self.policy, weights_from(source))

    @contextmanager
    def one_version(self) -> Iterator[None]:
        """Whoever gives weights within writes into the caller's policy himself."""
        with self._flow.policy_stream.between():
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
