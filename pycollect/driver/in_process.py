"""A source of batches with one worker in this process, whose policy is the caller's."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect._core import RolloutControl, SharedNumber, Slab, Uninterrupted
from pycollect.data.devices import indexed
from pycollect.data.extras import joined
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.generators import GeneratorState, derived_seeds, seed_chain
from pycollect.data.layout import Key
from pycollect.data.slabs import check_lease, make_pool, slab_tensors
from pycollect.data.weights import load_weights
from pycollect.driver.accounts import count_slow_paths
from pycollect.driver.delivery import Batch, blank_batch, warn_of_sums
from pycollect.driver.flow import Flow, ShutDownError
from pycollect.driver.policy_place import LivePolicy
from pycollect.driver.state import CollectorState, WorkerState, check_generators
from pycollect.errors import WorkerError, described, is_interrupt
from pycollect.policy.device import PolicyStream
from pycollect.worker.options import POST, PRE, PostHook
from pycollect.worker.report import RolloutReport
from pycollect.worker.worker import Worker

# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3


class OwnStreams:
    """Random streams of the worker in this process."""

    def __init__(self, worker: Worker, place: LivePolicy, settle: Callable[[], None]) -> None:
        self._worker, self._place, self._settle = worker, place, settle
        self.report: RolloutReport | None = None

    def seed(self, root: int, static: bool) -> int:
        seeds, following = seed_chain(root, self._worker.num_seeds, static)
        self._worker.set_seed(seeds, root)
        return following

    def states(self) -> dict[int, WorkerState]:
        """Return the state of the worker's random generators; count its episodes first."""
        self._settle()
        return {0: WorkerState(self._worker.generator_state())}

    def check(self, states: Mapping[int, WorkerState]) -> None:
        check_generators(0, states[0], 0, self._worker.num_envs)
        if states[0].policy:
            raise ValueError(
                "state_dict: expected no 'policies' for a collector without worker processes"
            )

    def resume(self, state: CollectorState) -> None:
        """Restore weights and generators of the worker, and reset it."""
        if state.policy:
            load_weights(self._place.policy, state.policy)
            self._place.renew_copy()
        generators = state.workers[0].generators
        seeds = derived_seeds(self._worker.num_seeds, state.entropy, state.batches, 0)
        if generators is None:
            self._worker.set_seed(seeds, derived_seeds(1, state.entropy, state.batches)[0])
        else:
            assert isinstance(generators, GeneratorState)  # see `check`
            self._worker.resume(generators, seeds)
        self.report = None


