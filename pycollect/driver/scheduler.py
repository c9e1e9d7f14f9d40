"""A source of batches with workers in other processes: who collects what, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from pycollect._core import Uninterrupted
from pycollect.data.policy_stream import PolicyStream
from pycollect.data.weights import NO_WEIGHTS, Weights, weights_of
from pycollect.driver.accounts import count_slow_paths
from pycollect.driver.assembly import Assembly, PendingBatch, in_flight_bytes
from pycollect.driver.flow import Flow
from pycollect.driver.membership import Membership
from pycollect.driver.options import RemoteOptions
from pycollect.driver.policy_server import PolicyProcess, ProcessPlan
from pycollect.driver.policy_servers import Newest, NodePlan, NodeServers, PolicyServers
from pycollect.driver.random_streams import GroupStreams, ServedStreams
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.sending import WeightSender
from pycollect.driver.served_weights import LiveWeights, ServerWeights
from pycollect.driver.source import Batch, WorkerStreams
from pycollect.driver.waiting import Awaiting
from pycollect.driver.weights import PolicyUpdates, WorkerWeights
from pycollect.driver.workers import WorkerGroup
from pycollect.errors import WorkerError, is_interrupt, without_frames
from pycollect.transport.messages import Rollout, RolloutRequest
from pycollect.transport.process import Engine
from pycollect.worker.report import RolloutReport


def stats_of(flow: Flow, group: WorkerGroup) -> dict[str, Any]:
    """The stream's statistics, and what each worker told last, former ones included.

    "seconds" of the collector has the phases idle (waiting for rollouts), transport, assemble,
    deliver and user, which add up to "elapsed"; "seconds" of each worker has env, policy,
    record and idle, since its first rollout began. "failure" says why it was last replaced, or is
    None. "transport" of a worker is "shared memory", where it writes into the batch itself, else
    "object store", "messages" or "rpc". "slow_paths" counts workers that go through one TensorDict
    per step, or have extras.
    """
    present, former = group.present, group.former
    everyone = sorted([*present, *former], key=lambda worker: worker.index)
    reports = [worker.report for worker in everyone if worker.report]
    return {
        **flow.statistics.report(),
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
            for worker in everyone
        },
        "workers_alive": 0 if flow.closed else sum(not worker.starting for worker in present),
    }


if TYPE_CHECKING:
    from pycollect.inference.server import InferenceServer


class Scheduler:
    """Asks workers for rollouts, awaits them, and makes batches of them.

    Args:
        plans: one per worker.
        policy: the caller's, whose weights are sent; None: random actions, or built by workers.
        engine: is left when the scheduler is closed.
        server: calls the policy for all workers, here; or the plan of a process that does, and its
            engine; None: they do.
        nodes: how it is called for workers on other nodes; None: there, `server` does so, too.

    Attributes:
        group: who is there.
        members: who comes and goes.
        awaiting: waits for them.
        weights, streams: the policy's, and of random numbers.
    """

    elsewhere = True

    def __init__(
        self,
        flow: Flow,
        options: RemoteOptions,
        plans: Sequence[WorkerPlan],
        policy: Any,
        engine: Engine,
        server: InferenceServer | ProcessPlan | None = None,
        nodes: NodePlan | None = None,
    ) -> None:
        self._flow, self._options, self._plans = flow, options, plans
        self._engine = engine
        self.policy = policy
        depth = max(options.ahead, 1)
        self.assembly = Assembly(options.joined, depth, options.uneven, options.padded)
        self._servers = self._all_servers(server, nodes)
        self.group = WorkerGroup(flow, engine, options, self._servers)
        self.awaiting = Awaiting(flow, self.group, options, self._servers)
        self.weights: WorkerWeights
        self.streams: WorkerStreams
        self.weights, self.streams = self._policys(server)
        self.members = Membership(
            flow, self.group, self.awaiting, self.weights, self.assembly, options
        )

    def _all_servers(
        self, server: InferenceServer | ProcessPlan | None, nodes: NodePlan | None
    ) -> PolicyServers:
        """Those in other processes."""
        flow, options, policy = self._flow, self._options, self.policy
        newest: Newest = partial(_live_weights, flow, policy)
        process: PolicyProcess | None = None
        if isinstance(server, ProcessPlan):
            process = PolicyProcess(flow, options, server)
            newest = partial(_sent_weights, flow, process.group.weights)
        own = None if nodes is None else NodeServers(flow, options, nodes, newest)
        return PolicyServers(process, own)

    def _policys(
        self, server: InferenceServer | ProcessPlan | None
    ) -> tuple[WorkerWeights, WorkerStreams]:
        """Weights and random streams, by whoever calls the policy."""
        flow, group, awaiting, policy = self._flow, self.group, self.awaiting, self.policy
        options, process, nodes = self._options, self._servers.process, self._servers.nodes
        if server is None:
            updates = PolicyUpdates(flow, group, options, policy)
            return updates, GroupStreams(group, awaiting, policy)
        beside = [] if nodes is None else [nodes]
        if process is not None:
            sent = ServerWeights(flow, process, nodes, options, policy, group.ids)
            return sent, ServedStreams(group, awaiting, sent, [process, *beside], policy)
        assert not isinstance(server, ProcessPlan)
        server.count_by(flow.version)
        flow.policy_stream = PolicyStream(server.device)
        server.call_on(flow.policy_stream)
        live = LiveWeights(flow, server, policy, server.is_ours, group.ids, options, nodes)
        return live, ServedStreams(group, awaiting, live, [server, *beside], policy)

    def start(self) -> None:
        """Start the workers, and check what they turn out to be."""
        self._servers.start()
        self.members.start(self._plans)
        for in_place in (True, False):
            own = [worker for worker in self.group.present if worker.in_place is in_place]
            if own:
                needed = in_flight_bytes(
                    {worker.index: worker.info for worker in own}, self._options.ahead + 1
                )
                self._engine.check_memory(needed, in_place)
        self.members.prepare_slabs()
        self.weights.start()

    @property
    def batch_frames(self) -> int:
        """Frames of a full batch: of all workers, async of the largest rollout."""
        return self.members.batch_frames

    # Collecting

    def collect(self) -> None:
        """See :meth:`Source.collect`. The slabs of the batch are free for others then."""
        if not self.group.present:
            raise RuntimeError("all workers were stopped; call add_collectors() first")
        self._flow.collecting = True  # the policy may be called in this process meanwhile
        try:
            self._top_up(max(self._options.ahead, 1))
            if self._options.sync:
                self._collect_round()
            else:
                self._collect_first()
            self._top_up(self._options.ahead)
        finally:
            self._flow.collecting = False

    def _collect_round(self) -> None:
        """A rollout of each."""
        if self._flow.failing is not None:  # there is no whole round any more
            raise without_frames(self._flow.failing)
        workers = [worker for worker in self.group.present if worker.requests]
        with self._flow.statistics.timed("assemble"):
            pending = self._pending(workers)
        reports = self._await_round(workers, pending)
        with Uninterrupted():
            self._flow.unclaimed = self._joined(workers, pending, reports)

    def _await_round(
        self, workers: Sequence[WorkerRecord], pending: PendingBatch
    ) -> list[RolloutReport]:
        """What is said of the oldest rollout of each, once it is in its row.

        Whatever can be made of the batch before is made then: the workers of a sync round wait for
        all that comes after.
        """
        rows = {worker.index: row for row, worker in enumerate(workers)}
        waiting = list(workers)
        reports: dict[int, RolloutReport] = {}
        while waiting:
            self._stop_stragglers(waiting, len(workers))
            worker = self.awaiting.any_of(waiting)
            rollout = self.awaiting.rollout_of(worker)
            if rollout is None:
                continue
            waiting.remove(worker)
            with self._flow.statistics.timed("assemble"):
                self.assembly.place(pending, rows[worker.index], rollout)
                if waiting:  # the last one's goes with the rest
                    self.assembly.send(pending, rows[worker.index])
            reports[worker.index] = rollout.report
        return [reports[index] for index in rows]

    def _stop_stragglers(self, waiting: Sequence[WorkerRecord], workers: int) -> None:
        """Once enough of so many workers are done, the others end their rollouts."""
        preemption = self._options.preemption
        if preemption is None or workers - len(waiting) < preemption.enough(workers):
            return
        for worker in waiting:
            if not worker.starting:
                worker.handle.stop()

    def _collect_first(self) -> None:
        """The first rollout that is there."""
        worker, rollout = self._first_ready()
        with Uninterrupted():
            with self._flow.statistics.timed("assemble"):
                pending = self._pending([worker])
                self.assembly.place(pending, 0, rollout)
            self._flow.unclaimed = self._joined([worker], pending, [rollout.report])
            self.group.serve_last(worker)
            self.weights.served(worker)

    def _first_ready(self) -> tuple[WorkerRecord, Rollout]:
        """The first rollout that is there. One that failed is raised after those that are done."""
        flow = self._flow
        while True:
            waiting = [own for own in self.group.line if own.requests or own.starting]
            if flow.failing is None:
                try:
                    worker = self.awaiting.any_of(waiting)
                except WorkerError as error:  # it, or the policy's server, ended once too often
                    for stalled in self.group.of([error.worker]):
                        self._give_up(stalled, error)
                    continue
            elif done := self.awaiting.one_now(waiting):
                worker = done
            else:
                raise without_frames(flow.failing)
            try:
                rollout = self.awaiting.rollout_of(worker)
            except Exception as error:
                if is_interrupt(error):
                    raise
                self._give_up(worker, error)
                continue
            if rollout is not None:
                return worker, rollout

    def _give_up(self, worker: WorkerRecord, error: Exception) -> None:
        """Nothing more comes from this one; what it failed of is raised later."""
        self._flow.failing = self._flow.failing or without_frames(error)
        self.group.release(worker)

    def _pending(self, workers: Sequence[WorkerRecord]) -> PendingBatch:
        """The batch of their oldest rollouts."""
        infos = [worker.info for worker in workers]
        uploader = self._flow.uploads.uploader_for(workers[0].place)
        return self.assembly.pending(workers[0].requests[0], infos, uploader)

    def _joined(
        self,
        workers: Sequence[WorkerRecord],
        pending: PendingBatch,
        reports: Sequence[RolloutReport],
    ) -> Batch:
        """The batch of rollouts that are in their rows, which are taken off."""
        first = workers[0]
        places = first.place, first.reported_device
        with self._flow.statistics.timed("assemble"):
            indices = [worker.index for worker in workers]
            by_id = dict(zip(indices, reports, strict=True))
            batch = self.assembly.join(pending, by_id, self._flow.ids, *places)
        for worker, report in zip(workers, reports, strict=True):
            self._take_off(worker, report)
        return batch

    def _take_off(self, worker: WorkerRecord, report: RolloutReport) -> None:
        """The worker's oldest rollout is part of a batch now."""
        ledger = self._flow.ledger
        worker.handle.pop()
        worker.requests.popleft()
        ledger.take_back(worker.index, worker.info.frames - report.frames)
        for reason, frames in report.lost.items():  # its own processes were asked for these, too
            ledger.issue(worker.index, frames)
            ledger.lose(worker.index, frames, reason)
        worker.report = report
        worker.version = report.policy_version
        worker.frames += report.frames
        worker.since_update += 1

    # Asking

    def _top_up(self, depth: int) -> None:
        """Queue rollouts until each worker has that many, one each in turn.

        Sync rounds are queued for all workers or for none.
        """
        if self._flow.failing is not None:
            return
        with self._flow.statistics.timed("transport"):
            self.members.settle()
            if not self.members.changed:  # what was asked of workers before they changed is first
                self._ask_for_more(depth)

    def _ask_for_more(self, depth: int) -> None:
        workers = [worker for worker in self.group.present if not worker.leaving]
        for level in range(1, depth + 1):
            lacking = [worker for worker in workers if len(worker.requests) < level]
            if not lacking:
                continue
            for group in [lacking] if self._options.sync else [[worker] for worker in lacking]:
                if not self._flow.more_needed:
                    return
                self._request(group)

    def _request(self, workers: Sequence[WorkerRecord]) -> None:
        """Queue one rollout of each, which are to become one batch."""
        random = self._flow.is_random
        infos = {worker.index: worker.info for worker in workers}
        in_place = any(worker.in_place for worker in workers)
        uploader = self._flow.uploads.uploader_for(workers[0].place)
        rows = self.assembly.rows(infos, in_place, uploader)
        preemption = self._options.preemption
        with Uninterrupted():
            for worker, own in zip(workers, rows, strict=True):
                self._flow.ledger.issue(worker.index, worker.info.frames)
                least = 1 if preemption is None else preemption.min_steps(worker.info.steps)
                worker.ask_for(RolloutRequest(random, own, least))

    def drop(self) -> None:
        """Forget the rollouts that were asked for; then workers may come or go."""
        for worker in self.group.present:
            worker.drop()
        self.members.settle()

    def reset(self, flags: Sequence[bool] | None) -> None:
        """Reset the environments of some workers, whose rollouts are dropped.

        Args:
            flags: of each worker by id; None: all.

        Raises:
            ValueError: not one for each worker.
            RuntimeError: some of a sync collector's workers, while it collects ahead.
        """
        flow = self._flow
        chosen = self._chosen(flags)
        if len(chosen) == len(self.group.present):
            flow.drop("reset")
            self.drop()
            chosen = self.group.present
        elif self._options.sync and flow.ledger.in_flight:
            raise RuntimeError(
                "reset_idx: expected all workers, because prefetched rollouts of all are in "
                "flight; use prefetch=0 to reset only some"
            )
        for worker in chosen:
            flow.lose_worker(worker.index, worker.frames_in_flight, "reset")
            worker.drop()
        self.awaiting.call_all({worker.index: ("reset",) for worker in chosen})

    def _chosen(self, flags: Sequence[bool] | None) -> list[WorkerRecord]:
        if flags is None:
            return self.group.present
        workers = self.group.in_order
        if len(flags) != len(workers):
            raise ValueError(
                f"reset_idx: expected one flag per worker ({len(workers)}), got {len(flags)}"
            )
        return [worker for worker, is_chosen in zip(workers, flags, strict=True) if is_chosen]

    # Hooks and calls

    def before_delivery(self, td: TensorDictBase) -> None:
        """Hooks were called by the workers."""

    def set_hook(
        self, name: str, hook: Callable[..., Any] | None, workers: Sequence[int] | None = None
    ) -> None:
        """Workers call this hook from their next rollout on."""
        alone = workers is not None
        chosen = self.group.present if workers is None else self.group.of(workers)
        self.group.hooks.send(name, hook, chosen, alone)

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function in workers; an error is raised here once all have replied."""
        return self.awaiting.call(function, calls)

    # What it is and does

    @property
    def policy_lag(self) -> dict[int, int]:
        """Per worker: by how many versions its last delivered rollout was behind, 0 before it."""
        version = self._flow.version.number
        return {own.index: version - own.version if own.report else 0 for own in self.group.present}

    def report(self) -> dict[str, Any]:
        """See :func:`stats_of`."""
        return {**stats_of(self._flow, self.group), **self._servers.report()}

    def check_close_env(self, close_env: bool) -> None:
        """Raise RuntimeError unless `close_env` is true, because environments end with workers."""
        if not close_env:
            raise RuntimeError(
                "close_env: expected True, got False; environments always close with their workers"
            )

    def close(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers, and leave the engine. Idempotent."""
        self.group.close(timeout)
        self._servers.close_nodes(timeout)
        self._engine.leave()
        self._servers.close_process(timeout)
        self.assembly.close()


def _live_weights(flow: Flow, policy: Any) -> tuple[Weights, int] | None:
    """Those of a policy that is called here, for who begins to call a copy, and their version."""
    weights = weights_of(policy) if flow.options.sends else NO_WEIGHTS
    return (weights, flow.version.number) if weights else None


def _sent_weights(flow: Flow, sender: WeightSender) -> tuple[Weights, int] | None:
    """Those that were sent last, for who begins with others, and their version."""
    return (sender.newest, flow.version.number) if sender.newest else None
