"""A source of batches with workers in other processes: decides which worker collects and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from pycollect._core import Uninterrupted
from pycollect.driver.accounts import count_slow_paths
from pycollect.driver.assembly import Assembly, PendingBatch, forget_ids
from pycollect.driver.delivery import Batch
from pycollect.driver.flow import Flow
from pycollect.driver.membership import GroupStreams, Membership
from pycollect.driver.options import RemoteOptions
from pycollect.driver.pace import PolicyLagLimit
from pycollect.driver.policy_place import PlaceMaker
from pycollect.driver.policy_process import InWorkers
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.waiting import WorkerWaiter
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerError, is_interrupt, without_frames
from pycollect.transport.engine import Engine
from pycollect.transport.messages import Rollout, RolloutRequest
from pycollect.worker.report import RolloutReport


class Scheduler:
    """Requests rollouts from workers, waits for them, and joins them into batches."""

    is_remote = True

    def __init__(
        self,
        flow: Flow,
        options: RemoteOptions,
        plans: Sequence[WorkerPlan],
        policy: Any,
        engine: Engine,
        place: PlaceMaker = InWorkers,
    ) -> None:
        self._flow, self._options, self._plans = flow, options, plans
        self._engine, self.policy = engine, policy
        depth = max(options.ahead, 1)
        self.assembly = Assembly(options.joined, depth, options.uneven, options.padded)
        limit = flow.options.max_policy_lag
        self._limit = None if limit is None else PolicyLagLimit(limit, flow.version)
        self.group = WorkerGroup(flow, engine, options)
        self.place = place(flow, self.group, options, policy)
        self.waiter = WorkerWaiter(flow, self.group, options, self.place)
        self.streams = GroupStreams(self.group, self.waiter, self.place)
        self.members = Membership(flow, self.group, self.waiter, self.place, self.assembly, options)

    def start(self) -> None:
        self.place.start()
        self.members.start(self._plans)
        for in_place in (True, False):
            workers = [own for own in self.group.present if own.in_place is in_place]
            if workers:
                one_each = sum(own.info.placement.bytes for own in workers)
                self._engine.check_memory(one_each * (self._options.ahead + 1), in_place)
        self.members.prepare_slabs()
        self.place.send_first()

    @property
    def batch_frames(self) -> int:
        """Number of frames in a full batch: of all workers if sync, else of the largest rollout."""
        return self.members.batch_frames

    # Collecting

    def collect(self) -> None:
        if not self.group.present:
            raise RuntimeError("all workers were stopped; call add_collectors() first")
        self._flow.collecting = True  # this process may call the policy while it waits
        try:
            self._collect()
        finally:
            self._flow.collecting = False

    def _collect(self) -> None:
        if self._limit is not None:
            self._limit.look()
        self._top_up(max(self._options.ahead, 1), True)
        if self._options.sync:
            self._collect_round()
        else:
            self._collect_first()
        batch = self._flow.unclaimed
        if self._limit and batch and not self._flow.is_stale(batch.versions):
            self._limit.delivered()
        self._top_up(self._options.ahead, False)

    def _collect_round(self) -> None:
        """Join one rollout of each worker."""
        if self._flow.failing is not None:  # a round needs all workers
            raise without_frames(self._flow.failing)
        workers = [worker for worker in self.group.present if worker.requests]
        with self._flow.statistics.timed("assemble"):
            pending = self._pending(workers)
        reports = self._await_round(workers, pending)
        with Uninterrupted():
            self._flow.unclaimed = self._join(workers, pending, reports)

    def _await_round(
        self, workers: Sequence[WorkerRecord], pending: PendingBatch
    ) -> list[RolloutReport]:
        """Place the oldest rollout of each worker in its row, and return the reports.

        Rows are placed and sent while other rollouts are still missing, because all workers of a
        sync round wait for the rest.
        """
        rows = {worker.index: row for row, worker in enumerate(workers)}
        waiting = list(workers)
        reports: dict[int, RolloutReport] = {}
        while waiting:
            self._stop_stragglers(waiting, len(workers))
            worker = self.waiter.any_of(waiting)
            rollout = self.waiter.rollout_of(worker)
            if rollout is None:
                continue
            waiting.remove(worker)
            with self._flow.statistics.timed("assemble"):
                self.assembly.place(pending, rows[worker.index], rollout)
                if waiting:  # the last row is sent with the rest of the batch
                    self.assembly.send(pending, rows[worker.index])
            reports[worker.index] = rollout.report
        return [reports[index] for index in rows]

    def _stop_stragglers(self, waiting: Sequence[WorkerRecord], workers: int) -> None:
        """Stop the rollouts that are still running once enough workers are done."""
        preemption = self._options.preemption
        if preemption is None or workers - len(waiting) < preemption.enough(workers):
            return
        for worker in waiting:
            if not worker.starting:
                worker.handle.stop()

    def _collect_first(self) -> None:
        """Make a batch of the first rollout that is ready."""
        worker, rollout = self._first_ready()
        with Uninterrupted():
            with self._flow.statistics.timed("assemble"):
                pending = self._pending([worker])
                self.assembly.place(pending, 0, rollout)
            self._flow.unclaimed = self._join([worker], pending, [rollout.report])
            self.group.serve_last(worker)
            self.place.served(worker)

    def _first_ready(self) -> tuple[WorkerRecord, Rollout]:
        """Return the first ready rollout and its worker; raise a failure only if none is ready."""
        flow = self._flow
        while True:
            waiting = [worker for worker in self.group.queue if worker.requests or worker.starting]
            if flow.failing is None:
                try:
                    worker = self.waiter.any_of(self._due(waiting))
                except WorkerError as error:  # the worker or its inference server died too often
                    for stalled in self.group.of([error.worker]):
                        self._give_up(stalled, error)
                    continue
            elif ready := self.waiter.ready_now(waiting):
                worker = ready
            else:
                raise without_frames(flow.failing)
            try:
                rollout = self.waiter.rollout_of(worker)
            except Exception as error:
                if is_interrupt(error):
                    raise
                self._give_up(worker, error)
                continue
            if rollout is not None:
                return worker, rollout

    def _due(self, waiting: Sequence[WorkerRecord]) -> Sequence[WorkerRecord]:
        """Return the workers with rollouts that may be delivered next, by `max_policy_lag`.

        Workers that start are among them, because they wait for their requests.
        """
        if self._limit is None:
            return waiting
        newest = self._limit.most_recent_due(self._requested)
        if newest is None:
            return waiting
        return [own for own in waiting if own.starting or own.requests[0].version <= newest]

    @property
    def _requested(self) -> list[int]:
        """Policy versions with which the batches in flight were requested."""
        queues = [worker.requests for worker in self.group.present]
        if self._options.sync:
            queues = [max(queues, key=len)]
        return [request.version for queue in queues for request in queue]

    def _give_up(self, worker: WorkerRecord, error: Exception) -> None:
        """Release a failed worker, and keep its error to be raised later."""
        self._flow.failing = self._flow.failing or without_frames(error)
        self.group.release(worker)

    def _pending(self, workers: Sequence[WorkerRecord]) -> PendingBatch:
        infos = [worker.info for worker in workers]
        uploader = self._flow.uploads.uploader_for(workers[0].batch_device)
        return self.assembly.pending(workers[0].requests[0], infos, uploader)

    def _join(
        self,
        workers: Sequence[WorkerRecord],
        pending: PendingBatch,
        reports: Sequence[RolloutReport],
    ) -> Batch:
        """Return the batch of rollouts that are in their rows, and complete their requests."""
        devices = workers[0].batch_device, workers[0].reported_device
        with self._flow.statistics.timed("assemble"):
            by_id = {own.index: report for own, report in zip(workers, reports, strict=True)}
            batch = self.assembly.join(pending, by_id, self._flow.ids, *devices)
        for worker, report in zip(workers, reports, strict=True):
            self._complete_request(worker, report)
        return batch

    def _complete_request(self, worker: WorkerRecord, report: RolloutReport) -> None:
        """Remove the worker's oldest request, because its rollout is part of a batch."""
        ledger = self._flow.ledger
        worker.handle.pop()
        worker.requests.popleft()
        ledger.take_back(worker.index, worker.info.frames - report.frames)
        for reason, frames in report.lost.items():  # lost by processes of the worker
            ledger.issue(worker.index, frames)
            ledger.lose(worker.index, frames, reason)
        worker.report = report
        worker.process_restarts[worker.incarnation] = report.restarts
        worker.version = report.policy_version
        worker.frames += report.frames
        worker.since_update += 1

    # Requests

    def _top_up(self, depth: int, learner_waits: bool) -> None:
        """Request rollouts until each worker has `depth` of them, one per worker in turn.

        Sync rounds are requested from all workers or from none. If `learner_waits`, no weights
        arrive before the next batch is delivered.
        """
        if self._flow.failing is not None:
            return
        with self._flow.statistics.timed("transport"):
            self.members.settle()
            if not self.members.changed:  # older requests must finish before the shares change
                self._request_more(depth, learner_waits)

    def _request_more(self, depth: int, learner_waits: bool) -> None:
        workers = [worker for worker in self.group.queue if not worker.leaving]
        limit, at_once = self._limit, 1 if self._options.sync else len(workers)
        for level in range(1, depth + 1):
            lacking = [worker for worker in workers if len(worker.requests) < level]
            if not lacking:
                continue
            for group in [lacking] if self._options.sync else [[worker] for worker in lacking]:
                if not self._flow.more_needed:
                    return
                if limit and not limit.may_start(self._requested, learner_waits, at_once):
                    return
                self._request(group)

    def _request(self, workers: Sequence[WorkerRecord]) -> None:
        """Request one rollout from each of the workers, to be joined into one batch."""
        random = self._flow.is_random
        infos = {worker.index: worker.info for worker in workers}
        in_place = any(worker.in_place for worker in workers)
        uploader = self._flow.uploads.uploader_for(workers[0].batch_device)
        rows = self.assembly.rows(infos, in_place, uploader)
        preemption = self._options.preemption
        with Uninterrupted():
            for worker, slab_rows in zip(workers, rows, strict=True):
                self._flow.ledger.issue(worker.index, worker.info.frames)
                least = 1 if preemption is None else preemption.min_steps(worker.info.steps)
                version = self._flow.version.number
                worker.request(RolloutRequest(random, slab_rows, least, version))

    def drop(self, reason: str) -> None:
        """Drop everything in flight; then workers may be added or removed."""
        self.members.drop(reason)

    def end_trajectories(self, workers: Iterable[int]) -> None:
        """Give later frames of the workers new trajectory ids, after a rollout was dropped."""
        for worker in self.group.of(list(workers)):
            forget_ids(self._flow.ids, worker.index, worker.info)

    # Hooks and calls

    def before_delivery(self, td: TensorDictBase) -> None:
        """Do nothing, because the workers have called the hooks."""

    def set_hook(
        self, name: str, hook: Callable[..., Any] | None, workers: Sequence[int] | None = None
    ) -> None:
        """Call this hook in these, or all present and later, workers from their next rollout on.

        A worker process closes its copy of a hook that has a method `close`.
        """
        alone = workers is not None
        chosen = self.group.present if workers is None else self.group.of(workers)
        self.group.hooks.send(name, hook, chosen, alone)

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function in workers; raise an error of a worker after all have replied."""
        return self.waiter.call(function, calls)

    # Reports and shutdown

    @property
    def policy_lag(self) -> dict[int, int]:
        """Policy versions by which each worker's last delivered rollout was behind, 0 before it."""
        lag = self._flow.version.lag
        return {
            worker.index: lag(worker.version) if worker.report else 0
            for worker in self.group.present
        }

    def report(self) -> dict[str, Any]:
        """Return the statistics of the stream, of each worker, also former ones, and of the server.

        "seconds" of the collector has the phases idle (waiting for rollouts), transport, assemble,
        deliver and user, which add up to "elapsed". "seconds" of each worker has env, policy,
        record and idle, since its first rollout began. "failure" is the reason for the worker's
        last replacement, or ``None``. "transport" of a worker is "shared memory" if it writes into
        the batch itself, otherwise "object store", "messages" or "rpc". "slow_paths" counts workers
        that use one TensorDict per step, or have extras.
        """
        present, former = self.group.present, self.group.former
        workers = sorted([*present, *former], key=lambda worker: worker.index)
        reports = [worker.report for worker in workers if worker.report]
        alive = sum(not worker.starting for worker in present)
        return {
            **self._flow.statistics.report(),
            **self.place.report(),
            "frames_stepped": sum(report.stepped for report in reports),
            "slow_paths": count_slow_paths(report.slow_paths for report in reports),
            "workers": {
                worker.index: {
                    "pid": worker.info.pid,
                    "node": worker.info.node,
                    "transport": worker.handle.transport,
                    "version": worker.version,
                    "restarts": worker.restarts,
                    "failure": worker.failure,
                    "frames": worker.frames,
                    "seconds": worker.report.seconds.report() if worker.report else {},
                }
                for worker in workers
            },
            "workers_alive": 0 if self._flow.closed else alive,
        }

    def check_close_env(self, close_env: bool) -> None:
        """Raise RuntimeError unless `close_env` is true, because environments end with workers."""
        if not close_env:
            raise RuntimeError(
                "close_env: expected True, got False; environments always close with their workers"
            )

    def close(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers and leave the engine. Idempotent."""
        self.group.close(timeout)
        self._engine.leave()
        self.place.close(timeout)
        self.assembly.close()
