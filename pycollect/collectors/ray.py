"""The collector that runs in Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect.arguments import check_flag
from pycollect.collectors.adding import NewWorkers
from pycollect.collectors.arguments import ray as ray_check
from pycollect.collectors.arguments import workers as parse
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.arguments.inference import Central, watched
from pycollect.collectors.arguments.kinds import WorkerKind
from pycollect.collectors.done import Done
from pycollect.collectors.launched import LaunchedCollector
from pycollect.collectors.multi import MultiSyncDataCollector
from pycollect.collectors.single import SyncDataCollector
from pycollect.devices import Devices
from pycollect.docstrings import completed_by
from pycollect.engines.protocol import Engine
from pycollect.engines.ray.engine import (
    PART_OF_A_GPU,
    RayEngine,
    actor_options,
    check_actor_options,
)
from pycollect.engines.ray.inference import client_factories, is_inference_service, update_service
from pycollect.engines.ray.servers import ServerEngine
from pycollect.engines.ray.session import import_ray
from pycollect.envs.info import AskedInfo
from pycollect.scheduler.node_servers import NodePlan
from pycollect.scheduler.options import RemoteOptions

if TYPE_CHECKING:
    from pycollect.inference.bell import ServingBell


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
    inference: str | None = None,
    min_batch_size: int | None = None,
    max_batch_size: int | None = None,
    server_timeout: float | None = None,
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


@completed_by(MultiSyncDataCollector, raises=False)
class RayCollector(LaunchedCollector):
    """Collects in Ray actors, on one machine or a cluster. A worker is one of them.

    Args:
        create_env_fn: a list with one entry per worker (a callable, a list of callables that are
            stepped as a batch, or an environment that pickles), or one entry that is repeated
            `num_collectors` times.
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions. Each worker gets a copy. Or TorchRL's InferenceServer with the service_backend
            "ray", of which each worker calls a client: its policy stays where it is.
        frames_per_batch: sync: frames of all workers together, each collects its share, rounded up
            with a warning; async: of each worker's batch.
        num_threads: torch threads in each worker.
        collector_class: what each worker runs: SyncDataCollector or "single"; or, with processes of
            its own, MultiSyncDataCollector or "sync", MultiaSyncDataCollector or "async". An entry
            of `create_env_fn` that is a list then has one entry per process.
        collector_kwargs: arguments of the workers' collectors, a dict or one per worker. A key here
            wins over a default, and is overridden by what is passed above. With processes also
            `cat_results` and `prefetch`, as these have them; async ones collect ahead of what the
            worker is asked for, also after an update of weights or the last random frame.
        num_workers_per_collector: environments per worker, stepped as a batch; with processes, as
            many of them.
        sync: wait for all workers and join their rollouts in worker order; else first ready, first
            served.
        cat_results: how sync rollouts are joined: "stack" (a new first dimension), 0 or -1.
        preemptive_threshold: from 0 to 1, where sync: once ``ceil(preemptive_threshold * B)`` of B
            workers are done, the others stop after their current step, with all their processes;
            None: they are waited for. Where they have processes of their own, `cat_results` is to
            be "stack".
        ray_init_config: arguments of ``ray.init``; None: join the running cluster, else start one.
            A cluster that is started here listens on loopback, unless "_node_ip_address" is given.
        remote_configs: Ray's options of actors, a dict or one per worker; 1 CPU and 2 GiB by
            default, and 0.2 GPUs where `policy_device`, `env_device` or `device` is a GPU.
        num_collectors: the number of workers, where `create_env_fn` is not a list.
        update_after_each_batch: sync: all workers get the policy's current weights before each
            collection; async: the worker that delivered, for its next rollout to start.
        prefetch: rollouts per worker, running or finished, beyond the one being consumed; None: 2,
            and 0 where sync. A batch is at most ``prefetch + 1`` versions old, of those that its
            worker was given.
        inference: "central": one policy acts for all workers, which only step environments. For
            those of this node it is called here where they are sync, as
            :class:`MultiSyncDataCollector` has it; else in a process beside this one, as
            :class:`MultiaSyncDataCollector`. On each other node one more actor calls a copy for
            the workers there; it is given weights as workers are, and replaced as that process is.
            None: each worker has a copy.
        worker_init_timeout: seconds in which an actor must have built its environments, whatever
            else its machine does.
        compress: rollouts of workers on other nodes travel compressed by LZ4, leaf by leaf (extra
            `lz4`); those of this node share memory.
        start_method: of the processes that workers have, where they have some: "forkserver", forks
            of a process that has imported what they need, or "spawn", new interpreters.
        ...: those of :class:`MultiSyncDataCollector`.

    Yields:
        TensorDicts. Async: [T] or [P, T]. Sync with B workers: "stack" [B, T] or [B, P, T];
        0: [B*T] or [B*P, T]; -1: [B*T] or [P, B*T]. Workers with W processes that are sync:
        [W, T] or [W, P, T] in the place of [T] or [P, T]. With `preemptive_threshold`, rollouts may
        be shorter; stacked, zeros with the trajectory id -1 follow such a one, and
        ("collector", "mask") is True where there is a frame. The two newest batches (async: of each
        worker) may lie in shared memory, what is kept of earlier ones is private.

    Raises:
        ValueError: also for resources that the cluster does not have, and, with both numbers, for
            rollouts that memory cannot hold (of workers on this node), or the object store.
        ImportError: Ray is not installed.
    """

    @takes(_arguments)
    def __init__(self, given: Given) -> None:
        init_config = ray_check.check_init_config(given["ray_init_config"])
        self._remote_configs = given["remote_configs"]
        options = partial(self._actor_options, self._remote_configs)
        self._bell: ServingBell | None = None
        engine = partial(self._engine, init_config)
        super().__init__(given, check_flag("sync", given["sync"]), options, engine)

    def _engine(self, init_config: Mapping[str, Any] | None, remote: RemoteOptions) -> RayEngine:
        return watched(self._bell, RayEngine(init_config, self._bell))

    def _central(self, given: Given, kind: WorkerKind, workers: int, sync: bool) -> Central | None:
        """Who calls the policy for so many actors, where that was asked for."""
        central = Central.of(given, workers, sync=sync)
        if central is None:
            return None
        self._bell = central.bell
        if kind.team is not None:
            raise ValueError(
                "collector_class: expected SyncDataCollector with inference='central', as actors "
                f"that have processes call the policy in these, got {given['collector_class']!r}"
            )
        return central

    def _node_plan(self, central: Central, engine: Engine) -> NodePlan:
        """On another node an actor calls it."""
        assert isinstance(engine, RayEngine)
        gpus = PART_OF_A_GPU if central.elsewhere.needs_gpu else 0
        return NodePlan(central.elsewhere.plan, ServerEngine(engine, gpus))

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

    @completed_by(LaunchedCollector.update_policy_weights_)
    def update_policy_weights_(self, policy_or_weights: Any = None, **options: Any) -> None:
        """Give workers new weights, which they take when they start their next rollout.

        It returns at once, also while rollouts run; a rollout that is queued already takes the new
        weights when it starts. An inference service, which acts for the workers, is given them
        itself, and has them when this returns.

        Args:
            ...: those of `WeightUpdates.update_policy_weights_`.
            options: by their names: `weights`, `policy`, `policy_weights`, `worker_ids`,
                `model_id`, `weights_dict` and `wait`, as :class:`SyncDataCollector` takes them. An
                inference service takes none.
        """
        if self._service is not None:
            update_service(self._service, policy_or_weights)
        else:
            super().update_policy_weights_(policy_or_weights, **options)

    @completed_by(LaunchedCollector.shutdown)
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool = False,
    ) -> None:
        """Close environments and end actors; what is in flight is lost. Idempotent.

        Args:
            ...: those of the other collectors.
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

    @completed_by(shutdown)
    def async_shutdown(  # type: ignore[override]  # as TorchRL's, which differ
        self,
        shutdown_ray: bool = False,
        *,
        timeout: float | None = None,
        close_env: bool = True,
    ) -> Done:
        """Do what `shutdown` does, which ends also what `start` began; return when it is done.

        Args:
            ...: those of `shutdown`.

        Returns:
            What can be awaited, as TorchRL's: it is all done by then.
        """
        self.shutdown(timeout, close_env, shutdown_ray=shutdown_ray)
        return Done()