class InProcess:
    """A source with one worker, which collects when a batch is requested."""

    is_remote = False

    def __init__(
        self, flow: Flow, worker: Worker, policy: Any, is_owned: bool, post_hook: PostHook | None
    ) -> None:
        self._flow = flow
        self.worker = worker
        self.policy = worker.policy if is_owned else policy
        flow.policy_stream = PolicyStream(indexed(worker.acting_device))
        self.place = LivePolicy(flow, worker, self.policy, is_owned, lambda: [0])
        self.streams = OwnStreams(worker, self.place, self._settle)
        self._pre_hook, worker.pre_collect_hook = worker.pre_collect_hook, None
        self._post_hook = post_hook
        self._numbers_on_device = TRAJ_IDS not in worker.slab_leaves.keys
        self._numbered = 0  # number of trajectories numbered there
        devices = worker.options.devices
        self._batch_devices = devices.batch_device or worker.device, devices.reported
        uploader = flow.uploads.uploader_for(self._batch_devices[0])
        allocate = None if uploader is None else uploader.allocate
        self._control = RolloutControl(flow.stop, 1, 1, SharedNumber())
        self._pool = make_pool(worker.placement, _SLABS_KEPT, allocate)

    def start(self) -> None:
        """Check the environment, which exists already."""
        self._flow.check_environment(self.worker.leaves, self.worker.bounded)
        warn_of_sums(self._flow.options, self.worker.num_envs)

    @property
    def batch_frames(self) -> int:
        return self.worker.num_envs * self.worker.steps

    # Collecting

    def collect(self) -> None:
        """Produce the next batch; see `Source` in `stream`.

        If the environment raises an exception, its cause is a WorkerError.
        """
        flow = self._flow
        issued = 0
        try:
            if self._pre_hook is not None:
                self._pre_hook()  # may seed, reset or end the collector
                flow.check_not_closed()
            random, slab = flow.is_random, self._pool.acquire()
            with Uninterrupted():
                issued = self.batch_frames
                flow.ledger.issue(0, issued)
            report = self._rollout(slab, random)
            if flow.stop.value or flow.released:  # perhaps by the environment or the policy
                self._lose(issued, "shutdown")
                flow.check_not_closed()
            with Uninterrupted():
                flow.unclaimed = self._batch_of(slab, report)
        except ShutDownError:
            raise
        except BaseException as error:
            if is_interrupt(error):  # the rollout was given up
                if flow.unclaimed is None:
                    self._lose(issued, "incomplete")
                    self.worker.reset_later()  # else trajectories would lack these frames
                raise
            self._lose(issued, "env_error")
            text = f"worker 0 raised {described(error)}"
            failure = WorkerError(text, 0, 0, traceback.format_exc())
            failure.__cause__ = error.__cause__
            raise error from failure

    def _rollout(self, slab: Slab, random: bool) -> RolloutReport:
        flow = self._flow
        flow.collecting = True
        try:
            return self.worker.collect(slab, 0, flow.version.number, random, self._control)
        finally:
            flow.collecting = False

    def _lose(self, frames: int, reason: str) -> None:
        if not self._flow.released:  # otherwise the frames are lost already
            self._flow.ledger.lose(0, frames, reason)

    def _batch_of(self, slab: Slab, report: RolloutReport) -> Batch:
        worker = self.worker
        with self._flow.statistics.timed("assemble"):
            check_lease(slab, slab.header())
            tensors = slab_tensors(slab, worker.batch_shape, worker.slab_leaves.keys)
            report = _kept(report)
            self._number(tensors, report)
            lazy = report.extras
            extras = None if lazy is None else joined([lazy.value], -1, worker.batch_size)
        self.streams.report = report
        self._flow.ledger.take_back(0, self.batch_frames - report.frames)
        return Batch(
            slab,
            tensors,
            worker.batch_shape,
            worker.leaves,
            {0: report.frames},
            {0: report.policy_version},
            report.episodes,
            extras,
            *self._batch_devices,
            report.on_device,
        )

    def _number(self, tensors: Mapping[Key, torch.Tensor], report: RolloutReport) -> None:
        """Replace the worker's trajectory ids by ids of the whole run."""
        ids = self._flow.ids
        if not self._numbers_on_device:
            shape = self.worker.num_envs, self.worker.steps
            ids.renumber(0, tensors[TRAJ_IDS].view(shape))
        else:  # ids on the device start at 0
            local = report.on_device[TRAJ_IDS]
            if offset := self._issue_ids():
                local += torch.where(local < 0, 0, offset)

    def _issue_ids(self) -> int:
        """Issue the ids of trajectories numbered on the device; return their offset there."""
        before, self._numbered = self._numbered, self.worker.trajectories
        return self._flow.ids.issue(self._numbered - before) - before

    def _settle(self) -> None:
        """Count the ids and episodes of the last rollout if they were still on the device."""
        self._flow.statistics.count_episodes(self.worker.settle())
        if self._numbers_on_device:
            self._issue_ids()

    def before_delivery(self, td: TensorDictBase) -> None:
        if self._post_hook is not None:
            self._post_hook(td)

    def drop(self, reason: str) -> None:
        """Drop everything in flight; the next rollout begins with a reset."""
        with Uninterrupted():
            self._flow.drop(reason)
            self.worker.reset_later()

    def end_trajectories(self, workers: Iterable[int]) -> None:
        """Reset all environments before the next rollout."""
        self.worker.reset_later()

    def reset(self, index: Any) -> None:
        """Reset the environments that an index into their batch dimensions selects.

        Raises the errors of :meth:`EnvGroups.rows_at`.
        """
        self.worker.reset_rows(self.worker.env.rows_at(index))

    def blank(self) -> Batch:
        """Return a batch of zeros."""
        return blank_batch(self.worker, self._pool.acquire(), *self._batch_devices)

    # Hooks and calls

    def set_hook(
        self, name: str, hook: Callable[..., Any] | None, workers: Sequence[int] | None = None
    ) -> None:
        """Call this hook from the next batch on."""
        if workers is not None and 0 not in workers:
            return
        if name == PRE:
            self._pre_hook = hook
        elif name == POST:
            self._post_hook = hook

    def call(self, function: Callable[..., Any], calls: Mapping[int, Sequence[Any]]) -> list[Any]:
        return [function(self.worker, *arguments) for arguments in calls.values()]

    # Reports and shutdown

    @property
    def policy_lag(self) -> dict[int, int]:
        """Policy versions by which the last rollout was behind, 0 before it.

        The policy is live, so only a rollout from before an update is behind.
        """
        report = self.streams.report
        return {0: self._flow.version.lag(report.policy_version) if report else 0}

    def report(self) -> dict[str, Any]:
        """Return the statistics of the stream and the worker.

        "seconds" has the phases env, policy, record, assemble, deliver and user, which add up to
        "elapsed". The first three are estimated from a sample of the steps. "slow_paths" counts
        whether the policy or the environment uses one TensorDict per step, and extras.
        """
        moving = self._flow.moving
        with Uninterrupted():  # the lock must be left
            if moving.is_own_process and moving.enter_if_free():  # else it waits for a rollout
                try:
                    self._settle()
                finally:
                    moving.__exit__(None, None, None)
        report = self.streams.report
        statistics = self._flow.statistics.report()
        seconds = self.worker.seconds.report()
        statistics["seconds"].update(
            {phase: seconds[phase] for phase in ("env", "policy", "record")}
        )
        return {
            **statistics,
            "frames_stepped": report.stepped if report else 0,
            "slow_paths": count_slow_paths([report.slow_paths] if report else []),
            "workers": {
                0: {
                    "pid": os.getpid(),
                    "node": socket.gethostname(),
                    "version": report.policy_version if report else 0,
                    "restarts": 0,
                    "frames": self._flow.statistics.frames,
                    "seconds": seconds,
                }
            },
            "workers_alive": 0 if self._flow.closed else 1,
        }

    def check_close_env(self, close_env: bool) -> None:
        """Accept any value, because environments in this process can outlive the collector."""

    def close(self, timeout: float | None, close_env: bool) -> None:
        if close_env:
            self.worker.close()


def _kept(report: RolloutReport) -> RolloutReport:
    """Return the report with tensors on the device that later rollouts do not overwrite."""
    # With one environment or one step, `contiguous` would return the reused memory.
    return report._replace(
        on_device={
            key: recorded.clone() if 1 in recorded.shape[:2] else recorded.contiguous()
            for key, recorded in report.on_device.items()
        }
    )
