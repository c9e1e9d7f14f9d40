"""The workers of a scheduler: start them, replace them if they die, and end them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pycollect._core import Leaf, Uninterrupted
from pycollect.data.extras import Extra
from pycollect.data.layout import dotted
from pycollect.driver.assembly import forget_ids
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions
from pycollect.driver.records import CHECK_SECONDS, StartTimer, WorkerPlan, WorkerRecord
from pycollect.driver.sending import HookSender, PolicyCopy, WeightSender
from pycollect.errors import (
    LimitError,
    WorkerDied,
    WorkerError,
    limits_named,
    warn_user,
    without_frames,
)
from pycollect.transport.engine import AnswerWaiter, Engine, NotStarted
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import WorkerInfo
from pycollect.transport.pickling import SharedValue

_LOGGER = logging.getLogger(__name__)
_BATCHES_REMEMBERED = 100  # a death no longer counts after this many delivered batches


class WorkerGroup:
    """The present workers, and the weights and hooks that also their replacements get.

    A worker's death is recorded in the flow: ledger, trajectories and their ids.

    Attributes:
        present: Workers in the order in which they were added.
        queue: The same workers; the first was served longest ago.
    """

    def __init__(self, flow: Flow, engine: Engine, options: RemoteOptions) -> None:
        self._flow, self._engine, self._options = flow, engine, options
        self._waiter = AnswerWaiter(engine.bell)
        self._start_timer = StartTimer(options.init_timeout)
        self._policies: dict[bytes, SharedValue] = {}
        self._copy: PolicyCopy | None = None
        self.weights = WeightSender(engine.put)
        self.hooks = HookSender(engine.put)
        self.present: list[WorkerRecord] = []
        self.queue: list[WorkerRecord] = []
        self.former: list[WorkerRecord] = []

    @property
    def in_order(self) -> list[WorkerRecord]:
        """Present workers by id; raises RuntimeError if there are none."""
        if not self.present:
            raise RuntimeError("all workers were stopped; call add_collectors() first")
        return sorted(self.present, key=lambda worker: worker.index)

    def ids(self) -> list[int]:
        return [worker.index for worker in self.present]

    @property
    def infos(self) -> dict[int, WorkerInfo]:
        """Properties of each present worker, by id."""
        return {worker.index: worker.info for worker in self.present}

    def pending(self) -> int:
        """Return the number of built workers that share memory and have unanswered requests.

        Dead workers do not count, because the driver replaces them only when it waits for them.
        """
        handles = (own.handle for own in self.present if not own.starting)
        return sum(own.has_pending_requests and not own.is_dead for own in handles)

    def of(self, indices: Sequence[int]) -> list[WorkerRecord]:
        """Return the present workers with these ids."""
        return [worker for worker in self.present if worker.index in indices]

    def start(
        self, plans: Sequence[WorkerPlan], check: Callable[[], None] | None = None
    ) -> list[WorkerRecord]:
        """Start workers and `check` until all are built; if one of them fails, end them all."""
        all_plans = [*(worker.plan for worker in self.present), *plans]
        self._engine.check_resources([plan.options for plan in all_plans])
        workers: list[WorkerRecord] = []
        try:
            for plan in plans:
                with Uninterrupted():  # otherwise its process could be left behind
                    workers.append(WorkerRecord(plan, self._started(plan)))
            self._await_built(workers, check)
        except BaseException:
            self._end_processes(workers)
            raise
        self.present = [*self.present, *workers]
        self.queue = [*self.queue, *workers]
        for text in dict.fromkeys(text for worker in workers for text in worker.info.warnings):
            warn_user(text)
        return workers

    def _started(self, plan: WorkerPlan) -> WorkerHandle:
        with limits_named(f"the start of {plan.spec.name}"):
            if plan.policy not in self._policies:
                self._policies[plan.policy] = self._engine.put(plan.policy)
            policy = self._policies[plan.policy]
            if plan.copy is not None:
                self._copy = self._copy or PolicyCopy(self._engine.put, plan.copy)
                policy.elsewhere = self._copy
            return self._engine.start(plan.spec, policy, plan.options)

    def _await_built(
        self, workers: Sequence[WorkerRecord], check: Callable[[], None] | None
    ) -> None:
        """Wait until these started workers are built; raise if one fails; see `start`."""
        waiting = list(workers)
        while waiting:
            ready = self.wait_any(waiting, CHECK_SECONDS)
            if ready is not None:
                waiting = [worker for worker in waiting if worker is not ready]
            else:
                if check is not None:
                    check()
                self._start_timer.check(waiting)
        for worker in workers:
            try:
                _take_handle(worker)
            except WorkerDied as death:
                raise with_log(death, str(death), worker.newest.recent_log()) from death

    def wait_any(self, workers: Sequence[WorkerRecord], timeout: float) -> WorkerRecord | None:
        """Return a worker that is built, has an answer, or died; ``None`` on timeout.

        A replacement that is overdue counts as dead.
        """
        overdue = next((worker for worker in workers if self.is_overdue(worker)), None)
        if overdue is not None:
            return overdue
        handles = [worker.newest for worker in workers]
        ready = self._waiter.wait_any(handles, timeout)
        return None if ready is None else workers[handles.index(ready)]

    def is_overdue(self, worker: WorkerRecord) -> bool:
        """Return whether this is a replacement that was not built within `worker_init_timeout`.

        If its start has failed, it is started now.

        Raises:
            OSError: It still cannot be started; the message names the limit that was reached.
        """
        starting = worker.starting
        if starting is None or worker.incarnation == 0:
            return False
        if isinstance(starting, NotStarted):
            with Uninterrupted():
                self._start_process(worker)
        elif self._start_timer.late([worker]) and not starting.has_answer:
            worker.overdue = self._start_timer.overdue(worker)
        return bool(worker.overdue)

    def replace(self, worker: WorkerRecord, death: WorkerDied, reason: str) -> None:
        """Start a new worker process; rollouts in flight are lost and requested again.

        Raises:
            WorkerError: The worker died too often. The error has its id, the cause and its last log
                lines. No more rollouts are requested then.
        """
        flow = self._flow
        # As text: a kept log record would otherwise keep the exception's frames and their slabs.
        _LOGGER.warning("%s; %d frames in flight are lost", str(death), worker.frames_in_flight)
        with Uninterrupted():  # otherwise frames could be lost twice
            flow.lose_worker(worker.index, worker.frames_in_flight, reason)
            forget_ids(flow.ids, worker.index, worker.info)
            worker.renew_requests(flow.version.number)
            self.restart(worker, death, reason)
            generators = worker.generators
            if generators is not None:
                moment = worker.incarnation
                worker.initial_call = worker.resumption(generators, flow.entropy, moment)
            flow.ledger.issue(worker.index, worker.frames_in_flight)

    def restart(self, worker: WorkerRecord, death: WorkerDied, reason: str) -> None:
        """Start a worker's process again without counting frames; errors as for `replace`."""
        worker.failure = f"{reason}: {death}"
        try:
            with Uninterrupted():
                worker.newest.kill()
                self._start_again(worker, death, self._flow.statistics.batches)
        except WorkerError as error:
            worker.requests.clear()
            self._flow.failing = self._flow.failing or without_frames(error)
            raise

    def _start_again(self, worker: WorkerRecord, death: WorkerDied, batches: int) -> None:
        log = worker.newest.recent_log()
        recent = worker.deaths
        if not worker.starting:  # the worker was built since its last death
            recent = [before for before in recent if before > batches - _BATCHES_REMEMBERED]
        worker.deaths = [*recent, batches]
        if len(worker.deaths) > self._options.max_restarts:
            text = f"{death}; it was replaced {len(recent)} times (max_worker_restarts)"
            raise with_log(death, text, log) from death
        spec = replace(worker.plan.spec, incarnation=worker.incarnation + 1)
        worker.plan = replace(worker.plan, spec=spec)
        worker.starting, worker.must_reset = NotStarted(), False
        with suppress(OSError):  # `is_overdue` tries again, and raises
            self._start_process(worker)

    def _start_process(self, worker: WorkerRecord) -> None:
        worker.starting = self._started(worker.plan)
        worker.started, worker.overdue = time.monotonic(), ""

    def await_replaced(self, worker: WorkerRecord, reason: str) -> None:
        """Wait until a restarted worker is built; restart it again if it dies before that."""
        while worker.starting:
            self._flow.check_not_closed()
            if self.wait_any([worker], CHECK_SECONDS) is None:
                continue
            try:
                _take_handle(worker)
            except WorkerDied as death:
                self.restart(worker, death, reason)

    def finish_replacement(
        self, worker: WorkerRecord, initialize: Callable[[WorkerRecord], None]
    ) -> None:
        """Let a built replacement continue the work of its predecessor.

        Args:
            initialize: Sends it what it needs besides `send_all`, before its requests.

        Raises:
            WorkerDied: The worker died, or cannot receive the weights and requests of its
                predecessor.
            Exception: Building the worker raised it.
        """
        before = worker.info
        with Uninterrupted():  # otherwise the worker could miss weights or requests
            _take_handle(worker)
            if self._options.sync:
                check_alike({-1: before, worker.index: worker.info})
            try:
                self.send_all(worker)
                initialize(worker)
                for request in worker.requests:
                    worker.handle.submit(request)
            except LimitError as error:
                text = f"{worker.plan.spec.name} could not receive weights and requests: {error}"
                raise WorkerDied(text, worker.index, worker.incarnation, "") from error

    def send_all(self, worker: WorkerRecord) -> None:
        """Send a worker its weights, hooks and initial call."""
        self.weights.send_kept(worker)
        self.hooks.send_kept(worker)
        if worker.initial_call is not None:
            worker.handle.run(*worker.initial_call)

    def serve_last(self, worker: WorkerRecord) -> None:
        """Move a worker to the end of the queue, so that fast workers do not starve others."""
        self.queue.remove(worker)
        self.queue.append(worker)

    def release(self, worker: WorkerRecord) -> None:
        """Move a worker from the present to the former workers."""
        self._forget(worker)
        self.former.append(worker)

    def _forget(self, worker: WorkerRecord) -> None:
        # New lists, because another thread may iterate over the old ones.
        self.present = [other for other in self.present if other is not worker]
        self.queue = [other for other in self.queue if other is not worker]

    def discard(self, workers: Sequence[WorkerRecord]) -> None:
        """End new workers that do not fit; they do not count as former workers."""
        for worker in workers:
            self._forget(worker)
        self._end_processes(workers)

    def end(self, workers: Sequence[WorkerRecord]) -> None:
        """Release these workers and wait until they have ended; frames not delivered are lost."""
        for worker in workers:
            self._flow.lose_worker(worker.index, 0, "incomplete")
            self.release(worker)
        self._end_processes(workers)

    def _end_processes(self, workers: Sequence[WorkerRecord]) -> None:
        """End the processes of workers that are not present."""
        self._waiter.wait_closed([worker.newest for worker in workers])

    def close(self, timeout: float | None = None) -> None:
        """End all workers, which have `timeout` seconds to close their environments."""
        workers = [*self.present, *self.former]
        self._waiter.wait_closed([worker.newest for worker in workers], timeout)
        for worker in workers:
            worker.requests.clear()


