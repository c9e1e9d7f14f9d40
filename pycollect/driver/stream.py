"""How the next batch of a stream is collected, finished, counted, and given to its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from tensordict import TensorDictBase

from pycollect._core import Uninterrupted
from pycollect.data.devices import CPU
from pycollect.data.layout import Key
from pycollect.data.trajectory_queue import TrajectoryBatch
from pycollect.data.upload import Uploads
from pycollect.driver.accounts import Progress
from pycollect.driver.background import Background
from pycollect.driver.delivery import (
    Batch,
    BufferWrite,
    assemble,
    extend,
    finish,
    pieces,
    put,
    rollouts_of,
)
from pycollect.driver.flow import Flow
from pycollect.driver.in_process import InProcess
from pycollect.driver.pace import Pacing
from pycollect.driver.scheduler import Scheduler
from pycollect.errors import (
    LimitError,
    WorkerError,
    is_interrupt,
    not_the_end,
    warn_user,
    without_frames,
)

T = TypeVar("T")

Source: TypeAlias = InProcess | Scheduler
"""Produces batches, with one worker in this process or with workers in other processes.

A source writes to the Flow that it was made with, and has no reference to a collector. `collect`
stores the next batch as the flow's `unclaimed`; its frames stay in flight. An interrupt discards an
incomplete batch. Changes that must agree with each other are made in an uninterruptible block,
which also sets `unclaimed`.
"""


class Finished(NamedTuple):
    """A batch ready for the caller; ``td`` is ``None`` if it went to the replay buffer."""

    td: TensorDictBase | None
    frames_of: Mapping[int, int]
    versions: Mapping[int, int] = MappingProxyType({})  # of each worker's rollout


class Stream:
    """An iterator over the batches of a source; ``iter()``, ``next()`` and ``.next()`` share it.

    A batch is delivered as it was collected, as complete trajectories, or by writes to the replay
    buffer. Its frames are counted in the ledger.
    """

    def __init__(self, flow: Flow, source: Source) -> None:
        self._flow, self._source = flow, source
        self._progress: Progress | None = None
        self._background = Background()
        self._pace = Pacing(flow, self._background.wake)
        self._dropped = 0  # batches in a row
        self._ready: deque[Finished] = deque()  # counted as delivered; more than one is rare
        self._batch_devices: tuple[torch.device, torch.device | None] = (CPU, None)

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Return the collector itself."""
        return self

    def __next__(self) -> TensorDictBase | None:
        """Return the next batch like `next`, but raise StopIteration at the end."""
        taken = self._take()
        if taken is None:
            raise StopIteration
        return taken.td

    def next(self) -> TensorDictBase | None:
        """Return the next batch, or ``None`` after `total_frames` frames.

        With a replay buffer, the batch is written to it and ``None`` is returned.

        Returns:
            A TensorDict of batch size [T] or [P, T] for one worker, [B, T] or [B, P, T] for B sync
            workers; the class lists its shapes under "Yields". The batch contains the observations,
            the policy's outputs, and under "next" the true successor observations, "reward",
            "terminated", "truncated" and "done", each [..., 1]. If the environment declares a
            vector as `reward_space`, "reward" is [..., k].

        Raises:
            RuntimeError: The collector was shut down before its end.
            WorkerError: A worker died.
            Exception: An environment or the policy raised it. Every later call raises it again.
        """
        taken = self._take()
        return None if taken is None else taken.td

    def _take(self) -> Finished | None:
        """Return the next batch; ``None`` at the end. An interrupt leaves it for the next call."""
        taken: Finished | None = None
        try:
            with self._flow.moving:
                self._flow.check_not_collecting("next")
                if self._ready and self._flow.is_stale(self._ready[0].versions):
                    self._source.end_trajectories(self._ready[0].frames_of)
                    self._drop_ready("max_policy_lag")
                if not self._ready and (self._flow.has_ended or not self._advance()):
                    self._end()
                    return None
                taken = self._ready[0]
                del self._ready[0]  # an interrupt may come after a call, but not after this
            self._pace.notify()
        except BaseException:
            if taken is not None:
                self._ready.appendleft(taken)
            raise
        return taken

    def _advance(self) -> bool:
        """Collect and finish a batch; return False if the stream ends before it is complete."""
        self._flow.check_not_closed()
        return self._within(self._deliver_next)

    def _within(self, collect: Callable[[], T]) -> T:
        """Return the result of `collect`; time it, and convert a StopIteration of user code."""
        self._flow.statistics.entered()
        try:
            return collect()
        except StopIteration as error:
            if isinstance(self._flow.failure, StopIteration):
                self._flow.failure = without_frames(not_the_end(error))
            raise not_the_end(error) from error
        finally:
            self._flow.statistics.left()

    def _deliver_next(self) -> bool:
        if self._flow.failure is not None:
            raise without_frames(self._flow.failure)
        self._background.check()
        if self._flow.options.replay_buffer is not None:
            if self._flow.queue is None:
                self._fill_with_rollouts()
            else:
                self._fill_with_trajectories()
            self._ready.append(Finished(None, {}))
            return True
        return self._deliver_frames() if self._flow.queue is None else self._deliver_trajectories()

    def _deliver_frames(self) -> bool:
        """Finish the next batch in the form in which it was collected."""
        batch, td = self._assemble(self._flow.uploads)
        with self._delivering() as counted:
            with Uninterrupted():
                self._flow.claim()
                self._count(batch.frames_of, counted)
            with self._flow.statistics.timed("deliver"):
                td = self._finish(td, batch.tensors, batch.frames_of)
                self._source.before_delivery(td)
                self._flow.count_lag(self._flow.lags(batch.versions), batch.frames_of)
                self._ready.append(Finished(td, batch.frames_of, batch.versions))
        self._show_progress(sum(batch.frames_of.values()))
        return True

    def _finish(
        self, td: TensorDictBase, host: Mapping[Key, torch.Tensor], frames_of: Mapping[Any, int]
    ) -> TensorDictBase:
        """Return the batch in its final form."""
        return finish(td, self._flow.options, host)

    def _deliver_trajectories(self) -> bool:
        """Finish the next complete trajectories, assembled in host memory.

        Frames of other trajectories stay in flight until these are delivered.
        """
        assert self._flow.queue is not None
        popped: TrajectoryBatch | None = None
        with self._delivering() as counted:
            while popped is None:
                with Uninterrupted():
                    popped = self._flow.queue.pop()
                    if popped is not None:
                        self._count(popped.frames, counted)
                if popped is None:
                    if self._flow.has_ended:
                        return False
                    self._flow.check_not_closed()
                    self._enqueue()
            with self._flow.statistics.timed("deliver"):
                td = self._flow.uploads.moved(popped.td, *self._batch_devices)
                td = self._finish(td, {}, popped.frames)
                self._ready.append(Finished(td, popped.frames))
        self._show_progress(sum(popped.frames.values()))
        return True

    def _fill_with_rollouts(self) -> None:
        """Write the rollouts of a batch to the replay buffer, one by one."""
        batch, td = self._assemble(self._flow.uploads)
        with self._writing() as write:
            with Uninterrupted():
                write.expect(batch.frames_of)
                self._flow.claim()
            for frames_of, piece in pieces(td, batch, self._flow.options):
                done = finish(piece, self._flow.options, batch.tensors)
                self._source.before_delivery(done)
                lags = self._flow.lags({worker: batch.versions[worker] for worker in frames_of})
                if self._flow.exceeds_limit(lags):  # there were updates meanwhile
                    with Uninterrupted():
                        write.withdraw(frames_of)
                        self._lose_stale(frames_of)
                    continue
                extend(done, self._flow.options)
                write.count(frames_of)
                self._flow.count_lag(lags, frames_of)

    def _fill_with_trajectories(self) -> None:
        """Write the trajectories that a batch completes to the replay buffer."""
        queue, options = self._flow.queue, self._flow.options
        assert queue is not None
        if not queue.complete:  # an interrupted call may have left some
            self._enqueue()
        with self._writing() as write:
            while not self._flow.released and (waiting := queue.complete):
                with Uninterrupted():
                    popped = queue.pop(min(waiting, options.trajs_per_write or waiting))
                    assert popped is not None  # `complete` counted them
                    write.expect(popped.frames)
                td = self._flow.uploads.moved(popped.td, *self._batch_devices)
                put(self._finish(td, {}, popped.frames), options.replay_buffer)
                write.count(popped.frames)

    @contextmanager
    def _writing(self) -> Iterator[BufferWrite]:
        """Count everything written to the replay buffer within as one batch."""
        write = BufferWrite(self._flow.ledger, self._flow.statistics)
        try:
            with self._flow.statistics.timed("deliver"), write:
                yield write
        finally:
            self._flow.statistics.count_batch(0)  # its frames were counted as they were written
        self._show_progress(write.frames)

    @contextmanager
    def _delivering(self) -> Iterator[dict[int, int]]:
        """Deliver a batch; frames counted within are lost if it does not become ready."""
        counted: dict[int, int] = {}
        try:
            yield counted
        except BaseException:
            if not self._ready:
                self._lose_counted(counted, "incomplete")
            raise

    def _count(self, frames_of: Mapping[int, int], counted: dict[int, int]) -> None:
        """Count frames of each worker as delivered, and note them in `counted`."""
        counted.update(frames_of)
        for worker, frames in frames_of.items():
            self._flow.ledger.deliver(worker, frames)
        self._flow.statistics.count_batch(sum(frames_of.values()))

    def _lose_counted(self, frames_of: Mapping[int, int], reason: str) -> None:
        """Move frames that were counted as delivered to the lost ones."""
        with Uninterrupted():
            for worker, frames in frames_of.items():
                self._flow.ledger.deliver(worker, -frames)
                self._flow.ledger.lose(worker, frames, reason)
            self._flow.statistics.frames -= sum(frames_of.values())

    def _drop_ready(self, reason: str) -> None:
        with Uninterrupted():
            while self._ready:
                self._lose_counted(self._ready.pop().frames_of, reason)

    def _assemble(self, uploads: Uploads | None) -> tuple[Batch, TensorDictBase]:
        """Return the next batch as it was collected, not claimed yet.

        Later calls raise the same exception again, unless it is a LimitError of this process.
        """
        try:
            batch = self._collect()
            with self._flow.statistics.timed("deliver"):
                return batch, assemble(batch, self._flow.options, uploads)
        except Exception as error:
            self._fail(error)
            raise

    def _enqueue(self) -> None:
        """Collect a batch and append its rollouts to their trajectories."""
        assert self._flow.queue is not None
        batch, td = self._assemble(None)
        self._source.before_delivery(td)
        if self._flow.released:  # the hook shut the collector down
            self._flow.check_not_closed()
        if self._flow.unclaimed is not batch:  # the hook dropped it, for example by set_seed
            return
        try:
            with self._flow.statistics.timed("deliver"), Uninterrupted():
                self._flow.claim()
                self._batch_devices = batch.device, batch.reported_device
                for worker, source, rollout in rollouts_of(td, batch):
                    if rollout.ndim > 2:
                        rollout = rollout.flatten(0, rollout.ndim - 2)
                    lost = self._flow.push(worker, rollout, source)
                    self._flow.ledger.lose(worker, lost, "incomplete")
                    self._flow.cut_frames += lost
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Let every later call raise this error again, unless it is an interrupt or a limit error.

        A LimitError of this process is not the workers' fault, so collection can continue after it.
        """
        own_limit = isinstance(error, LimitError) and not isinstance(error.__cause__, WorkerError)
        if not own_limit and not is_interrupt(error):
            self._flow.failure = without_frames(error)

    def _collect(self) -> Batch:
        """Return the next batch; until it is claimed, repeat the same one."""
        batch = self._fresh()
        if batch is None:
            if due := self._source.place.due():
                with self._flow.statistics.timed("transport"):
                    self._push_weights(due)
            while batch is None:
                with self._flow.policy_stream.collecting(self._background.is_current):
                    self._source.collect()
                batch = self._fresh()
        if batch.on_device:
            self._flow.policy_stream.hand_over(batch.on_device.values())
        return batch

    def _fresh(self) -> Batch | None:
        """Return the batch that was collected, unless there is none; drop it if it is too old."""
        flow, batch = self._flow, self._flow.unclaimed
        if batch is None or not flow.is_stale(batch.versions):
            self._dropped = 0
            return batch
        with Uninterrupted():
            flow.unclaimed = None
            self._lose_stale(batch.frames_of)
        self._dropped += 1
        if self._dropped == 20:
            warn_user(
                f"max_policy_lag: the last {self._dropped} batches were dropped, because each was "
                f"more than {flow.options.max_policy_lag} policy versions old; update weights less "
                "often, collect fewer frames_per_batch, or raise max_policy_lag"
            )
        return None

    def _lose_stale(self, frames_of: Mapping[int, int]) -> None:
        """Count frames of each worker as lost, because they are too old to be delivered."""
        for worker, frames in frames_of.items():
            self._flow.ledger.lose(worker, frames, "max_policy_lag")
        self._source.end_trajectories(frames_of)

    def _push_weights(self, workers: Sequence[int]) -> None:
        """Send the policy's weights to workers that are due for an automatic update."""
        self._source.place.push(workers)

    def _end(self) -> None:
        """End the stream; frames of unfinished trajectories are lost."""
        flow = self._flow
        if flow.queue is not None and not flow.closed:
            flow.cut_frames += sum(flow.queue.held.values())  # else more frames would be needed
            self._drop("incomplete")
        self._close_progress()

    def _drop(self, reason: str) -> None:
        """Drop everything in flight, in this process and in the workers."""
        self._drop_ready(reason)
        self._source.drop(reason)
        self._pace.notify()

    def _show_progress(self, frames: int) -> None:
        if not self._flow.options.progress:
            return
        if self._progress is None:
            self._progress = Progress(self._flow.options.total_frames)
        lag = max(self._source.policy_lag.values(), default=0)
        self._progress.update(frames, self._flow.statistics.episode_return, lag)
        if self._flow.has_ended:
            self._close_progress()

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
