"""What all collectors share: one stream of batches, its counting, its state."""

from __future__ import annotations

import contextlib
import math
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from pycollect import checks as check
from pycollect._core import TrajectoryIds, Uninterrupted
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.upload import Uploads
from pycollect.batch.weights import Weights
from pycollect.checks import check_open
from pycollect.devices import CPU
from pycollect.errors import warn_user
from pycollect.stream.background import Background, Turnstile
from pycollect.stream.buffer_delivery import extend, pieces, put, written_before
from pycollect.stream.buffer_warnings import warn_of_training
from pycollect.stream.delivery import assembled, finished, rollouts_of
from pycollect.stream.filling import Filling
from pycollect.stream.kin import TorchRLKin
from pycollect.stream.ledger import Ledger
from pycollect.stream.options import StreamOptions
from pycollect.stream.own_attributes import OwnAttributes
from pycollect.stream.source import Batch
from pycollect.stream.state import CollectorState, WorkerState
from pycollect.stream.statistics import Progress, Statistics, flat
from pycollect.stream.torchrl_names import TorchRLNames
from pycollect.stream.weight_updates import WeightUpdates
from pycollect.trajectories.queue import TrajectoryQueue
from pycollect.worker.hooks import Hooked
from pycollect.worker.profiling import Profiled

_ENDED: Any = object()


class ShutDownError(RuntimeError):
    """The collector was shut down while, or before, a batch was asked for."""


