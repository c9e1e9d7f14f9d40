"""The collectors that run in processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect.collectors.adding import NewWorkers
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.given import Given, takes, telling
from pycollect.collectors.arguments.inference import Central, watched
from pycollect.collectors.arguments.names import check_others
from pycollect.collectors.choice import ChoosingSync
from pycollect.collectors.scheduled import ScheduledCollector
from pycollect.collectors.set_up import SetUp
from pycollect.collectors.single import SyncDataCollector
from pycollect.devices import Devices
from pycollect.docstrings import completed_by
from pycollect.engines.processes.engine import ProcessEngine
from pycollect.envs.info import AskedInfo
from pycollect.scheduler.worker_pipe import WorkerPipe


def _arguments(
    create_env_fn: Any,
    policy: Any = None,
    *,
    frames_per_batch: int | Sequence[int],
    total_frames: int | None = -1,
    num_workers: int | None = None,
    device: Any = None,
    storing_device: Any = None,
    env_device: Any = None,
    policy_device: Any = None,
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    autoreset_mode: Any = None,
    env_groups: int = 1,
    info_keys: AskedInfo | None = None,
    max_frames_per_traj: int | None = None,
    init_random_frames: int | None = None,
    reset_at_each_iter: bool = False,
    set_truncated: bool = False,
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
    policy_state: Mapping[Any, Any] | None = None,
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
    split_trajs: bool = False,
    drop_uncollected: bool = False,
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
    num_threads: int = 1,
    num_sub_threads: int | None = None,
    progress: bool = False,
    collector_class: Any = None,
    cat_results: str | int | None = None,
    preemptive_threshold: float | None = None,
    min_fraction: float | None = None,
    update_after_each_batch: bool = False,
    update_at_each_batch: bool = False,
    max_weight_update_interval: int | None = None,
    prefetch: int | None = None,
    inference: str | None = None,
    min_batch_size: int | None = None,
    max_batch_size: int | None = None,
    server_timeout: float | None = None,
    max_worker_restarts: int = 3,
    worker_timeout: float | None = None,
    worker_init_timeout: float = 120.0,
    restart_on_error: bool = False,
    start_method: str = "forkserver",
    weight_updater: Any = None,
    weight_sync_schemes: Mapping[str, Any] | None = None,
    weight_recv_schemes: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """What the collectors of processes take, but for what an async one has no use for."""


class MultiCollector(ScheduledCollector, metaclass=ChoosingSync):
    """What both have in common; itself it makes one of them.

    ``MultiCollector(..., sync=True)`` is a :class:`MultiSyncDataCollector`, with False a
    :class:`MultiaSyncDataCollector`.

    Args:
        sync: True or False, by name: which of the two.
        given: the arguments of that class, by name.
    """

    def __init__(self, sync: bool, given: Given) -> None:
        check_others(type(self).__name__, given.known, given.others)
        _check_collector_class(given["collector_class"])
        if given["num_sub_threads"] is not None:
            threads = check.check_positive("num_sub_threads", given["num_sub_threads"])
            given = given.instead(num_threads=threads)
        entries = parse.env_entries(given["create_env_fn"], "num_workers", given["num_workers"])
        shares = parse.frames_of_each(given["frames_per_batch"], len(entries), sync)
        given = given.instead(frames_per_batch=_frames_of_a_batch(given["frames_per_batch"]))
        self._pipes: dict[int, WorkerPipe] = {}
        central = Central.of(given, len(entries), sync=sync)
        seats = None if central is None else central.seats
        given = given if central is None else central.given
        set_up = SetUp.of(given, entries, shares, _no_options, sync=sync, server=seats)
        method = set_up.remote.start_method
        if central is None:
            super().__init__(set_up, ProcessEngine(method))
        else:
            engine = watched(central.bell, ProcessEngine(method, central.bell))
            super().__init__(set_up, engine, central.serving(method))

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Start more processes, with the arguments of the others. Blocks until they are built.

        Async they are asked for rollouts at once; sync they are part of the first batch that is
        not asked for yet, from which on every worker collects an equal share.

        Args:
            create_env_fn: one entry, or a list with one per new worker.
            num_envs: environments per worker, stepped as a batch.
            policy: of the collector's policy's parameters; None: the collector's.
            collector_kwargs: arguments that concern what one worker does, in place of what the
                collector was given; a dict, or one per new worker.

        Returns:
            The ids of the new workers.

        Raises:
            ValueError: also for workers that deliver other things than those of a sync collector.
        """
        return self._add(NewWorkers(create_env_fn, num_envs, policy, collector_kwargs, _no_options))

    @property
    def pipes(self) -> list[WorkerPipe]:
        """One per worker, for weight updaters that send through them."""
        for worker in self._workers:
            give = partial(self._source.weights.push_own, worker)
            self._pipes.setdefault(worker.index, WorkerPipe(give))
        return [self._pipes[worker.index] for worker in self._workers]


