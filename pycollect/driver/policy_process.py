"""A policy that other processes call: each worker, or one process for all workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.data.weights import NO_WEIGHTS, Weights, check_loads, weights_from, weights_of
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_place import (
    SERVER_DIED,
    PolicyPlace,
    SentWeights,
    WorkerIds,
    await_weights,
    by_worker,
    copies_among,
    for_all,
    weights_like,
)
from pycollect.driver.records import StallDetector, WorkerPlan, WorkerRecord
from pycollect.driver.state import CollectorState
from pycollect.driver.workers import WorkerGroup, with_log
from pycollect.errors import WorkerDied, without_frames
from pycollect.transport.engine import Engine
from pycollect.transport.messages import set_seed

_NEWS_SECONDS = 10.0  # maximum time until a live server answers, or its death is known

TargetedWeights: TypeAlias = tuple[Weights, Sequence[WorkerRecord]]
"""Weights, and the workers that they are sent to."""


class InWorkers(PolicyPlace):
    """A policy that each worker calls, with weights that a caller passes or its policy has.

    Any thread may call `update` and `push_to_worker`, even while a batch is collected.
    """

    def __init__(self, flow: Flow, group: WorkerGroup, options: RemoteOptions, policy: Any) -> None:
        self._flow, self._group, self._options = flow, group, options
        self.policy = policy
        self._sends = flow.options.sends
        self._pushing = threading.Lock()
        self._first = weights_of(self.policy).copied()
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
        if weights := self.current():
            self._group.weights.check(weights, workers)

    def served(self, worker: WorkerRecord) -> None:
        self._last_served = worker

    def _own_weights(self) -> Weights:
        return weights_like(self.policy, self._first)

    def current(self) -> Weights:
        """Return the policy's weights, updated with the weights that were sent instead."""
        weights, newest = weights_of(self.policy), self._group.weights.newest
        return weights.updated(newest) if self._sent_others or not weights else weights

    def check(self, weights: Weights) -> None:
        if not self._options.built_by_workers:
            check_loads(self.policy, weights)
        elif weights:
            self._group.weights.check(weights, self._group.present)
        elif self._group.weights.newest:
            raise ValueError(
                "state_dict: expected policy weights, got none; it was saved before the workers "
                "first received weights, so load it before update_policy_weights_()"
            )

    def update(self, source: Any, worker_ids: WorkerIds, wait: bool) -> None:
        """Send workers the weights of a source, or of a dict by worker; None sends the policy's."""
        check_open(self._flow.closed)
        if not self._sends:
            return
        targets = self._targets(source, worker_ids)
        for weights, workers in targets:
            self._group.weights.check(weights, workers)
        self._sent_others = source is not None and source is not self.policy
        automatic = self._options.update_each or self._options.update_interval
        is_overruled = automatic and source is not None
        self._overruled = self._own_weights().copied() if is_overruled else None
        chosen = {worker.index for _, workers in targets for worker in workers}
        others = [worker for worker in self._group.present if worker.index not in chosen]
        self._group.weights.skip(others, self._first)
        sent = self._push(targets, wait, by_worker(source) is not None)
        if wait:
            await_weights(sent)

    def receive(self, source: Any) -> None:
        self.update(source, None, False)

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Send one worker individual weights."""
        weights = weights_from(source)
        self._check_for_all([worker.index])
        self._group.weights.check(weights, [worker])
        self._push([(weights, [worker])], False, individual=True)

    def _targets(self, source: Any, worker_ids: WorkerIds) -> list[TargetedWeights]:
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
        is_own = source is None or source is self.policy
        weights = self._own_weights() if is_own else weights_from(source)
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
        weights = self._own_weights() if self._sends else NO_WEIGHTS
        if not weights:
            return
        untouched = self._flow.version.number == 0 and self._flow.statistics.batches == 0
        if untouched and weights.equal(self._first):
            return
        if self._overruled is not None and weights.equal(self._overruled):
            return
        self._overruled, self._sent_others = None, False
        self._push([(weights, self._group.of(worker_ids))], False)

    def _push(
        self, targets: Sequence[TargetedWeights], acknowledge: bool, individual: bool = False
    ) -> SentWeights:
        """Count a new version and send it; return the workers and calls that can be awaited."""
        version = self._flow.version
        with self._pushing:
            if not self._shared_version:
                version.count()
            if self._shared_version is not None:
                self._shared_version = version.number
            number, sent = version.number, list[tuple[WorkerRecord, Any]]()
            for weights, workers in targets:
                sent += self._group.weights.send(weights, workers, number, acknowledge, individual)
                sent += self._send_to_copies(weights, acknowledge)
            return sent

    def _send_to_copies(self, weights: Weights, acknowledge: bool) -> SentWeights:
        """Send nothing, because all workers with a copy get the weights themselves."""
        return ()


class InPolicyProcess(InWorkers):
    """A policy that a process of this machine calls for workers. It is managed like a worker.

    Workers that share no memory with it call copies of the policy.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        engine: Engine,
        flow: Flow,
        group: WorkerGroup,
        options: RemoteOptions,
        policy: Any,
    ) -> None:
        super().__init__(flow, WorkerGroup(flow, engine, options), options, policy)
        self._engine, self._plan, self._workers = engine, plan, group
        self._stalls = StallDetector(options.timeout)
        self._death: WorkerDied | None = None

    def start(self) -> None:
        self._group.start([self._plan])

    @property
    def _record(self) -> WorkerRecord:
        """Record of the process, once it was started."""
        return self._group.present[0]

    def send_first(self) -> None:
        """Send the weights of this process's policy to all that built theirs from a factory."""
        super().send_first()
        self._send_newest()

    def initialize(self, worker: WorkerRecord) -> None:
        """Send a worker the weights that were sent to the process, if it has a copy."""
        self._send_newest([worker])

    def _send_newest(self, workers: Sequence[WorkerRecord] | None = None) -> None:
        if newest := self._group.weights.newest:
            self._send_to_copies(newest, workers=workers)

    def _send_to_copies(
        self,
        weights: Weights,
        acknowledge: bool = False,
        workers: Sequence[WorkerRecord] | None = None,
    ) -> SentWeights:
        chosen = copies_among(self._workers.present if workers is None else workers)
        version = self._flow.version.number
        return self._workers.weights.send(weights, chosen, version, acknowledge) if chosen else ()

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing, because workers that are served need no weights."""

    def update(self, source: Any, worker_ids: WorkerIds, wait: bool) -> None:
        """Send the process and all copies weights from a source; ``None`` sends the policy's."""
        super().update(for_all(source, worker_ids, self._workers.ids()), None, wait)

    def push_to_worker(self, worker: WorkerRecord, source: Any) -> None:
        """Take these weights for all workers, because they share one policy."""
        self.receive(source)

    def served(self, worker: WorkerRecord) -> None:
        """Count a delivered batch of any worker."""
        self._record.since_update += 1
        super().served(self._record)

    def due(self) -> Sequence[int]:
        """Return all workers if an automatic update is due, else none."""
        return self._workers.ids() if super().due() else ()

    def push(self, worker_ids: Sequence[int]) -> None:
        """Send the policy's weights to the process and all copies, unless they have the same."""
        sent = self._first.updated(self._group.weights.newest)
        if not self._own_weights().equal(sent):
            super().push([self._record.index])

    def resume(self, state: CollectorState) -> None:
        """Send the weights and version of a state to the process and to all copies."""
        if state.policy:
            self._group.weights.send(state.policy, [self._record], state.policy_version)
            self._send_to_copies(state.policy)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self._record.failure

    def death(self) -> WorkerDied | None:
        """Return the error of the process if it died or stalled in a call, else ``None``.

        The error is returned until `replaced` is called.
        """
        record = self._record
        if self._death is None and not record.starting:
            if self._stalls.stalled([record]):
                text = (
                    f"{record.plan.spec.name}: a call of the policy took longer than "
                    f"{self._options.timeout} s (worker_timeout)"
                )
                self._death = WorkerDied(text, record.index, record.incarnation, "")
            elif record.handle.is_dead:
                self._death = self._death_by_ping()
        return self._death

    def check_alive(self) -> None:
        """Raise WorkerError, with the last lines of the log, if the process has died."""
        if death := self.death():
            raise with_log(death, str(death), self._record.newest.recent_log()) from death

    def has_died(self) -> bool:
        """Return whether the process has died; wait until the driver knows it.

        Workers can see its death earlier than the driver.
        """
        if self.death() is None and not self._record.starting:
            self._death = self._death_by_ping()
        return self.death() is not None

    def _death_by_ping(self) -> WorkerDied | None:
        """Return the error of the process if it answers a request by its death, else ``None``."""
        handle = self._record.handle
        try:
            call = handle.ping()
            if handle.await_answer(call, _NEWS_SECONDS):
                handle.answer(call)
        except WorkerDied as death:
            return without_frames(death)
        return None

    def replace(self, death: WorkerDied) -> None:
        """Start a replacement with the same weights, and wait until it serves.

        It may be called again after an interrupt, and then continues.
        """
        record = self._record
        self._stalls.note_progress(record)
        if record.incarnation == death.incarnation or record.newest.is_dead:
            self._group.restart(record, death, SERVER_DIED)
        self._group.await_replaced(record, SERVER_DIED)
        self._group.send_all(record)

    def replaced(self) -> None:
        self._death = None

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy.

        If the process has died or hangs, its replacement is seeded.
        """
        record = self._record
        record.initial_call = (set_seed, (), root)
        if record.starting:
            return
        call = record.handle.run(*record.initial_call)
        while not record.handle.await_answer(call, self._stalls.next_check):
            if self.death() is not None:
                return
        with suppress(WorkerDied):
            record.handle.answer(call)

    def report(self) -> dict[str, Any]:
        record = self._record
        entry = {"pid": record.info.pid, "restarts": record.restarts, "failure": record.failure}
        return {"server": entry}

    def close(self, timeout: float | None) -> None:
        self._group.close(timeout)
        self._engine.leave()
