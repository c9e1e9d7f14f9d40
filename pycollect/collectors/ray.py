"""The collector that runs in Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect.collectors.adding import NewWorkers
from pycollect.collectors.arguments import ray as ray_check
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.done import Done
from pycollect.collectors.launched import LaunchedCollector
from pycollect.collectors.single import SyncDataCollector
from pycollect.devices import Devices
from pycollect.engines.ray.engine import RayEngine, actor_options, check_actor_options
from pycollect.engines.ray.inference import client_factories, is_inference_service, update_service
from pycollect.engines.ray.session import import_ray
from pycollect.envs.info import AskedInfo


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
    progress: bool = False,
    collector_class: Any = SyncDataCollector,
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    num_workers_per_collector: int = 1,
    sync: bool = False,
    cat_results: str | int | None = None,
    preemptive_threshold: float | None = None,
    min_fraction: float | None = None,
    ray_init_config: Mapping[str, Any] | None = None,
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    num_collectors: int | None = None,
    update_after_each_batch: bool = False,
    max_weight_update_interval: int | None = None,
    prefetch: int | None = None,
    max_worker_restarts: int = 3,
    worker_timeout: float | None = None,
    worker_init_timeout: float = 120.0,
    restart_on_error: bool = False,
    compress: bool = False,
    start_method: str = "forkserver",
    weight_updater: Any = None,
    weight_sync_schemes: Mapping[str, Any] | None = None,
    weight_recv_schemes: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """What a RayCollector takes."""


class RayCollector(LaunchedCollector):
    """Collects in Ray actors, on one machine or a cluster.

    Args:
        create_env_fn: a list with one entry per actor (a callable, a list of callables that are
            stepped as a batch, or an environment that pickles), or one entry that is repeated
            `num_collectors` times.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions. Each actor gets a copy. Or TorchRL's InferenceServer with the service_backend
            "ray", of which each actor calls a client: its policy stays where it is.
        frames_per_batch: sync: frames of all actors together, each collects its share, rounded up
            with a warning; async: of each actor's batch.
        total_frames: a lower bound; None or a negative number: for ever.
        device: for those of the three that follow which are not given; each may be one per actor.
        storing_device: where batches lie, and what `td.device` says; None: `device`, else where the
            environment does.
        env_device: where environments lie; None: where they are, or `device`. Those that give
            arrays stay on the CPU, whatever is said; their batches go there.
        policy_device: where the policy is called; None: `device`, or where its parameters are.
        create_env_kwargs: keyword arguments of the env callables, or one dict per actor.
        autoreset_mode: of vector environments whose metadata does not tell it.
        info_keys: entries of Gymnasium's info (strings, or tuples into nested dicts) to be
            recorded under "next". What the first step shows as a number or an array of numbers is
            a tensor, zeros where an info does not have it; anything else, and what that step does
            not show (with a warning), NonTensorData, None where an info does not have it. As a
            dict to dtypes, ``{("episode", "r"): torch.float32}``: what has one is a tensor in any
            case, of one number where the first step does not show it.
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
        drop_uncollected: deliver flat batches [N] of the frames alone, without the cells that
            ("collector", "mask") tells of.
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
            yields None. Each worker's rollout, [T] or [P, T], goes there by itself, in worker
            order, after `postproc`; `cat_results` and `split_trajs` are of no effect.
        extend_buffer: False: its items are single steps, [] or [P].
        init_fn: called without arguments in each actor before its environments are made.
        pre_collect_hook: called without arguments in the actor before each of its rollouts.
        post_collect_hook: called in the actor with each of its rollouts, [T] or [P, T]. Trajectory
            ids are numbered by the actor there, not yet over all of them.
        compact_obs: leave out ("next", key) of observations and recurrent states, which the next
            root has but at a trajectory's end; reward and flags stay.
        compile_policy: call the policy through ``torch.compile``; a dict: its arguments, and
            "warmup", the number of calls before (1).
        cudagraph_policy: replay the policy's modules as CUDA graphs; a dict: "warmup", the number
            of calls before (2). It is without effect, with a warning, where there is no CUDA.
        trust_policy: the policy is called with the TensorDict, whatever its parameters are named.
        observation_dtype: of the observations in a batch, root and next, and for the policy,
            instead of the environment's (a dtype or its name); or a dict by observation key. Flags
            and, unless they are named, bool and complex observations stay.
        observation_scale: a number that observations are multiplied by after that cast (float32 for
            integers where no dtype is given): 1 / 255 for frames; or a dict by observation key.
        num_threads: torch threads in each actor.
        progress: show a bar.
        collector_class: what each actor runs: SyncDataCollector or "single"; or, with processes of
            its own, MultiSyncDataCollector or "sync", MultiaSyncDataCollector or "async". An entry
            of `create_env_fn` that is a list then has one entry per process.
        collector_kwargs: arguments of the actors' collectors, a dict or one per actor. A key here
            wins over a default, and is overridden by what is passed above. With processes also
            `cat_results` and `prefetch`, as these have them; async ones collect ahead of what the
            actor is asked for, also after an update of weights or the last random frame.
        num_workers_per_collector: environments per actor, stepped as a batch; with processes, as
            many of them.
        sync: wait for all actors and join their rollouts in worker order; else first ready, first
            served.
        cat_results: how sync rollouts are joined: "stack" (a new first dimension), 0 or -1.
        preemptive_threshold: from 0 to 1, where sync: once ``ceil(preemptive_threshold * B)`` of B
            actors are done, the others stop after their current step, with all their processes;
            None: they are waited for. Where they have processes of their own, `cat_results` is to
            be "stack".
        min_fraction: of these, each makes at least this part of its T steps, and at least one.
        ray_init_config: arguments of ``ray.init``; None: join the running cluster, else start one.
        remote_configs: actor options, a dict or one per actor; 1 CPU and 2 GiB by default, and 0.2
            GPUs where `policy_device`, `env_device` or `device` is a GPU.
        num_collectors: the number of actors, where `create_env_fn` is not a list.
        update_after_each_batch: sync: all actors get the policy's current weights before each
            collection; async: the actor that delivered, for its next rollout to start.
        max_weight_update_interval: an actor gets the policy's current weights at the latest after
            it delivered so many batches since it last got some.
        prefetch: rollouts per actor, running or finished, beyond the one being consumed; None: 2,
            and 0 where sync. A batch is at most ``prefetch + 1`` versions old, of those that its
            actor was given.
        max_worker_restarts: how often an actor that died is replaced by a new one; a death is
            forgotten after 100 delivered batches.
        worker_timeout: an actor that made no step for so many seconds is ended and replaced; None:
            it is waited for.
        worker_init_timeout: seconds in which an actor must have built its environments.
        restart_on_error: replace an actor whose environment or policy raised, too.
        compress: rollouts of actors on other nodes travel compressed by LZ4, leaf by leaf (extra
            `lz4`); those of this node share memory.
        start_method: of the processes that actors have, as :class:`MultiSyncDataCollector` has it.
        weight_updater: a WeightUpdaterBase of TorchRL's, or a callable that makes one: called for
            each update instead of giving the weights itself.
        weight_sync_schemes: TorchRL's, of the "policy" alone: has no effect, with a warning, but
            for a NoWeightSyncScheme, with which updates change no weights.
        weight_recv_schemes: TorchRL's, by model: bring weights from senders elsewhere.
        others: TorchRL's hints are accepted without effect; what is refused says why.

    Yields:
        TensorDicts. Async: [T] or [P, T]. Sync with B actors: "stack" [B, T] or [B, P, T];
        0: [B*T] or [B*P, T]; -1: [B*T] or [P, B*T]. Actors with W processes that are sync: [W, T]
        or [W, P, T] in the place of [T] or [P, T]. With `preemptive_threshold`, rollouts may be
        shorter, as :class:`MultiSyncDataCollector` says. The two newest batches (async: of each
        actor) may lie in shared memory, what is kept of earlier ones is private.

    Raises:
        ValueError: also for resources that the cluster does not have, and, with both numbers, for
            rollouts that memory cannot hold (of actors on this node), or the object store.
        ImportError: Ray is not installed.
    """

    @takes(_arguments)
    def __init__(self, given: Given) -> None:
        init_config = ray_check.check_init_config(given["ray_init_config"])
        self._remote_configs = given["remote_configs"]
        options = partial(self._actor_options, self._remote_configs)
        super().__init__(given, bool(given["sync"]), options, lambda _: RayEngine(init_config))

    def _with_policies(self, given: Given, workers: int) -> Given:
        """An inference service gives each actor a client."""
        policy = given["policy"]
        self._service = policy if is_inference_service(policy) else None
        if self._service is None:
            return given
        factories = client_factories(self._service, given["policy_factory"], workers)
        return given.instead(policy_factory=factories, policy=None)

    def _actor_options(
        self, remote_configs: Any, devices: Sequence[Devices]
    ) -> list[dict[str, Any]]:
        """Of actors with these devices, from that argument."""
        configs = ray_check.check_remote_configs(remote_configs, len(devices))
        check_actor_options(configs)
        return [actor_options(*pair) for pair in zip(configs, devices, strict=True)]

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Start more actors, with the arguments of the others. Blocks until they are built.

        Async they are asked for rollouts at once; sync they are part of the first batch that is
        not asked for yet, from which on every actor collects an equal share.

        Args:
            create_env_fn: one entry, or a list with one per new actor.
            num_envs: environments per actor, stepped as a batch.
            policy: of the collector's policy's parameters; None: the collector's.
            collector_kwargs: as the collector's; None: what it was given, if that is one dict.
            remote_configs: likewise.

        Returns:
            The ids of the new workers.

        Raises:
            ValueError: also for actors that deliver other things than those of a sync collector.
        """
        configs = parse.one_for_all(remote_configs, self._remote_configs)
        return self._add(
            NewWorkers(
                create_env_fn,
                num_envs,
                policy,
                collector_kwargs,
                partial(self._actor_options, configs),
            )
        )

    def update_policy_weights_(self, policy_or_weights: Any = None, **options: Any) -> None:
        """As the other collectors'; an inference service is given the weights itself, at once."""
        if self._service is not None:
            update_service(self._service, policy_or_weights)
        else:
            super().update_policy_weights_(policy_or_weights, **options)

    def async_shutdown(  # type: ignore[override]  # as TorchRL's, which differ
        self,
        shutdown_ray: bool = False,
        *,
        timeout: float | None = None,
        close_env: bool = True,
    ) -> Done:
        """As `shutdown`, with Ray where `shutdown_ray` says so.

        Returns:
            What can be awaited, as TorchRL's: it is all done by then.
        """
        self.shutdown(timeout, close_env, shutdown_ray=shutdown_ray)
        return Done()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool = False,
    ) -> None:
        """See :meth:`CollectorBase.shutdown`.

        Args:
            shutdown_ray: leave Ray, whoever joined or started it; with it go other actors that
                this process has started.

        Raises:
            TypeError: `shutdown_ray` is no bool.
        """
        if not isinstance(shutdown_ray, bool):
            raise TypeError(f"shutdown_ray: expected True or False, got {shutdown_ray!r}")
        super().shutdown(timeout, close_env, raise_on_error)
        if shutdown_ray:
            import_ray().shutdown()