@completed_by(SyncDataCollector)
class MultiSyncDataCollector(MultiCollector):
    """Collects in processes of this machine; a batch is complete when all have delivered.

    Workers write into the batch itself, in shared memory that has no name. They
    import the script, which needs its ``if __name__ == "__main__":``, may have processes of their
    own, and end with this process, whatever ends it.

    Args:
        create_env_fn: a list with one entry per worker (a callable, a list of callables that are
            stepped as a batch, or an environment that pickles), or one entry that is repeated
            `num_workers` times.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions. Each worker gets a copy.
        frames_per_batch: frames of all workers together, each collects its share, rounded up with
            a warning; or a list with the share of each, see below.
        num_workers: the number of workers, where `create_env_fn` is not a list.
        device: for those of the three that follow which are not given; each may be one per worker.
        create_env_kwargs: keyword arguments of the env callables, or one dict per worker.
        autoreset_mode: of vector environments whose metadata does not tell it.
        init_random_frames: random actions until so many frames were issued, over all workers.
        set_truncated: flag the last frame of every env in every rollout as truncated.
        policy_factory: called without arguments in each worker, returns its policy; or one callable
            per worker. Instead of `policy`; only the factory has to pickle.
        replay_buffer: anything with ``extend``: what is collected goes there, and the iterator
            yields None. Each worker's rollout, [T] or [P, T], goes there by itself, in worker
            order, after `postproc`; `cat_results` and `split_trajs` are of no effect.
        init_fn: called without arguments in each worker before its environments are made.
        pre_collect_hook: called without arguments in the worker before each of its rollouts.
        post_collect_hook: called in the worker with each of its rollouts, [T] or [P, T]. Trajectory
            ids are numbered by the worker there, not yet over all of them.
        num_threads: torch threads in each worker. A policy that is called centrally has the
            caller's.
        num_sub_threads: the same under TorchRL's name; goes before `num_threads`, which is the
            caller's own there.
        collector_class: what each worker runs: None, SyncDataCollector or "single".
        cat_results: how rollouts are joined: "stack" (a new first dimension), 0 or -1.
        preemptive_threshold: from 0 to 1: once ``ceil(preemptive_threshold * B)`` of B workers are
            done, the others stop after their current step; None: they are waited for.
        min_fraction: of these, each makes at least this part of its T steps, and at least one.
        update_after_each_batch: all workers get the policy's current weights before each
            collection.
        update_at_each_batch: the same under TorchRL's name.
        max_weight_update_interval: a worker gets the policy's current weights at the latest after
            it delivered so many batches since it last got some.
        prefetch: rollouts per worker, running or finished, beyond the one being consumed; None: 0.
            A batch is at most ``prefetch + 1`` versions old, of those that its worker was given.
        inference: "central": one policy acts for all workers, which only step environments. It is
            called here, with the observations of all that are ready as one batch ``[B * P, *obs]``
            (``[B, *obs]`` of single environments), by the thread that awaits the batch; weights are
            live, as `SyncDataCollector` has them. None: each worker has a copy.
        min_batch_size: environments that such a call waits for; None: those of all workers that
            collect, so that a seed decides what a policy draws; not sync: 1.
        max_batch_size: environments in one such call at the most, in whole workers.
        server_timeout: seconds that such a call waits for workers that still step; None: as long as
            it takes, or 0.01 with `preemptive_threshold` and where not sync.
        max_worker_restarts: how often a worker that died is replaced by a new one; a death is
            forgotten after 100 delivered batches.
        worker_timeout: a worker that made no step for so many seconds is ended and replaced; None:
            it is waited for.
        worker_init_timeout: seconds in which a worker must have built its environments; those for
            which it was ready to run and other programs had the CPU do not count. A replacement
            that takes longer counts as one that died.
        restart_on_error: replace a worker whose environment or policy raised, too.
        start_method: "forkserver": workers are forks of a process that has imported what they need,
            one for this program, without modules that start threads or open a GPU when they are
            imported; "spawn": each is a new interpreter. If no process can be forked, workers are
            spawned and a warning names the reason.
        ...: those of :class:`SyncDataCollector`.

    Yields:
        TensorDicts. With B workers: "stack" [B, T] or [B, P, T]; 0: [B*T] or [B*P, T];
        -1: [B*T] or [P, B*T]. The two newest batches lie in shared memory, what is kept of earlier
        ones is private.

        With `preemptive_threshold`, or shares that differ, the rollouts of a batch differ in
        length. "stack": T is that of the longest share; zeros with the trajectory id -1 follow a
        shorter rollout, and ("collector", "mask"), bool [B, T] or [B, P, T], is True where there is
        a frame. -1, and 0 with one environment per worker: they follow each other along time
        without gaps, so that the last dimension is shorter. Only real frames are counted.

    Raises:
        ValueError: also for slabs that memory cannot hold, and for `cat_results` 0 where rollouts
            of several environments each may differ in length.
        SharedMemoryError: processes cannot share memory here; it says why.
    """

    @takes(_arguments)
    def __init__(self, given: Given) -> None:
        super().__init__(True, given)


