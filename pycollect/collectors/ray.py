"""The collector that runs in Ray actors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect._core import Leaf, Placement, RolloutHeader, Slab, SlabPool, place_rollout
from pycollect.batch import TRAJ_IDS, make_pool, slab_tensors
from pycollect.collectors import arguments as check
from pycollect.collectors import ray_arguments as parse
from pycollect.collectors.base import (
    Batch,
    CollectorBase,
    StreamOptions,
    check_open,
    check_worker_ids,
    no_weights_given,
)
from pycollect.collectors.ray_engine import (
    RayEngine,
    RemoteHandle,
    Rollout,
    actor_options,
    check_actor_options,
    close_all,
)
from pycollect.collectors.remote_worker import (
    Buffer,
    RolloutNote,
    WorkerInfo,
    WorkerSpec,
    check_alike,
    join_extras,
)
from pycollect.collectors.single import SyncDataCollector, warn_of_rounding
from pycollect.collectors.statistics import count_slow_paths
from pycollect.generators import seed_chain
from pycollect.layout import Key
from pycollect.weights import (
    Weights,
    WeightSlab,
    check_same,
    same_values,
    weights_from,
    weights_of,
)

_INIT_SECONDS = 120.0
_SILENCE_SECONDS = 60.0
_SLABS_KEPT = 3


@dataclass
class _Record:
    """What is known of a worker from the rollouts that it delivered."""

    note: RolloutNote | None = None
    version: int = 0
    frames: int = 0
    collecting: float = 0.0


class RayCollector(CollectorBase):
    """Collects in Ray actors, on one machine or a cluster.

    Args:
        create_env_fn: a list with one entry per actor (a callable, a list of callables that are
            stepped as a batch, or an environment that pickles), or one entry that is repeated
            `num_collectors` times.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions. Each actor gets a copy.
        frames_per_batch: sync: frames of all actors together, each collects its share, rounded up
            with a warning; async: of each actor's batch.
        total_frames: a lower bound; None or a negative number: for ever.
        device: "cpu" or None, or one per actor, like the three that follow.
        storing_device: where batches lie; None: `device`.
        env_device: where environments lie; None: `device`.
        policy_device: where the policy lies; None: `device`.
        create_env_kwargs: keyword arguments of the env callables, or one dict per actor.
        autoreset_mode: of vector environments whose metadata does not tell it.
        info_keys: entries of Gymnasium's info (strings, or tuples into nested dicts) to be
            recorded under "next". What the first step shows as a number or an array of numbers is
            a tensor, zeros where an info does not have it; anything else, and what that step does
            not show (with a warning), NonTensorData, None where an info does not have it.
        max_frames_per_traj: truncate and reset after so many steps; adds "step_count".
        init_random_frames: random actions until so many frames were issued, over all actors.
        reset_at_each_iter: reset all environments at the start of every batch.
        set_truncated: flag the last frame of every env in every rollout as truncated.
        policy_factory: called without arguments in each actor, returns its policy; or one callable
            per actor. Instead of `policy`; only the factory has to pickle.
        policy_state: shapes of one env (or first values) of the policy's recurrent states by key,
            where neither a primer nor an LSTM, GRU or RNN layer of the policy tells them.
        postproc: called with each batch, its result is delivered.
        split_trajs: deliver one row per trajectory, see :func:`split_trajectories`.
        exploration_type: DETERMINISTIC, RANDOM, MODE or MEAN.
        track_policy_version: add ("collector", "policy_version").
        num_threads: torch threads in each actor.
        progress: show a bar.
        collector_class: what each actor runs: SyncDataCollector or "single".
        collector_kwargs: arguments of the actors' collectors, a dict or one per actor. A key here
            wins over a default, and is overridden by what is passed above.
        num_workers_per_collector: environments per actor, stepped as a batch.
        sync: wait for all actors and join their rollouts in worker order; else first ready, first
            served.
        cat_results: how sync rollouts are joined: "stack" (a new first dimension), 0 or -1.
        ray_init_config: arguments of ``ray.init``; None: join the running cluster, else start one.
        remote_configs: actor options, a dict or one per actor; 1 CPU and 2 GiB by default.
        num_collectors: the number of actors, where `create_env_fn` is not a list.
        update_after_each_batch: sync: all actors get the policy's current weights before each
            collection; async: the actor that delivered, for its next rollout to start.
        prefetch: rollouts per actor, running or finished, beyond the one being consumed; None: 2,
            and 0 where sync. A batch is at most ``prefetch + 1`` versions old.
        others: TorchRL's hints are accepted without effect; what is refused says why.

    Yields:
        TensorDicts. Async: [T] or [P, T]. Sync with B actors: "stack" [B, T] or [B, P, T];
        0: [B*T] or [B*P, T]; -1: [B*T] or [P, B*T].

    Raises:
        ValueError: also for resources that the cluster does not have.
        ImportError: Ray is not installed.
    """

    _passed: set[str]

    @check.remembers_passed
    def __init__(
        self,
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
        exploration_type: InteractionType | str = InteractionType.RANDOM,
        track_policy_version: bool = False,
        num_threads: int = 1,
        progress: bool = False,
        collector_class: Any = SyncDataCollector,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        cat_results: str | int | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        prefetch: int | None = None,
        **others: Any,
    ) -> None:
        values = {name: value for name, value in locals().items() if name in parse.WORKER_ARGUMENTS}
        check.check_others(type(self), others)
        parse.check_collector_class(collector_class)
        self._sync = bool(sync)
        self._cat = parse.check_cat_results(cat_results, self._sync)
        self._prefetch = parse.check_prefetch(prefetch, self._sync)
        self._update_each = bool(update_after_each_batch)
        entries = parse.env_entries(create_env_fn, num_collectors, num_workers_per_collector)
        arguments = parse.worker_arguments(values, self._passed, collector_kwargs, len(entries))
        super().__init__(
            StreamOptions.checked(
                frames_per_batch=frames_per_batch,
                total_frames=total_frames,
                init_random_frames=parse.common_value("init_random_frames", arguments),
                postproc=postproc,
                split_trajs=split_trajs,
                device=parse.storing_device(arguments, self._sync),
                progress=progress,
            )
        )
        share = self._options.frames_per_batch
        if self._sync:
            share = -(-share // len(entries))
        sources, self._built_by_workers = parse.policy_sources(arguments, policy)
        specs = [
            WorkerSpec(
                index,
                entry,
                check.check_env_kwargs(own["create_env_kwargs"]),
                parse.worker_options(own, share),
                builds_policy=self._built_by_workers,
            )
            for index, (entry, own) in enumerate(zip(entries, arguments, strict=True))
        ]
        configs = parse.check_remote_configs(remote_configs, len(entries))
        init_config = parse.check_init_config(ray_init_config)
        self._policy = policy
        self._weight_slabs: dict[tuple[Leaf, ...], WeightSlab] = {}
        self._first_weights = {name: value.clone() for name, value in weights_of(policy).items()}
        self._workers: list[RemoteHandle] = []
        self._line: list[RemoteHandle] = []  # the workers, whoever was served longest ago first
        self._gone: list[RemoteHandle] = []
        self._records: dict[int, _Record] = {spec.index: _Record() for spec in specs}
        self._served: RemoteHandle | None = None  # whose rollout was delivered last, async
        self._failing: Exception | None = None  # to be raised once what is done was delivered
        self._issued = 0
        self._in_flight = 0
        pickled_specs = [parse.pickled_spec(spec) for spec in specs]
        policies = parse.pickled_policies(sources, self._built_by_workers)
        check_actor_options(configs)
        self._engine = RayEngine(init_config)
        try:
            self._start(specs, pickled_specs, policies, configs)
            warn_of_rounding(self._options.frames_per_batch, self._batch_frames, stacklevel=4)
        except BaseException:
            self.shutdown()
            raise

    # Starting

    def _start(
        self,
        specs: Sequence[WorkerSpec],
        pickled_specs: Sequence[bytes],
        policies: Sequence[bytes],
        configs: Sequence[Mapping[str, Any]],
    ) -> None:
        options = [actor_options(config) for config in configs]
        self._engine.check_resources(options)
        policy_refs = {policy: self._engine.put(policy) for policy in dict.fromkeys(policies)}
        for spec, data, policy, own in zip(specs, pickled_specs, policies, options, strict=True):
            reference = policy_refs[policy]
            worker = self._engine.start(spec.index, spec.incarnation, data, reference, own)
            self._workers.append(worker)
        self._line = list(self._workers)
        self._await_workers()
        infos = [worker.read_info() for worker in self._workers]
        if self._sync:
            check_alike(infos)
        self._pools = self._make_pools(infos)
        rollouts = sum(info.placement.bytes for info in infos)
        self._engine.check_store(rollouts * (self._prefetch + 1))
        frames = [info.frames for info in infos]
        self._batch_frames = sum(frames) if self._sync else max(frames)

    def _await_workers(self) -> None:
        deadline = time.monotonic() + _INIT_SECONDS
        waiting = list(self._workers)
        while waiting:
            ready = self._engine.wait_any(waiting, max(deadline - time.monotonic(), 0.0))
            if ready is None:
                raise ValueError(
                    f"remote_configs: workers {[w.index for w in waiting]} did not start within "
                    f"{_INIT_SECONDS:.0f} s; their CPU, memory or other resources are in use, or "
                    "their environments take longer to build"
                )
            waiting.remove(ready)

    def _make_pools(self, infos: Sequence[WorkerInfo]) -> dict[int, SlabPool]:
        """Batch slabs: one pool where batches are joined, else one per kind of rollout."""
        if self._sync:
            info = infos[0]
            order = "time" if self._cat == -1 else "stack"
            placement = Placement(
                info.leaves.layout(), len(infos), info.num_envs, info.steps, order
            )
            pool = make_pool(placement, _SLABS_KEPT)
            return {worker.index: pool for worker in self._workers}
        kinds: dict[tuple[int, int, int], SlabPool] = {}
        pools = {}
        for worker, info in zip(self._workers, infos, strict=True):
            layout = info.leaves.layout()
            kind = (layout.fingerprint, info.num_envs, info.steps)
            if kind not in kinds:
                kinds[kind] = make_pool(info.placement, _SLABS_KEPT)
            pools[worker.index] = kinds[kind]
        return pools

    # Collecting

    def _collect(self) -> Batch:
        return self._collect_sync() if self._sync else self._collect_async()

    def _collect_sync(self) -> Batch:
        if self._update_each:
            self._push_policy(self._workers)
        self._top_up(max(self._prefetch, 1))
        slab = self._pools[0].acquire()
        waiting = list(self._workers)
        placed: dict[int, tuple[RolloutHeader, RolloutNote]] = {}
        while waiting:
            worker = self._await_any(waiting)
            waiting.remove(worker)
            rollout = self._rollout(worker)
            placed[worker.index] = (self._place(slab, worker.index, worker, rollout), rollout.note)
        for worker in self._workers:
            self._take_off(worker, *placed[worker.index])
        frames = sum(header.frames for header, _ in placed.values())
        self._top_up(self._prefetch, delivering=frames)
        info = self._workers[0].info
        episodes = [e for index in sorted(placed) for e in placed[index][1].episodes]
        with self._statistics.timed("assemble"):
            tensors = self._assemble(slab, info, sorted(placed))
            extras = join_extras([placed[i][1].extras for i in sorted(placed)], self._cat, info)
        return Batch(tensors, self._shape(info), frames, episodes, info.leaves, extras)

    def _collect_async(self) -> Batch:
        if self._update_each and self._served is not None:
            self._push_policy([self._served])
        if self._failing is None:
            self._top_up(max(self._prefetch, 1))
        worker, rollout = self._first_ready()
        slab = self._pools[worker.index].acquire()
        header = self._place(slab, 0, worker, rollout)
        with self._statistics.timed("assemble"):
            tensors = self._assemble(slab, worker.info, [worker.index])
            extras = join_extras([rollout.note.extras], -1, worker.info)
        # Whoever was served goes to the end of the line, so that a fast worker starves nobody.
        self._line.remove(worker)
        self._line.append(worker)
        self._served = worker
        self._take_off(worker, header, rollout.note)
        if self._failing is None:
            self._top_up(self._prefetch, delivering=header.frames)
        note, shape = rollout.note, self._shape(worker.info)
        leaves = worker.info.leaves
        return Batch(tensors, shape, header.frames, note.episodes, leaves, extras)

    def _first_ready(self) -> tuple[RemoteHandle, Rollout]:
        """The first rollout that is there. One that failed is raised after those that are done."""
        while True:
            waiting = [worker for worker in self._line if worker.outstanding]
            if self._failing is None:
                worker = self._await_any(waiting)
            else:
                done = self._engine.wait_any(waiting, 0.0) if waiting else None
                if done is None:
                    raise self._failing
                worker = done
            try:
                return worker, self._rollout(worker)
            except Exception as error:
                self._failing = self._failing or error
                self._gone.append(worker)
                self._line.remove(worker)
                # A list of its own: another thread may be giving weights to the workers in the old.
                self._workers = [other for other in self._workers if other is not worker]

    def _top_up(self, depth: int, delivering: int = 0) -> None:
        """Queue rollouts until each worker has that many, one each in turn.

        Sync rounds are queued for all workers or for none.

        Args:
            delivering: frames that were taken off the queue and are not counted as delivered yet.
        """
        for level in range(1, depth + 1):
            lacking = [worker for worker in self._workers if worker.outstanding < level]
            if self._sync and not self._more_needed(delivering):
                return
            random = self._issued < self._options.init_random_frames
            for worker in lacking:
                if not self._sync:
                    random = self._issued < self._options.init_random_frames
                    if not self._more_needed(delivering):
                        return
                self._submit(worker, random)

    def _more_needed(self, delivering: int) -> bool:
        total = self._options.total_frames
        return total is None or self._statistics.frames + delivering + self._in_flight < total

    def _submit(self, worker: RemoteHandle, random: bool) -> None:
        self._issued += worker.info.frames
        self._in_flight += worker.info.frames
        worker.submit(random)

    def _await_any(self, waiting: Sequence[RemoteHandle]) -> RemoteHandle:
        warned = False
        with self._statistics.timed("wait"):
            while True:
                worker = self._engine.wait_any(waiting, _SILENCE_SECONDS)
                if worker is not None:
                    return worker
                if not warned:
                    warn_of_silence([worker.index for worker in waiting])
                    warned = True

    def _rollout(self, worker: RemoteHandle) -> Rollout:
        with self._statistics.timed("transport"):
            return worker.rollout()

    def _place(self, slab: Slab, row: int, worker: RemoteHandle, rollout: Rollout) -> RolloutHeader:
        """Copy a rollout into its row of a batch."""
        with self._statistics.timed("assemble"):
            return place_rollout(slab, row, rollout.buffer, worker.info.placement)

    def _take_off(self, worker: RemoteHandle, header: RolloutHeader, note: RolloutNote) -> None:
        """The worker's oldest rollout is part of a batch now; from here on it counts."""
        worker.pop()
        self._in_flight -= worker.info.frames
        record = self._records[worker.index]
        record.note = note
        record.collecting += note.seconds
        record.version = header.policy_version
        record.frames += header.frames

    def _assemble(
        self, slab: Slab, info: WorkerInfo, workers: Sequence[int]
    ) -> dict[Key, torch.Tensor]:
        """The batch's tensors, ids numbered over all workers, in worker order."""
        tensors = slab_tensors(slab, self._shape(info), info.leaves.keys)
        ids = tensors[TRAJ_IDS]
        shape = (len(workers), info.num_envs, info.steps)
        for row, worker in enumerate(workers):
            if self._cat == -1:
                own = ids.view(shape[1], shape[0], shape[2])[:, row]
            else:
                own = ids.view(shape)[row]
            self._ids.renumber(worker, own)
        return tensors

    def _shape(self, info: WorkerInfo) -> list[int]:
        """The batch dimensions of what is delivered."""
        workers, envs, steps = len(self._workers), info.batch_size, info.steps
        if not self._sync:
            return [*envs, steps]
        if self._cat == "stack":
            return [workers, *envs, steps]
        if self._cat == -1 or not envs:
            return [*envs, workers * steps]
        return [workers * envs[0], *envs[1:], steps]

    # What it is and does

    @property
    def policy_lag(self) -> dict[int, int]:
        """Per worker: how many versions its last delivered rollout was behind."""
        return {i: self._policy_version - r.version for i, r in self._records.items() if r.note}

    def stats(self) -> dict[str, Any]:
        """See :meth:`CollectorBase.stats`.

        "seconds" has the phases wait (for rollouts), transport, assemble, deliver, user, and
        "collect", which runs in the workers and adds up over them. "slow_paths" counts workers
        that go through one TensorDict per step, or have extras.
        """
        records = self._records
        notes = [record.note for record in records.values() if record.note]
        report = self._statistics.report()
        report["seconds"]["collect"] = sum(record.collecting for record in records.values())
        return {
            **report,
            "frames_stepped": sum(note.stepped for note in notes),
            "slow_paths": count_slow_paths(note.slow_paths for note in notes),
            "workers": {
                worker.index: {
                    "pid": worker.info.pid,
                    "node": worker.info.node,
                    "version": records[worker.index].version,
                    "restarts": worker.incarnation,
                    "frames": records[worker.index].frames,
                }
                for worker in sorted([*self._workers, *self._gone], key=lambda w: w.index)
            },
        }

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See :meth:`CollectorBase.set_seed`."""
        check_open(self._closed, self._failure or self._failing)
        root = seed = check.check_seed(seed)
        workers = sorted(self._workers, key=lambda worker: worker.index)
        for worker in workers:
            dropped = worker.drop_rollouts() * worker.info.frames
            self._in_flight -= dropped
            self._issued -= dropped
            seeds, seed = seed_chain(seed, worker.info.num_envs, static_seed)
            worker.set_seed(seeds, root)
        for worker in workers:
            worker.await_seeded()
        return seed

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        wait: bool = False,
    ) -> None:
        """See :meth:`CollectorBase.update_policy_weights_`.

        Returns at once, also while rollouts run; a rollout that is queued already takes the new
        weights when it starts.
        """
        check_open(self._closed, None)
        ids = check_worker_ids(worker_ids, sorted(worker.index for worker in self._workers))
        if policy_or_weights is None and self._built_by_workers:
            raise no_weights_given()
        weights = (
            weights_of(self._policy)
            if policy_or_weights is None
            else weights_from(policy_or_weights)
        )
        workers = [worker for worker in self._workers if worker.index in ids]
        for worker in workers:
            check_same(worker.info.weights, weights)
        sent = self._push(weights, workers, wait)
        if wait:
            for worker, call in sent:
                worker.await_call(call)

    def _push_policy(self, workers: Sequence[RemoteHandle]) -> None:
        """Send the policy's weights, unless they are the ones that the workers were made with."""
        weights = weights_of(self._policy)
        if not weights:
            return
        if self._issued == 0 and same_values(weights, self._first_weights):
            return
        self._push(weights, workers, False)

    def _push(
        self, weights: Weights, workers: Sequence[RemoteHandle], acknowledge: bool
    ) -> list[tuple[RemoteHandle, Any]]:
        """One more version, packed and put once, for these workers; the calls that were sent."""
        self._policy_version += 1
        forms = dict.fromkeys(worker.info.weights for worker in workers)
        references = {form: self._engine.put(self._packed(form, weights)) for form in forms}
        sent = []
        for worker in workers:
            reference = references[worker.info.weights]
            sent.append((worker, worker.assign(self._policy_version, reference, acknowledge)))
        return [(worker, call) for worker, call in sent if call is not None]

    def _packed(self, form: tuple[Leaf, ...], weights: Weights) -> Buffer:
        """The weights as bytes, in the dtypes that a worker's policy has."""
        if not form:
            return np.empty(0, np.uint8)
        if form not in self._weight_slabs:
            self._weight_slabs[form] = WeightSlab(form)
        return self._weight_slabs[form].pack(weights)

    def _shutdown(self) -> None:
        close_all([*self._workers, *self._gone])
        self._engine.leave()


def warn_of_silence(workers: Sequence[int]) -> None:
    """Say who is awaited."""
    warnings.warn(
        f"no rollout for {_SILENCE_SECONDS:.0f} s; waiting for workers {list(workers)}",
        UserWarning,
        stacklevel=6,
    )
