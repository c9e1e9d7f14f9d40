"""What a user can ask of a stream of batches; the base of all collectors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from tensordict import TensorDict

from pycollect import checks as check
from pycollect.driver.accounts import flat
from pycollect.driver.delivery import prepare, warn_of_training
from pycollect.driver.flow import Flow, ShutDownError
from pycollect.driver.options import warn_of_rounding
from pycollect.driver.state import CollectorState
from pycollect.driver.stream import Source, Stream
from pycollect.errors import is_interrupt

C = TypeVar("C", bound="Collector")


class Collector(Stream):
    """A stream of batches with its properties, statistics, seeds, states and end.

    Subclasses add a signature, a source, and the requests that only such a source can answer. The
    source is started here, and closed if the constructor fails.
    """

    _frames_divided_among = "environments"  # for the rounding warning

    def __init__(self, flow: Flow, source: Source) -> None:
        super().__init__(flow, source)
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

        No worker is contacted. The call may wait for the device to end the last rollout in a CUDA
        graph, whose episodes it counts.

        Args:
            workers: ``None`` returns all entries below. "aggregate", "per_worker" or "both" returns
                TorchRL's flat form: counts of the collector, counts of each worker under names such
                as "worker_0/frames", or both. In that form, "workers" is the number of workers
                (default: ``None``).
            timeout: Accepted without effect, because no worker is contacted (default: ``None``).

        Returns:
            A dict with these entries.

            - "frames" and "batches": number delivered.
            - "total_frames", "completed" (all is delivered or written): only if there is an end.
            - "requested_frames_per_batch" and "policy_version".
            - "stepped_frames": frames of the rollouts that have arrived, whether delivered or not.
            - "completed_trajectories", "trajectory_completed_frames": number and frames of
              trajectories that have ended; counted only if complete trajectories are assembled.
            - "trajectory_pending_frames": frames of trajectories that have not ended.
            - "replay_written_frames": frames written to the replay buffer.
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
        flow, end = self._flow, {}
        if (total := flow.options.total_frames) is not None:
            is_written = flow.statistics.frames == flow.ledger.delivered  # to the replay buffer
            end = {"total_frames": total, "completed": flow.has_ended and is_written}
        return {
            **end,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": flow.version.number,
            **flow.progress(),
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
            The next seed of the chain; `seed` itself if it is static.

        Raises:
            TypeError, ValueError: `seed` is not a nonnegative int.
            RuntimeError: The collector was shut down.
        """
        root = check.check_seed(seed)
        with self._flow.moving:
            self._flow.check_not_collecting("set_seed")
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
            workers = self._source.streams.states()  # first, because it may count episodes
            return CollectorState(
                entropy=flow.entropy,
                batches=flow.statistics.batches,
                episodes=flow.statistics.episodes,
                trajectories=flow.queue.next_id if flow.queue else flow.ids.next,
                policy_version=flow.version.number,
                progress=dict(flow.statistics.progress),
                policy=self._source.place.current(),
                ledger=flow.ledger.state(),
                workers=workers,
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
        with self._flow.moving:
            self._flow.check_not_collecting("load_state_dict")
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
            try:
                self._close_progress()
                self._flow.ledger.lose_in_flight("shutdown")
                self._drop_ready("shutdown")
                try:
                    self._flow.uploads.close()
                finally:  # also if the device is lost
                    self._close_source(timeout, close_env)
            except BaseException as error:
                self._flow.released = not is_interrupt(error)  # the next call completes the end
                raise

    def _close_source(self, timeout: float | None, close_env: bool) -> None:
        self._source.close(timeout, close_env)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