@completed_by(MultiSyncDataCollector)
class MultiaSyncDataCollector(MultiCollector):
    """Collects in processes of this machine; first ready, first served.

    Args:
        frames_per_batch: frames of one worker's batch, rounded up with a warning; or a list with
            one number per worker, whose sum it is.
        update_after_each_batch: the worker that delivered gets the policy's current weights, for
            its next rollout to start.
        prefetch: rollouts per worker, running or finished, beyond the one being consumed; None: 2.
            A batch is at most ``prefetch + 1`` versions old, of those that its worker was given.
        cat_results: None or "stack", without effect: there is nothing to join.
        inference: "central": one policy acts for all workers, in a process that does nothing else,
            for those that are ready. It has a copy of `policy`, or what `policy_factory` makes
            there, and is given weights as workers are: it takes them before its next call. Where
            it dies, it is replaced together with the workers. None: each worker has a copy.
        ...: those of :class:`MultiSyncDataCollector`.

    Yields:
        TensorDicts, [T] or [P, T], of one worker each. Of each worker, the two newest lie in shared
        memory, what is kept of earlier ones is private.

    Raises:
        ValueError: also for slabs that memory cannot hold.
    """

    @takes(_arguments, without=("preemptive_threshold", "min_fraction"), cat_results="str | None")
    def __init__(self, given: Given) -> None:
        super().__init__(False, given)


@completed_by(MultiaSyncDataCollector)
class AsyncCollector(MultiaSyncDataCollector):
    """Collects in one process beside this one.

    Args:
        create_env_fn: the entry of the only worker.
        arguments: by name, the others of :class:`MultiaSyncDataCollector`.
        ...: those of :class:`MultiaSyncDataCollector`.

    Yields:
        TensorDicts, [T] or [P, T].
    """

    @telling
    def __init__(self, create_env_fn: Any, policy: Any = None, **arguments: Any) -> None:
        count = check.check_positive_or_none("num_workers", arguments.get("num_workers"))
        if count not in (None, 1):
            raise ValueError(
                f"num_workers: expected None or 1, got {count}; "
                "AsyncCollector has one worker, MultiaSyncDataCollector has several"
            )
        super().__init__([create_env_fn], policy, **arguments)


def _no_options(devices: Sequence[Devices]) -> list[Mapping[str, Any]]:
    """Processes have none."""
    return [{}] * len(devices)


def _frames_of_a_batch(value: Any) -> Any:
    return sum(value) if isinstance(value, (list, tuple)) else value


def _check_collector_class(value: Any) -> None:
    name = value if isinstance(value, str) else getattr(value, "__name__", value)
    if not check.is_one_of(name, (None, "single", "SyncDataCollector", "Collector")):
        raise ValueError(
            f"collector_class: expected None, SyncDataCollector or 'single', got {value!r}"
        )