class CollectorBase(WeightUpdates, TorchRLNames, Hooked, Profiled, OwnAttributes, TorchRLKin):
    """A stream of batches: ``iter()``, ``next()`` and ``.next()`` all go on where it stands.

    Subclasses set `_batch_frames` (frames of a full batch) before the first batch is asked for and
    produce batches in `_collect`.
    """

    _batch_frames: int

    def __init__(self, options: StreamOptions, pre_hook: Any = None, post_hook: Any = None) -> None:
        Hooked.__init__(self, pre_hook, post_hook)
        TorchRLKin.__init__(self)
        self._options = options
        self._uploads = Uploads()
        self._statistics = Statistics()
        self._ledger = Ledger()
        self._ids = TrajectoryIds()
        self._entropy = secrets.randbits(64)  # what a resumed run's streams come from
        self._seeded = False
        self._failure: BaseException | None = None
        self._closed = False  # nothing more is collected
        self._released = False  # and nothing more is there to be let go
        self._progress: Progress | None = None
        self._stream = Turnstile()  # held by whoever moves the stream on
        self._background = Background()
        self._place: tuple[torch.device, torch.device | None] = (CPU, None)
        self._queue = self._new_queue(0)  # of trajectories, where batches are made of these
        self._written_before = written_before(options)
        self._cut_frames = 0  # frames of trajectories that were cut there
        self._warned_of_bounds = False
        self._unclaimed: Batch | None = None  # collected, but an interrupt kept it from the caller
        self._worker_idx = options.ways.worker_idx
        WeightUpdates.__init__(self, options.ways)

    # The stream

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self

    def __next__(self) -> TensorDictBase | None:
        with self._stream:
            if not self._has_ended:
                td = self._advance()
                if td is not _ENDED:
                    return td
            self._end()
            raise StopIteration

    def next(self) -> TensorDictBase | None:
        """The next batch, or None once `total_frames` were collected.

        With a replay buffer the batch goes there, and what is returned is always None.

        Raises:
            RuntimeError: the collector was shut down before its end.
            WorkerError: a worker died.
            Exception: what an environment or the policy raised; again at every later call.
        """
        return next(self, None)

    def _advance(self) -> TensorDictBase | None:
        """Collect a batch and deliver it; `_ENDED` where its trajectories do not come together."""
        self._check_not_closed()
        if self._failure is not None:
            raise self._failure
        self._background.check()
        self._statistics.entered()
        try:
            return self._delivered()
        finally:
            self._statistics.left()

    def _delivered(self) -> TensorDictBase | None:
        if self._options.replay_buffer is not None:
            self._fill_buffer()
            return None
        return self._frames() if self._queue is None else self._trajectories()

    def _frames(self) -> TensorDictBase:
        """A batch as it was collected."""
        batch, td = self._assembled(self._uploads)
        with Uninterrupted():
            self._claim()
            self._count(batch.frames_of)
        with self._statistics.timed("deliver"):
            td = finished(td, self._options, batch.joined.tensors)
            self._before_delivery(td)
        self._show_progress(sum(batch.frames_of.values()))
        return td

    def _trajectories(self) -> TensorDictBase | None:
        """The next complete trajectories, put together on the host.

        What is collected meanwhile stays in flight until its trajectory is delivered.
        """
        assert self._queue is not None
        while (popped := self._queue.pop()) is None:
            if self._has_ended:
                return _ENDED
            self._check_not_closed()
            self._enqueue()
        with Uninterrupted():
            self._count(popped.frames)
        with self._statistics.timed("deliver"):
            td = self._uploads.moved(popped.td, *self._place)
            td = finished(td, self._options, {})
        self._show_progress(sum(popped.frames.values()))
        return td

    def _fill_buffer(self) -> None:
        if self._queue is None:
            self._fill_with_rollouts()
        else:
            self._fill_with_trajectories()

    def _fill_with_rollouts(self) -> None:
        """The rollouts of a batch go to the replay buffer, one by one."""
        batch, td = self._assembled(self._uploads)
        with self._filling() as filling:
            filling.expect(batch.frames_of)
            self._claim()
            for frames_of, piece in pieces(td, batch, self._options):
                done = finished(piece, self._options, batch.joined.tensors)
                self._before_delivery(done)
                extend(done, self._options)
                filling.count(frames_of)

    def _fill_with_trajectories(self) -> None:
        """What a batch completes goes to the replay buffer, one trajectory after the other."""
        assert self._queue is not None
        self._enqueue()
        with self._filling() as filling:
            while not self._released and (waiting := self._queue.complete):
                popped = self._queue.pop(min(waiting, self._options.trajs_per_write or waiting))
                assert popped is not None  # so many are there
                filling.expect(popped.frames)
                td = self._uploads.moved(popped.td, *self._place)
                put(finished(td, self._options, {}), self._options.replay_buffer)
                filling.count(popped.frames)

    @contextmanager
    def _filling(self) -> Iterator[Filling]:
        """What goes into the replay buffer within is one batch."""
        filling = Filling(self._ledger)
        try:
            with self._statistics.timed("deliver"), filling:
                yield filling
        finally:
            self._statistics.count_batch(filling.frames)
        self._show_progress(filling.frames)

    def _count(self, frames_of: Mapping[int, int]) -> None:
        """A batch of so many frames of each worker is delivered."""
        for worker, frames in frames_of.items():
            self._ledger.deliver(worker, frames)
        self._statistics.count_batch(sum(frames_of.values()))

    def _assembled(self, uploads: Uploads | None) -> tuple[Batch, TensorDictBase]:
        """The next batch as it was collected; it is not claimed yet.

        What is raised here is raised again by every later call.
        """
        try:  # as `_fatal`, which would cost microseconds of every batch
            batch = self._collected()
            with self._statistics.timed("deliver"):
                return batch, assembled(batch, self._options, uploads)
        except Exception as error:
            self._failure = error
            raise

    def _enqueue(self) -> None:
        """Collect a batch, whose rollouts go on with the trajectories that they belong to."""
        assert self._queue is not None
        batch, td = self._assembled(None)
        self._before_delivery(td)
        if self._released:  # by the hook: another thread would wait for the batch
            self._check_not_closed()
        if self._unclaimed is not batch:  # the hook dropped it, by a seed for example
            return
        with self._statistics.timed("deliver"), self._fatal():
            self._claim()
            self._place = batch.place, batch.told
            for worker, source, rollout in rollouts_of(td, batch):
                if rollout.ndim > 2:
                    rollout = rollout.flatten(0, rollout.ndim - 2)
                lost = self._queue.push(worker, rollout, source)
                self._ledger.lose(worker, lost, "incomplete")
                self._cut_frames += lost

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """What is raised within is raised again by every later call."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    @abstractmethod
    def _collect(self) -> None:
        """Produce the next batch, as `_unclaimed`. Its frames are in flight in the ledger.

        An interrupt gives up what is not complete. From then on it does not count any more: whoever
        changes what must agree does so uninterrupted, and `_unclaimed` is a part of that.
        """

    def _collected(self) -> Batch:
        """The next batch; the same again, whatever interrupts the caller, until `_claim`."""
        if self._unclaimed is None:
            self._collect()
        assert self._unclaimed is not None
        return self._unclaimed

    def _claim(self) -> None:
        """The batch is the caller's now."""
        if self._unclaimed is not None:
            self._statistics.count_episodes(self._unclaimed.episodes)
            self._unclaimed = None

    def _new_queue(self, next_id: int) -> TrajectoryQueue | None:
        if not self._options.trajs_per_batch:
            return None
        flat = self._options.replay_buffer is not None
        return TrajectoryQueue(
            self._options.trajs_per_batch, "cat" if flat else self._options.form, next_id
        )

    def _check_environment(self, leaves: BatchLeaves, bounded: bool) -> None:
        """Raise ValueError for observations that are to be cast and that it does not have.

        And warn where a trajectory might stay open for ever.
        """
        if self._options.cast is not None:
            self._options.cast.check_keys(leaves)
        if self._queue is not None and not bounded and not self._warned_of_bounds:
            self._warned_of_bounds = True
            warn_user(
                "trajs_per_batch: this environment has no time limit that is known, and a "
                "trajectory is held in memory until it ends; max_frames_per_traj bounds it"
            )

    def _cut_trajectories(self, worker: int, reason: str) -> None:
        """A worker's open trajectories end unfinished."""
        if self._queue is not None:
            self._ledger.lose(worker, self._queue.cut(worker), reason)

    def _drop_all(self, reason: str) -> None:
        """Whatever is in flight is lost: rollouts, and trajectories that wait to be delivered."""
        self._ledger.lose_in_flight(reason)
        self._unclaimed = None
        if self._queue is not None:
            self._queue.clear()
        self._drop_rollouts()

    def _check_open(self) -> None:
        """Raise where the stream cannot go on: it was shut down, or something went wrong."""
        check_open(self._closed, self._failure)

    def _check_not_closed(self) -> None:
        """Raise where batches cannot be collected any more; another thread may have decided so."""
        if self._closed:
            raise ShutDownError("the collector was shut down: no more batches can be collected")

    @abstractmethod
    def _drop_rollouts(self) -> None:
        """Forget the rollouts that workers were asked for."""

    def _end(self) -> None:
        """All frames were delivered; what whole trajectories left over is lost."""
        if self._queue is not None and not self._closed:
            self._cut_frames += sum(self._queue.held.values())  # else it were not the end any more
            self._drop_all("incomplete")
        self._close_progress()

    def _before_delivery(self, td: TensorDictBase) -> None:
        """A batch is about to be given away: for subclasses with something to do then."""

    @property
    def _has_begun(self) -> bool:
        return self._statistics.has_begun

    @property
    def _has_ended(self) -> bool:
        total = self._options.total_frames
        return total is not None and self._frames_here >= total and not self._has_more

    @property
    def _frames_here(self) -> int:
        """Frames that were collected and are not lost, or belonged to a trajectory that was cut."""
        waiting = 0 if self._queue is None else sum(self._queue.held.values()) + self._cut_frames
        return self._ledger.delivered + waiting

    @property
    def _has_more(self) -> bool:
        """Whether a batch of trajectories is there already."""
        return self._queue is not None and self._queue.complete >= self._options.trajs_per_batch

    @property
    def _is_random(self) -> bool:
        """Whether a rollout that is handed out now has random actions.

        Rollouts that were lost do not count: who asked for so many random frames gets them. What
        was in the replay buffer before counts.
        """
        there = self._written_before + self._ledger.delivered + self._ledger.in_flight
        return there < self._options.init_random_frames

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if "_unclaimed" not in vars(self):  # its arguments are being checked
            return object.__repr__(self)
        entries = {
            "frames_per_batch": getattr(self, "_batch_frames", None),  # None: not there yet
            "total_frames": self.total_frames,
            "delivered": self._ledger.delivered,
            "policy_version": self._policy_version,
            "closed": self._closed,
        }
        text = ", ".join(f"{name}={value}" for name, value in entries.items())
        return f"{type(self).__name__}({text})"

    def __len__(self) -> int:
        """The number of batches in all, delivered ones included, if every batch is full."""
        if self._queue is not None and self._options.replay_buffer is None:
            raise TypeError("len() of batches of whole trajectories: it depends on their lengths")
        if self._options.total_frames is None:
            raise TypeError(
                f"len() of a {type(self).__name__} without an end: total_frames was not given"
            )
        return -(-self._options.total_frames // self._batch_frames)

    # Progress

    def _show_progress(self, frames: int) -> None:
        if not self._options.progress:
            return
        if self._progress is None:
            self._progress = Progress(self._options.total_frames)
        lag = max(self.policy_lag.values(), default=0)
        self._progress.update(frames, self._statistics.episode_return, lag)
        if self._has_ended:
            self._close_progress()

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()

    # What it is and does

    @property
    def frames_per_batch(self) -> int:
        """Frames in one full batch, after rounding up."""
        return self._batch_frames

    @property
    def total_frames(self) -> float:
        """The lower bound of delivered frames, an int; infinity without one."""
        total = self._options.total_frames
        return math.inf if total is None else total

    @property
    def policy_version(self) -> int:
        """0 at first, one more with each weight update."""
        return self._policy_version

    @property
    @abstractmethod
    def policy_lag(self) -> dict[int, int]:
        """Per worker: by how many versions its last delivered rollout was behind, 0 before it."""

    def stats(self, workers: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """What was delivered, by whom, and where the time went; JSON-able. Asks no worker.

        Args:
            workers: None: all of the following. "aggregate", "per_worker" or "both": TorchRL's
                form, flat: its counts of the collector, those of each worker as "worker_0/frames",
                or both; "workers" is their number then.
            timeout: without effect, as nobody is waited for.

        Returns:
            "frames" and "batches" delivered; "total_frames" and "completed" where there is an end;
            "requested_frames_per_batch"; "policy_version"; "frames_per_second" since the first
            batch was asked for; "episodes" that ended, and of the last 100 of them the mean
            "episode_return" (the sum of rewards) and "episode_length" (frames), None before the
            first; "seconds" by phase; "frames_stepped" in the workers, best effort; "slow_paths" by
            name; "workers" by id: pid, node, version, restarts, frames, seconds; "workers_alive",
            their number.

        Raises:
            ValueError: another value of `workers`.
        """
        if workers is None:
            return {**self._counts(), **self._report_of_all()}
        check.check_choice("workers", workers, ("aggregate", "per_worker", "both"))
        return flat(self._counts(), self._report_of_all(), workers)

    def _counts(self) -> dict[str, Any]:
        """What was asked for, and how much of it is there."""
        total = self._options.total_frames
        end = {} if total is None else {"total_frames": total, "completed": self._has_ended}
        return {
            **end,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self._policy_version,
        }

    @abstractmethod
    def _report_of_all(self) -> dict[str, Any]:
        """The other entries of `stats`."""

    def ledger(self) -> dict[str, Any]:
        """What became of every frame that was asked for.

        Returns:
            ``{"total": L, "workers": {id: L}}`` with L = ``{"issued", "delivered", "in_flight",
            "lost", "reasons": {reason: frames}}``, ints; issued = delivered + in_flight + lost in
            every L, and the total is the sum of the workers, former ones included. A rollout is
            issued at its full length when it is handed to a worker; frames that it turns out not
            to have (uncollected cells) are taken back. Reasons are worker_died, worker_timeout,
            env_error, set_seed, reset, load_state_dict, shutdown, incomplete and replay_buffer.
        """
        return self._ledger.report()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, policy noise and random actions, and reset everything.

        Environments get the seeds of TorchRL's chain in (worker, env) order: the first `seed`, each
        next the following one, or all `seed` with `static_seed`. Rollouts in flight are dropped.
        From then on the collector has random generators of its own.

        Returns:
            The next seed of the chain.
        """
        root = check.check_seed(seed)
        with self._stream:
            self._check_open()
            self._drop_all("set_seed")
            self._entropy, self._seeded = root, True
            return self._seed_workers(root, bool(static_seed))

    @abstractmethod
    def _seed_workers(self, root: int, static: bool) -> int:
        """Drop what is in flight, seed and reset; the next seed of the chain."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last delivered batch.

        Made without asking a worker: what is in flight goes on undisturbed. Holds the policy's
        weights and version, counters, the ledger, and where the workers' random generators stand.
        Weights of policies that workers in other processes built from a `policy_factory` are known
        here, and part of it, once `update_policy_weights_` gave them some.
        ``torch.load(weights_only=True)`` takes it.
        """
        with self._stream:
            return CollectorState(
                entropy=self._entropy,
                batches=self._statistics.batches,
                episodes=self._statistics.episodes,
                trajectories=self._queue.next_id if self._queue else self._ids.next,
                policy_version=self._policy_version,
                policy=dict(self._current_weights()),
                ledger=self._ledger.state(),
                workers=self._worker_states(),
            ).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where another run was when it made this state.

        Rollouts in flight are dropped and all environments are reset, with seeds that follow from
        the state: two runs resumed from one state give the same data, where collection is sync.

        Args:
            state_dict: what `state_dict()` returned; or TorchRL's, or a list of one per collector
                as its distributed ones give, of which weights and counters are taken.

        Raises:
            ValueError, TypeError: it is none of these, or of another policy or other workers;
                nothing was changed then.
        """
        with self._stream:
            self._check_open()
            state = CollectorState.from_dict(state_dict, self._worker_states())
            self._check_states(state.workers)
            self._check_weights(state.policy)
            dropped = self._ledger.in_flight_of_each()
            self._drop_all("load_state_dict")
            self._ledger.restore(state.ledger)
            for worker, frames in dropped.items():
                self._ledger.issue(worker, frames)
                self._ledger.lose(worker, frames, "load_state_dict")
            self._statistics.restore(self._ledger.delivered, state.batches, state.episodes)
            self._ids = TrajectoryIds.from_state((state.trajectories, []))
            self._queue = self._new_queue(state.trajectories)
            self._cut_frames = 0
            self._entropy, self._seeded = state.entropy, True
            self._policy_version = state.policy_version
            self._resume_workers(state)

    @abstractmethod
    def _current_weights(self) -> Weights:
        """The policy's weights as the collector knows them."""

    @property
    def policy_weights(self) -> TensorDict:
        """The policy's weights as the collector knows them, nested as its modules are."""
        return TensorDict(dict(self._current_weights())).unflatten_keys(".")

    @abstractmethod
    def _check_weights(self, weights: Weights) -> None:
        """Raise ValueError unless a state's weights fit all workers' policies."""

    @abstractmethod
    def _check_states(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""

    @abstractmethod
    def _worker_states(self) -> dict[int, WorkerState]:
        """Of each present worker, at the end of its last delivered rollout."""

    @abstractmethod
    def _resume_workers(self, state: CollectorState) -> None:
        """Drop what is in flight; give workers weights, version and generators; reset."""

    def start(self) -> None:
        """Collect into the replay buffer in a thread of this process, until the end or `pause`.

        Where the program ends while it runs, the collector is shut down.
        An exception ends the thread and is shown there; the next call of this or of `next()` raises
        it again, also where it is the buffer's. `postproc` runs in that thread: it should have a
        copy of what is trained meanwhile.

        Raises:
            RuntimeError: there is no replay buffer, or the collector was shut down.
        """
        if self._options.replay_buffer is None:
            raise RuntimeError("start: expected a collector with a replay_buffer, which fills")
        self._check_open()
        self._background.check()
        if not self._background.running:
            warn_of_training(self._options)
        self._background.start(self._fill, self.shutdown)

    def pause(
        self, timeout: float | None = None, *, resume: bool = True
    ) -> AbstractContextManager[None]:
        """Stop what `start` began, once the present batch is in the buffer.

        Args:
            timeout: seconds in which it has to be there; None: it is waited for.
            resume: False: the context manager does not begin it again either.

        Returns:
            A context manager, for whom wants that it goes on afterwards:
            ``with collector.pause(): ...``.

        Raises:
            TimeoutError: the batch was not there by then; it goes on.
        """
        was_running = self._background.stop(timeout)
        return self._paused(was_running and resume)

    @contextmanager
    def _paused(self, was_running: bool) -> Iterator[None]:
        try:
            yield
        finally:
            if was_running and self._failure is None:
                self._background.start(self._fill, self.shutdown)

    def _fill(self) -> bool:
        """One more batch for the replay buffer; whether there is another."""
        try:
            return next(self, _ENDED) is not _ENDED
        except ShutDownError:
            return False

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close environments and end workers; what is in flight is lost. Idempotent.

        Where another thread is collecting, it gets its batch before, if that is collected in this
        process; otherwise the batch is lost, and what waits for it raises a RuntimeError.

        Args:
            timeout: seconds that workers elsewhere have to close their environments, before their
                processes are ended; None: half a minute.
            close_env: False: environments in this process stay open.
            raise_on_error: False: what goes wrong then is not raised.

        Raises:
            RuntimeError: `close_env` is False, and environments end with the processes they are in.
            ValueError: a negative time-out.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: expected seconds >= 0 or None, got {timeout!r}")
        self._check_close_env(close_env)
        with contextlib.suppress(*([] if raise_on_error else [Exception])):
            self._end_all(timeout, close_env)

    def _end_all(self, timeout: float | None, close_env: bool) -> None:
        self._closed = True
        self._stop_receiving()
        self._background.end()
        with self._stream:
            if self._released:
                return
            self._released = True
            self._close_progress()
            self._ledger.lose_in_flight("shutdown")
            try:
                self._uploads.close()
            finally:  # the device may be lost
                self._shutdown(timeout, close_env)

    @abstractmethod
    def _check_close_env(self, close_env: bool) -> None:
        """Raise RuntimeError where environments cannot outlive their collector."""

    @abstractmethod
    def _shutdown(self, timeout: float | None, close_env: bool) -> None: ...

    def __enter__(self) -> CollectorBase:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
