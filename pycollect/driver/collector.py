"""The stream of batches that a user iterates; the base of all collectors."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from pycollect import checks as check
from pycollect._core import Uninterrupted
from pycollect.data.devices import CPU
from pycollect.data.layout import Key
from pycollect.data.trajectory_queue import TrajectoryBatch
from pycollect.data.upload import Uploads
from pycollect.driver.accounts import Progress, flat
from pycollect.driver.background import Background
from pycollect.driver.batch import Batch
from pycollect.driver.delivery import assemble, finish, prepare, rollouts_of
from pycollect.driver.flow import Flow, ShutDownError
from pycollect.driver.options import warn_of_rounding
from pycollect.driver.pace import Pacing
from pycollect.driver.replay import BufferWrite, extend, pieces, put, warn_of_training
from pycollect.driver.source import Source
from pycollect.driver.state import CollectorState
from pycollect.errors import (
    LimitError,
    WorkerError,
    is_interrupt,
    not_the_end,
    warn_user,
    without_frames,
)

_DROPPED_BEFORE_WARNING = 20

T = TypeVar("T")
C = TypeVar("C", bound="Collector")


class Finished(NamedTuple):
    """A batch ready for the caller; ``td`` is ``None`` if it went to the replay buffer."""

    td: TensorDictBase | None
    frames_of: Mapping[int, int]
    versions: Mapping[int, int] = MappingProxyType({})  # of each worker's rollout


class Collector:
    """A stream of batches; ``iter()``, ``next()`` and ``.next()`` share one position in it.

    Subclasses add a signature, a source, and the requests that only such a source can answer.

    Args:
        flow: Accounts of the stream.
        source: Fills them. It is started here, and closed if the constructor fails.
    """

    _frames_divided_among = "environments"  # for the rounding warning

    def __init__(self, flow: Flow, source: Source) -> None:
        self._flow, self._source = flow, source
        self._progress: Progress | None = None
        self._background = Background()
        self._pace = Pacing(flow, self._background.wake)
        self._dropped = 0  # batches in a row
        self._ready: deque[Finished] = deque()  # counted as delivered; more than one is rare
        self._batch_devices: tuple[torch.device, torch.device | None] = (CPU, None)
        try:
            self._start_source()
        except BaseException:  # includes warnings that a filter turned into errors
            self.shutdown()
            raise

    def _start_source(self) -> None:
        options = self._flow.options
        self._source.start()
        prepare(options, self._flow.uploads)
        warn_of_rounding(
            options.frames_per_batch, self._source.batch_frames, self._frames_divided_among
        )

    # The stream

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Return the collector itself."""
        return self

    def __next__(self) -> TensorDictBase | None:
        """Return the next batch like `next`, but raise StopIteration at the end."""
        finished_batch: Finished | None = None
        try:
            with self._flow.moving:
                self._flow.check_not_collecting("next")
                if self._ready and self._flow.is_stale(self._ready[0].versions):
                    self._source.end_trajectories(self._ready[0].frames_of)
                    self._drop_ready("max_policy_lag")
                if not self._ready and (self._flow.has_ended or not self._advance()):
                    self._end()
                    raise StopIteration
                finished_batch = self._ready.popleft()
        except BaseException:
            if finished_batch is not None:  # interrupted: return it next time
                self._ready.appendleft(finished_batch)
            raise
        self._pace.notify()
        return finished_batch.td

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
        return next(self, None)

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
            self._fill_buffer()
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
                self._flow.count_lag(batch.versions, batch.frames_of)
                self._ready.append(Finished(td, batch.frames_of, batch.versions))
        self._show_progress(sum(batch.frames_of.values()))
        return True

    def _finish(
        self, td: TensorDictBase, host: Mapping[Key, torch.Tensor], frames_of: Mapping[Any, int]
    ) -> TensorDictBase:
        """Return the batch in its final form.

        Args:
            host: Tensors of the batch that are in host memory, as in `finish`.
            frames_of: Number of frames of each worker.
        """
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

    def _fill_buffer(self) -> None:
        if self._flow.queue is None:
            self._fill_with_rollouts()
        else:
            self._fill_with_trajectories()

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
                extend(done, self._flow.options)
                write.count(frames_of)
                self._flow.count_lag(batch.versions, frames_of)

    def _fill_with_trajectories(self) -> None:
        """Write the trajectories that a batch completes to the replay buffer."""
        queue, options = self._flow.queue, self._flow.options
        assert queue is not None
        self._enqueue()
        with self._writing() as write:
            while not self._flow.released and (waiting := queue.complete):
                popped = queue.pop(min(waiting, options.trajs_per_write or waiting))
                assert popped is not None  # `complete` counted them
                write.expect(popped.frames)
                td = self._flow.uploads.moved(popped.td, *self._batch_devices)
                put(finish(td, options, {}), options.replay_buffer)
                write.count(popped.frames)

    @contextmanager
    def _writing(self) -> Iterator[BufferWrite]:
        """Count everything written to the replay buffer within as one batch."""
        write = BufferWrite(self._flow.ledger)
        try:
            with self._flow.statistics.timed("deliver"), write:
                yield write
        finally:
            self._flow.statistics.count_batch(write.frames)
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
        while self._ready:
            self._lose_counted(self._ready.pop().frames_of, reason)

    def _assemble(self, uploads: Uploads | None) -> tuple[Batch, TensorDictBase]:
        """Return the next batch as it was collected, not claimed yet.

        Later calls raise the same exception again, unless it is a LimitError of this process.
        """
        try:  # `_fatal` inlined: it would cost microseconds per batch
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
        with self._flow.statistics.timed("deliver"), self._fatal(), Uninterrupted():
            self._flow.claim()
            self._batch_devices = batch.device, batch.reported_device
            for worker, source, rollout in rollouts_of(td, batch):
                if rollout.ndim > 2:
                    rollout = rollout.flatten(0, rollout.ndim - 2)
                lost = self._flow.queue.push(worker, rollout, source)
                self._flow.ledger.lose(worker, lost, "incomplete")
                self._flow.cut_frames += lost

    def _fail(self, error: Exception) -> None:
        """Let every later call raise this error again, unless it is an interrupt or a limit error.

        A LimitError of this process is not the workers' fault, so collection can continue after it.
        """
        own_limit = isinstance(error, LimitError) and not isinstance(error.__cause__, WorkerError)
        if not own_limit and not is_interrupt(error):
            self._flow.failure = without_frames(error)

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Let every later call raise again any exception raised within the context."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

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
        if self._dropped == _DROPPED_BEFORE_WARNING:
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
        self._flow.drop(reason)
        self._source.drop()
        self._pace.notify()

    def __bool__(self) -> bool:
        """Return True, although the collector may have no length."""
        return True

    def __repr__(self) -> str:
        if "_source" not in vars(self):  # the constructor is still checking arguments
            return object.__repr__(self)
        entries = {
            "frames_per_batch": self._source.batch_frames,
            "total_frames": self.total_frames,
            "delivered": self._flow.ledger.delivered,
            "policy_version": self._flow.version.number,
            "closed": self._flow.closed,
        }
        text = ", ".join(f"{name}={value}" for name, value in entries.items())
        return f"{type(self).__name__}({text})"

    def __len__(self) -> int:
        """Return the total number of batches, including delivered ones, if every batch is full."""
        if self._flow.queue is not None and self._flow.options.replay_buffer is None:
            raise TypeError("trajs_per_batch: a collector of whole trajectories has no len()")
        if self._flow.options.total_frames is None:
            raise TypeError(
                f"total_frames: a {type(self).__name__} without total_frames has no len()"
            )
        return -(-self._flow.options.total_frames // self._source.batch_frames)

    # Progress

    def _show_progress(self, frames: int) -> None:
        if not self._flow.options.progress:
            return
        if self._progress is None:
            self._progress = Progress(self._flow.options.total_frames)
        lag = max(self.policy_lag.values(), default=0)
        self._progress.update(frames, self._flow.statistics.episode_return, lag)
        if self._flow.has_ended:
            self._close_progress()

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()

    # Properties and methods

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._flow.closed

    @property
    def frames_per_batch(self) -> int:
        """Number of frames in a full batch, after rounding up."""
        return self._source.batch_frames

    @property
    def requested_frames_per_batch(self) -> int:
        """Number of frames in a batch as requested; in-process collectors round it up."""
        return self._flow.options.frames_per_batch

    @property
    def total_frames(self) -> float:
        """Minimum number of frames to deliver, an int, or infinity without an end."""
        total = self._flow.options.total_frames
        return math.inf if total is None else total

    @property
    def policy_version(self) -> int:
        """Number of weight updates so far."""
        return self._flow.version.number

    @property
    def policy_lag(self) -> dict[int, int]:
        """Policy versions by which each worker's last delivered rollout was behind, 0 before it."""
        return self._source.policy_lag

    def stats(self, workers: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Return counts, rates and timings of this collector, ready for JSON.

        No worker is contacted.

        Args:
            workers: ``None`` returns all entries below. "aggregate", "per_worker" or "both" returns
                TorchRL's flat form: counts of the collector, counts of each worker under names such
                as "worker_0/frames", or both. In that form, "workers" is the number of workers
                (default: ``None``).
            timeout: Accepted without effect, because the call never waits (default: ``None``).

        Returns:
            A dict with these entries.

            - "frames" and "batches": number delivered.
            - "total_frames" and "completed": only if the collector has an end.
            - "requested_frames_per_batch" and "policy_version".
            - "frames_per_second": since the first batch was requested.
            - "episodes": number that ended.
            - "episode_return" and "episode_length": mean sum of rewards and mean number of frames
              over the last 100 episodes; ``None`` before the first. For a vector reward,
              "episode_return" is a list with the mean of each objective.
            - "policy_lag": number of delivered frames by lag, the number of policy versions by
              which the oldest weights of their rollout were behind at delivery.
            - "seconds": time by phase.
            - "frames_stepped": frames that workers have stepped, best effort.
            - "slow_paths": slower code paths in use, by name.
            - "workers": by id: pid, node, version, restarts, frames, seconds.
            - "workers_alive": number of live workers.
            - "server": pid, restarts and failure of the inference server, if there is one.

        Raises:
            ValueError: `workers` has another value.
        """
        if workers is None:
            return {**self._counts(), **self._source.report()}
        check.check_choice("workers", workers, ("aggregate", "per_worker", "both"))
        return flat(self._counts(), self._source.report(), workers)

    def _counts(self) -> dict[str, Any]:
        """Return the limits of the stream, and whether it has ended."""
        total = self._flow.options.total_frames
        end = {} if total is None else {"total_frames": total, "completed": self._flow.has_ended}
        return {
            **end,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self._flow.version.number,
        }

    def ledger(self) -> dict[str, Any]:
        """Account for every frame that was requested from a worker.

        A rollout is issued with its full length when a worker receives the request. Cells that turn
        out to hold no frame are subtracted again.

        Returns:
            ``{"total": L, "workers": {id: L}}`` with L = ``{"issued", "delivered", "in_flight",
            "lost", "reasons": {reason: frames}}``, all ints. In every L, issued = delivered +
            in_flight + lost. The total is the sum over all workers, including former ones. Reasons
            are worker_died, worker_timeout, server_died, env_error, set_seed, reset,
            load_state_dict, shutdown, incomplete, replay_buffer and max_policy_lag.
        """
        return self._flow.ledger.report()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, policy noise and random actions, and reset everything.

        Environments are seeded in the order of workers, then of environments. The first gets
        `seed`. Each other one gets the successor of the previous seed in TorchRL's chain
        (``torchrl._utils.seed_generator``). Rollouts in flight are dropped. From then on the
        collector uses its own random generators.

        Args:
            seed: A nonnegative int.
            static_seed: Give all environments the same seed (default: ``False``).

        Returns:
            The next seed of the chain.

        Raises:
            TypeError, ValueError: `seed` is not a nonnegative int.
            RuntimeError: The collector was shut down.
        """
        root = check.check_seed(seed)
        with self._flow.between_rollouts("set_seed"):
            self._flow.check_open()
            self._drop("set_seed")
            self._flow.entropy, self._flow.seeded = root, True
            with self._flow.policy_stream.ordered():
                return self._source.streams.seed(root, bool(static_seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream after the last delivered batch.

        It contains the policy's weights (with extra state and training modes), the policy version,
        counters, the ledger, and the states of the workers' random generators. No worker is
        contacted, and rollouts in flight continue. If workers in other processes built their
        policies from a `policy_factory`, weights are included only after `update_policy_weights_`
        has sent some.

        Returns:
            A dict of tensors, numbers, strings and dicts of these, which
            ``torch.load(weights_only=True)`` can load. Extra state of the policy's modules is
            included with its own types.
        """
        with self._flow.moving:
            flow = self._flow
            return CollectorState(
                entropy=flow.entropy,
                batches=flow.statistics.batches,
                episodes=flow.statistics.episodes,
                trajectories=flow.queue.next_id if flow.queue else flow.ids.next,
                policy_version=flow.version.number,
                policy=self._source.place.current(),
                ledger=flow.ledger.state(),
                workers=self._source.streams.states(),
            ).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from the state of another run.

        Rollouts in flight are dropped, and all environments are reset with seeds that follow from
        the state. So two runs resumed from the same state return the same data if collection is
        sync.

        Args:
            state_dict: Result of `state_dict()`. Weights and counters are also read from a TorchRL
                collector's state, or a list of such states, as TorchRL's distributed collectors
                return.

        Raises:
            ValueError, TypeError: `state_dict` is neither, or belongs to another policy or other
                workers. The collector is unchanged then.
        """
        with self._flow.between_rollouts("load_state_dict"):
            flow, source = self._flow, self._source
            flow.check_open()
            state = CollectorState.from_dict(state_dict, source.streams.states())
            source.streams.check(state.workers)
            source.place.check(state.policy)
            dropped = flow.ledger.in_flight_of_each()
            self._drop("load_state_dict")
            flow.resume(state, dropped)
            self._pace.restart()
            with flow.policy_stream.ordered():
                source.streams.resume(state)

    @property
    def policy_weights(self) -> TensorDict:
        """The policy's weights as the collector knows them, nested like its modules."""
        return TensorDict(dict(self._source.place.current().tensors)).unflatten_keys(".")

    def start(self) -> None:
        """Collect into the replay buffer in a background thread, until `pause` or the end.

        If the program ends while the thread runs, the collector is shut down. An exception,
        including one of the buffer, ends the thread and is shown there. The next call of `start()`
        or `next()` raises it again. `postproc` runs in that thread, so do not let it use modules
        that are being trained; give it copies.

        With `max_frames_per_update`, the thread waits whenever it has collected the allowed number
        of frames, until the next call of `update_policy_weights_()`.

        Raises:
            RuntimeError: The collector has no replay buffer, or was shut down.
        """
        self._flow.moving.check_own_process()
        if self._flow.options.replay_buffer is None:
            raise RuntimeError(
                "start: needs a replay buffer to fill; pass replay_buffer to the collector"
            )
        self._flow.check_open()
        self._background.check()
        if not self._background.running:
            warn_of_training(self._flow.options)
        self._start_filling()

    def pause(
        self, timeout: float | None = None, *, resume: bool = True
    ) -> AbstractContextManager[None]:
        """Pause background collection after the current batch is in the buffer.

        Args:
            timeout: Maximum number of seconds to wait for that batch. ``None`` waits without limit
                (default: ``None``).
            resume: Resume when the returned context manager exits (default: ``True``).

        Returns:
            A context manager that resumes background collection on exit, as in ``with
            collector.pause(): ...``. Without a ``with``, collection stays paused.

        Raises:
            TimeoutError: The batch was not finished in time; collection continues.
        """
        self._flow.moving.check_own_process()
        was_running = self._background.stop(timeout)
        return self._paused(was_running and resume)

    @contextmanager
    def _paused(self, was_running: bool) -> Iterator[None]:
        try:
            yield
        finally:
            if was_running and self._flow.failure is None:
                self._start_filling()

    def _start_filling(self) -> None:
        if not self._background.is_current:
            with self._flow.policy_stream.ordered():
                pass  # the background thread does not wait for the caller's stream
        self._pace.begin()
        self._background.start(self._fill, self.shutdown, self._may_fill)

    def _may_fill(self) -> bool:
        """Return whether the background may collect a batch, by `max_frames_per_update`."""
        return self._pace.allows(self._source.batch_frames)

    def _fill(self) -> bool:
        """Fill the replay buffer with one more batch; return False at the end."""
        try:
            next(self)
        except (StopIteration, ShutDownError):
            return False
        return True

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close environments and end workers; rollouts in flight are lost. Idempotent.

        If another thread is collecting in this process, it still gets its batch. If workers collect
        for that thread, its batch is lost and the thread raises a RuntimeError.

        Args:
            timeout: Seconds in which workers must close their environments before their processes
                are ended. ``None`` means 30, but 5 for workers that do not respond because they
                hang in a step or were stopped (default: ``None``).
            close_env: If ``False``, environments in this process stay open (default: ``True``).
            raise_on_error: If ``False``, errors during the shutdown are ignored (default:
                ``True``).

        Raises:
            RuntimeError: `close_env` is ``False``, but the environments are in worker processes,
                which end.
            ValueError: `timeout` is negative.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
        if not self._flow.moving.is_own_process:  # a fork must not end its parent's workers
            return
        self._source.check_close_env(close_env)
        with contextlib.suppress(*([] if raise_on_error else [Exception])):
            self._end_all(timeout, close_env)

    def _end_all(self, timeout: float | None, close_env: bool) -> None:
        self._flow.closed = True
        self._background.end()
        with self._flow.moving:
            if self._flow.released:
                return
            self._flow.released = True
            self._close_progress()
            self._flow.ledger.lose_in_flight("shutdown")
            self._drop_ready("shutdown")
            try:
                self._flow.uploads.close()
            finally:  # also if the device is lost
                self._close_source(timeout, close_env)

    def _close_source(self, timeout: float | None, close_env: bool) -> None:
        self._source.close(timeout, close_env)

    def __enter__(self: C) -> C:
        """Return the collector itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Shut the collector down."""
        self.shutdown()