def _take_handle(worker: WorkerRecord) -> None:
    """Take the handle of a started worker that is built now."""
    if worker.overdue:
        raise WorkerDied(worker.overdue, worker.index, worker.incarnation, "")
    assert isinstance(worker.starting, WorkerHandle), "starting: expected a started worker"
    with Uninterrupted():  # its description can be taken only once
        worker.info, worker.handle = worker.starting.built(), worker.starting
        worker.starting = None


def with_log(death: WorkerDied, text: str, log: str = "") -> WorkerError:
    """Return the error for a death, with the worker's last log lines if there are any."""
    return WorkerError(
        f"{text}\nits last log lines:\n{log}" if log else text,
        death.worker,
        death.incarnation,
        death.remote_traceback,
    )


def check_alike(infos: Mapping[int, WorkerInfo]) -> None:
    """Raise ValueError if the workers' rollouts cannot be joined into one batch."""
    (first, reference), *others = infos.items()
    expected = _entries(reference)
    for index, info in others:
        if info.batch_size != reference.batch_size:
            raise ValueError(
                "create_env_fn: expected the same number of environments in all workers of a sync "
                f"collector; the batch size is {list(reference.batch_size)} in worker {first} and "
                f"{list(info.batch_size)} in worker {index}"
            )
        found = _entries(info)
        if expected != found:
            differing = {dotted(entry.key) for entry in set(expected) ^ set(found)}
            raise ValueError(
                "create_env_fn: expected the same keys, dtypes and shapes from all workers of a "
                f"sync collector; worker {index} differs from worker {first} in "
                f"{sorted(differing)}"
            )


def _entries(info: WorkerInfo) -> list[Leaf | Extra]:
    return [*info.leaves.layout().leaves, *info.leaves.extras]
