"""The collector that runs in this process."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect._core import Slab, Uninterrupted
from pycollect.arguments import checked
from pycollect.batch.extras import joined
from pycollect.batch.frame import TRAJ_IDS
from pycollect.batch.slab_views import check_lease, make_pool, slab_tensors
from pycollect.batch.weights import (
    Weights,
    check_same,
    load_weights,
    weight_leaves,
    weights_from,
    weights_of,
)
from pycollect.checks import check_open, check_worker_ids, no_weights_given
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.devices import check_devices
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.arguments.names import check_others
from pycollect.collectors.choice import Choosing, check_none_chosen
from pycollect.envs import EnvBatch
from pycollect.errors import WorkerError
from pycollect.policy import build
from pycollect.stream.blank import blank_batch
from pycollect.stream.collector import CollectorBase
from pycollect.stream.delivery import assembled, finished
from pycollect.stream.options import StreamOptions, warn_of_rounding
from pycollect.stream.source import Batch, Joined
from pycollect.stream.state import CollectorState, WorkerState, check_generators
from pycollect.stream.statistics import count_slow_paths
from pycollect.stream.weight_calls import by_worker
from pycollect.worker.generators import GeneratorState, derived_seeds, seed_chain
from pycollect.worker.hooks import PRE
from pycollect.worker.one_worker import OneWorker
from pycollect.worker.options import WorkerOptions
from pycollect.worker.profiling import ProfileConfig, ProfilerHook
from pycollect.worker.report import RolloutReport
from pycollect.worker.worker import Worker

# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3


def _arguments(
    create_env_fn: Any,
    policy: Any = None,
    *,
    frames_per_batch: int,
    total_frames: int | None = -1,
    device: Any = None,
    storing_device: Any = None,
    env_device: Any = None,
    policy_device: Any = None,
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    autoreset_mode: Any = None,
    info_keys: Sequence[str | tuple[str, ...]] | None = None,
    max_frames_per_traj: int | None = None,
    init_random_frames: int | None = None,
    reset_at_each_iter: bool = False,
    set_truncated: bool = False,
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    policy_state: Mapping[Any, Any] | None = None,
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
    split_trajs: bool = False,
    trajs_per_batch: int | None = None,
    trajs_per_write: int | None = None,
    traj_format: str | None = "padded",
    exploration_type: InteractionType | str = InteractionType.RANDOM,
    track_traj_ids: bool = True,
    track_policy_version: bool = False,
    replay_buffer: Any = None,
    extend_buffer: bool = True,
    init_fn: Callable[[], Any] | None = None,
    pre_collect_hook: Callable[[], Any] | None = None,
    post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
    compact_obs: bool = False,
    compile_policy: bool | Mapping[str, Any] | None = None,
    cudagraph_policy: bool | Mapping[str, Any] | None = None,
    trust_policy: bool | None = None,
    observation_dtype: Any = None,
    observation_scale: Any = None,
    num_threads: int | None = None,
    progress: bool = False,
    num_collectors: int | None = None,
    sync: bool | None = None,
    backend: str | None = None,
    backend_options: Mapping[str, Any] | None = None,
    weight_updater: Any = None,
    weight_sync_schemes: Mapping[str, Any] | None = None,
    weight_recv_schemes: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """What a SyncDataCollector takes."""


class SyncDataCollector(CollectorBase, OneWorker, metaclass=Choosing):
    """Collects in this process; the policy is the caller's own, live.

    Args:
        create_env_fn: a callable that returns an environment, an environment, or a list of
            callables that are stepped one after the other as a batch of P envs.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions.
        frames_per_batch: frames in one batch; rounded up to a multiple of P, with a warning.
        total_frames: a lower bound; None or a negative number: for ever.
        device: for those of the three that follow which are not given.
        storing_device: where batches lie, and what `td.device` says; None: `device`, else where the
            environment does.
        env_device: where environments lie; None: where they are, or `device`. Those that give
            arrays stay on the CPU, whatever is said; their batches go there.
        policy_device: where the policy is called; None: `device`, or where its parameters are.
        create_env_kwargs: keyword arguments of the env callables.
        autoreset_mode: of a vector environment whose metadata does not tell it.
        info_keys: entries of Gymnasium's info (strings, or tuples into nested dicts) to be
            recorded under "next". What the first step shows as a number or an array of numbers is
            a tensor, zeros where an info does not have it; anything else, and what that step does
            not show (with a warning), NonTensorData, None where an info does not have it.
        max_frames_per_traj: truncate and reset after so many steps; adds "step_count".
        init_random_frames: random actions until so many frames were issued.
        reset_at_each_iter: reset all environments at the start of every batch.
        set_truncated: flag the last frame of every env in every batch as truncated.
        policy_factory: called without arguments, returns the policy; instead of `policy`.
        policy_state: shapes of one env (or first values) of the policy's recurrent states by key,
            where neither a primer nor an LSTM, GRU or RNN layer of the policy tells them.
        postproc: called with each batch, its result is delivered.
        split_trajs: deliver one row per trajectory, see :func:`split_trajectories`.
        trajs_per_batch: deliver batches of so many complete trajectories. Open ones wait here, in
            memory: where episodes may be endless, `max_frames_per_traj` bounds it. With
            `replay_buffer`, each batch of `frames_per_batch` is collected, and all trajectories
            that it completes go there, flat, whatever the number.
        trajs_per_write: of those, how many at a time; None: all at once.
        traj_format: of these: "padded", [N, T] with a mask, or "cat", one after the other, [F].
        exploration_type: DETERMINISTIC, RANDOM, MODE or MEAN.
        track_traj_ids: False: leave out ("collector", "traj_ids").
        track_policy_version: add ("collector", "policy_version").
        replay_buffer: anything with ``extend``: what is collected goes there, and the iterator
            yields None.
        extend_buffer: False: its items are single steps, [] or [P].
        init_fn: called without arguments before the environments are made.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch that is about to be delivered.
        compact_obs: leave out ("next", key) of observations and recurrent states, which the next
            root has but at a trajectory's end; reward and flags stay.
        compile_policy: call the policy through ``torch.compile``; a dict: its arguments, and
            "warmup", the number of calls before (1).
        cudagraph_policy: replay the policy's modules as CUDA graphs; a dict: "warmup", the number
            of calls before (2). It is without effect, with a warning, where there is no CUDA.
        trust_policy: the policy is called with the TensorDict, whatever its parameters are named.
        observation_dtype: of the observations in a batch, root and next, instead of the
            environment's (a dtype or its name); or a dict by observation key. Flags and, unless
            they are named, bool and complex observations stay.
        observation_scale: a number that observations are multiplied by after that cast (float32 for
            integers where no dtype is given): 1 / 255 for frames; or a dict by observation key.
        num_threads: torch threads while it collects; None: as they are.
        progress: show a bar.
        num_collectors: collect in so many workers elsewhere, which makes a collector of another
            class: see `backend`. For each worker `create_env_fn` has an entry, or is repeated.
        sync: of these: wait for all workers and join their rollouts; else first ready, first
            served.
        backend: where these are: "process", a :class:`MultiSyncDataCollector` or
            :class:`MultiaSyncDataCollector` (the default with `num_collectors`), "ray", a
            :class:`RayCollector`, or "direct", this class (the default without).
        backend_options: further arguments of that class.
        weight_updater: a WeightUpdaterBase of TorchRL's, or a callable that makes one: called for
            each update instead of giving the weights itself.
        weight_sync_schemes: TorchRL's, of the "policy" alone: has no effect, with a warning, but
            for a NoWeightSyncScheme, with which updates change no weights.
        weight_recv_schemes: TorchRL's, by model: bring weights from senders elsewhere.
        others: TorchRL's hints are accepted without effect; what is refused says why.

    Yields:
        TensorDicts of batch size [T] for one environment, [P, T] for a batch.
    """

    @takes(_arguments)
    def __init__(self, given: Given) -> None:
        check_none_chosen(type(self), given)
        check_others(type(self).__name__, given.known, given.others)
        (own,) = parse.of_each_worker(given, 1)
        places = check_devices(own)
        stream = checked(StreamOptions, given)
        frames = stream.frames_per_batch
        options = checked(WorkerOptions, own, frames=frames, devices=places, stays=True)
        super().__init__(stream, options.pre_collect_hook, options.post_collect_hook)
        self._profiler: ProfilerHook | None = None
        (source,), self._policy_is_ours = parse.policy_sources([own], given["policy"])
        env_kwargs = check.check_env_kwargs(own["create_env_kwargs"])
        entry = _only_entry(given["create_env_fn"])
        self._policy = build(source) if self._policy_is_ours else source
        self._worker = Worker(0, entry, env_kwargs, self._policy, options)
        if self._policy_is_ours:
            self._policy = self._worker.policy
        self._place = places.of_batches or self._worker.device, places.told
        way = self._uploads.way(self._place[0])
        allocate = None if way is None else way.allocate
        self._pool = make_pool(self._worker.placement, _SLABS_KEPT, allocate)
        self._batch_frames = self._worker.env.num_envs * self._worker.steps
        self._report: RolloutReport | None = None
        try:
            self._check_environment(self._worker.leaves, self._worker.bounded)
            warn_of_rounding(self._options.frames_per_batch, self._batch_frames)
            self.register_scheme_receiver(self._ways.receivers)
        except BaseException:  # also a warning, where these are errors
            self.shutdown()
            raise

    def _collect(self) -> None:
        random = self._is_random
        self._ledger.issue(0, self._batch_frames)
        slab = self._pool.acquire()
        try:
            report = self._worker.collect(slab, 0, self._policy_version, random)
            with Uninterrupted():
                self._unclaimed = self._batch_of(slab, report)
        except Exception as error:
            self._ledger.lose(0, self._batch_frames, "env_error")
            text = f"worker 0 raised {type(error).__name__}: {error}"
            failure = WorkerError(text, 0, 0, traceback.format_exc())
            failure.__cause__ = error.__cause__
            raise error from failure
        except BaseException:  # an interrupt: the rollout was given up
            if self._unclaimed is None:
                self._ledger.lose(0, self._batch_frames, "incomplete")
            raise

    def _batch_of(self, slab: Slab, report: RolloutReport) -> Batch:
        with self._statistics.timed("assemble"):
            check_lease(slab, slab.header())
            keys = self._worker.slab_leaves.keys
            tensors = slab_tensors(slab, self._worker.batch_shape, keys)
            ids = tensors[TRAJ_IDS]
            self._ids.renumber(0, ids.view(self._worker.env.num_envs, self._worker.steps))
            extras = report.extras and joined([report.extras], -1, self._worker.env.batch_size)
        self._report = report
        self._ledger.take_back(0, self._batch_frames - report.header.frames)
        return Batch(
            Joined(slab, tensors, self._worker.batch_shape, extras),
            {0: report.header.frames},
            report.episodes,
            self._worker.leaves,
            *self._place,
            report.there,
        )

    def _before_delivery(self, td: TensorDictBase) -> None:
        hook = self.post_collect_hook
        if hook is not None:
            hook(td)

    def _pass_hook_on(self, name: str, hook: Callable[..., Any] | None) -> None:
        if name == PRE:
            self._worker.pre_collect_hook = hook

    def _begin_profile(self, config: ProfileConfig) -> None:
        if 0 in config.workers:
            self._profiler = ProfilerHook(config, 0, self.post_collect_hook)
            self.post_collect_hook = self._profiler

    def _end_profile(self, config: ProfileConfig) -> None:
        profiler = self._profiler
        if profiler is not None:
            profiler.stop()
            inner = profiler.inner
            if self.post_collect_hook is profiler:
                self.post_collect_hook = inner

    @property
    def requested_frames_per_batch(self) -> int:
        """The frames of a batch, after rounding up."""
        return self._batch_frames

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._worker.options

    @property
    def policy_lag(self) -> dict[int, int]:
        """Always 0 after the first batch that follows an update: the module is live."""
        version = 0 if self._report is None else self._report.header.policy_version
        return {0: self._policy_version - version if self._report else 0}

    def _report_of_all(self) -> dict[str, Any]:
        """See :meth:`CollectorBase.stats`.

        "seconds" has the phases env, policy, record, assemble, deliver and user, which add up to
        "elapsed"; the first three are split by a sample of the steps. "slow_paths" counts what goes
        through one TensorDict per step (the policy, the environment), and "extras".
        """
        report = self._report
        statistics = self._statistics.report()
        own = self._worker.seconds.report()
        statistics["seconds"].update({phase: own[phase] for phase in ("env", "policy", "record")})
        return {
            **statistics,
            "frames_stepped": report.stepped if report else 0,
            "slow_paths": count_slow_paths([report.slow_paths] if report else []),
            "workers": {
                0: {
                    "pid": os.getpid(),
                    "node": socket.gethostname(),
                    "version": report.header.policy_version if report else 0,
                    "restarts": 0,
                    "frames": self._statistics.frames,
                    "seconds": own,
                }
            },
            "workers_alive": 0 if self._closed else 1,
        }

    def _seed_workers(self, root: int, static: bool) -> int:
        seeds, following = seed_chain(root, self._worker.env.num_seeds, static)
        self._worker.set_seed(seeds, root)
        return following

    def _drop_rollouts(self) -> None:
        """There are none beside the one that is being collected."""

    def reset(self, index: Any = None) -> None:
        """Reset the environments. Rollouts in flight are dropped, where all are reset.

        Args:
            index: of P environments those that are reset, as a tensor of their batch dimensions is
                indexed: an int, several, a slice, a mask. Their open trajectories end, those of the
                others go on. None: all.

        Raises:
            RuntimeError: an index for one environment that is no batch, or for some that cannot be
                reset one by one.
            IndexError: there is no such environment.
        """
        with self._stream:
            self._check_open()
            if index is None:
                self._drop_all("reset")
                self._worker.reset()
            else:
                self._worker.reset_rows(rows_at(self._worker.env, index))

    def rollout(self) -> TensorDictBase:
        """One batch as it was collected: not split, not processed, in no replay buffer.

        It counts as delivered, as every other one.

        Raises:
            RuntimeError: with `trajs_per_batch`, where its frames would be missing in others.
        """
        if self._queue is not None:
            raise RuntimeError("rollout: expected a collector without trajs_per_batch; use next()")
        with self._stream:
            self._check_not_closed()
            self._statistics.entered()
            try:
                batch, td = self._assembled(self._uploads)
                with Uninterrupted():
                    self._claim()
                    self._count(batch.frames_of)
            finally:
                self._statistics.left()
            return td

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros of the shape, the keys and the place of the next batch, without a step.

        With `set_truncated` its last flags are set. Split and processed as every batch.
        """
        blank = blank_batch(self._worker, self._pool.acquire(), *self._place)
        td = assembled(blank, self._options, self._uploads)
        return finished(td, self._options, blank.joined.tensors)

    def _worker_states(self) -> dict[int, WorkerState]:
        return {0: WorkerState(self._worker.generator_state())}

    def _current_weights(self) -> Weights:
        return weights_of(self._policy)

    def _check_states(self, states: Mapping[int, WorkerState]) -> None:
        check_generators(0, states[0], 0, self._worker.env.num_envs)

    def _check_weights(self, weights: Weights) -> None:
        check_same(weight_leaves(self._current_weights()), weights)

    def _resume_workers(self, state: CollectorState) -> None:
        if state.policy:
            load_weights(self._current_weights(), state.policy)
            self._renew_copy()
        own = state.workers[0].generators
        seeds = derived_seeds(self._worker.env.num_seeds, state.entropy, state.batches, 0)
        if own is None:
            self._worker.set_seed(seeds, derived_seeds(1, state.entropy, state.batches)[0])
        else:
            assert isinstance(own, GeneratorState)  # as was checked
            self._worker.resume(own, seeds)
        self._report = None

    def _update(self, source: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        check_open(self._closed, None)
        check_worker_ids(worker_ids, [0])
        own = by_worker(source)
        if own is not None:
            check_worker_ids(list(own), [0], "policy_or_weights")
            source = own[0]
        if source is None and self._policy_is_ours and self._ways.sends:
            raise no_weights_given()
        if source is not None and self._ways.sends:
            load_weights(weights_of(self._policy), weights_from(source))
        self._renew_copy()
        self._count_version()

    def _take_received(self, source: Any) -> None:
        load_weights(weights_of(self._policy), weights_from(source))
        self._renew_copy()

    @contextmanager
    def _one_version(self) -> Iterator[None]:
        yield
        self._renew_copy()
        self._count_version()

    def _renew_copy(self) -> None:
        """Where the policy is called on another device than the caller's lies on, it is a copy."""
        if self._ways.sends and self._worker.policy is not self._policy:
            self._worker.load_weights(weights_of(self._policy))

    def _check_close_env(self, close_env: bool) -> None:
        """Here they can stay open: they are the caller's."""

    def _shutdown(self, timeout: float | None, close_env: bool) -> None:
        self.disable_profile()
        if close_env:
            self._worker.close()


def _only_entry(create_env_fn: Any) -> Any:
    """The entry of the only worker: [a] is a, and [[a, b]] is [a, b], a batch, as [a, b] is."""
    if isinstance(create_env_fn, (list, tuple)) and len(create_env_fn) == 1:
        create_env_fn = create_env_fn[0]
    return check.check_entry(create_env_fn)


def rows_at(env: EnvBatch, index: Any) -> list[int]:
    """Which of P environments stand at an index into their batch dimensions.

    Raises:
        RuntimeError: they are no batch, or cannot be reset one by one.
        IndexError: it is out of their range.
    """
    if not env.batch_size:
        raise RuntimeError("index: expected None, as there is one environment alone")
    if not env.can_reset:
        raise RuntimeError(
            "index: expected None, as this vector environment does not honour reset_mask"
        )
    rows = torch.arange(env.num_envs).view(env.batch_size)
    return sorted(set(rows[index].reshape(-1).tolist()))
