"""Collectors whose workers can be on other machines: their base, and the one with Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from pycollect import checks as check
from pycollect.api import arguments as parse
from pycollect.api.arguments import dict_each
from pycollect.api.binding import Arguments
from pycollect.api.central import Central
from pycollect.api.multi import EngineMaker, MultiSyncDataCollector, ScheduledCollector
from pycollect.api.set_up import EngineOptions, SetUp, WorkerKind
from pycollect.api.signatures import RayCollectorSignature
from pycollect.arguments import check_flag, completed_by
from pycollect.compat.many_workers import ManyWorkers, Places
from pycollect.compat.torchrl import Done
from pycollect.data.devices import Devices
from pycollect.transport.ray.engine import RayEngine, actor_options, check_actor_options
from pycollect.transport.ray.session import check_amounts, import_ray


class LaunchedCollector(ScheduledCollector):
    """A collector that runs one inner collector in each worker's process.

    Args:
        engine_options: Checks the engine's options for workers with these devices.
    """

    def __init__(
        self, given: Arguments, sync: bool, engine_options: EngineOptions, engine: EngineMaker
    ) -> None:
        kind = WorkerKind.checked(given["collector_class"])
        name = "num_workers_per_collector"
        entries = kind.entries(given["create_env_fn"], given["num_collectors"], given[name], name)
        given = self._with_policies(given, len(entries))
        central = Central.of(given, len(entries), sync=sync)
        if central is not None and kind.nest is not None:
            raise ValueError(
                "collector_class: expected SyncDataCollector with inference='central', got "
                f"{given['collector_class']!r}; an actor's processes call the policy themselves"
            )
        set_up = SetUp.of(
            given,
            entries,
            engine_options,
            sync=sync,
            kind=kind,
            other_machines=True,
            central=central,
        )
        super().__init__(set_up, engine)

    def _with_policies(self, given: Arguments, workers: int) -> Arguments:
        """Return the arguments, with other policies if workers need them."""
        return given

    @property
    def num_collectors(self) -> int:
        """Number of present workers."""
        return len(self._workers)

    update_after_each_batch = ManyWorkers.update_at_each_batch

    @property
    def max_weight_update_interval(self) -> int:
        """Maximum number of a worker's batches between weight updates; -1 without a limit."""
        return self._remote.update_interval or -1

    @property
    def collected_frames(self) -> int:
        """Number of delivered frames."""
        return self._flow.statistics.frames

    @property
    def device(self) -> Places:
        """Each worker's default for the three other devices, or ``None``."""
        return tuple(devices.default for devices in self._devices_of_each)

    def local_policy(self) -> Any:
        """Return the policy that the collector was made with, by TorchRL's name.

        Returns:
            The policy in this process, not a worker's copy; ``None`` without a policy.
        """
        return self.policy


_SET_BY_COLLECTOR = {
    "max_restarts": "the collector replaces dead workers itself",
    "max_task_retries": "the collector replaces dead workers itself",
    "max_concurrency": "an actor makes one rollout after the other",
    "allow_out_of_order_execution": "an actor makes one rollout after the other",
    "lifetime": "actors end with their collector",
    "get_if_exists": "each worker needs an actor of its own",
}
"""Ray's options that `remote_configs` must not contain, and why."""


def _options_of_actors(remote_configs: Any, devices: Sequence[Devices]) -> list[dict[str, Any]]:
    """Return the checked options of actors with these devices."""
    configs = dict_each("remote_configs", remote_configs, len(devices))
    for config in configs:
        for name, why in _SET_BY_COLLECTOR.items():
            if name in config:
                raise ValueError(f"remote_configs: {name!r} cannot be set; {why}")
        check_amounts("remote_configs", config)
    names = [config["name"] for config in configs if config.get("name")]
    if len(set(names)) < len(names):
        raise ValueError(f"remote_configs: expected a different 'name' per actor, got {names}")
    check_actor_options(configs)
    return [actor_options(*pair) for pair in zip(configs, devices, strict=True)]


@completed_by(MultiSyncDataCollector, raises=False)
class RayCollector(RayCollectorSignature, LaunchedCollector):
    """Collect in Ray actors, on one machine or a cluster; each worker is an actor.

    Args:
        create_env_fn: A list with one entry per worker, or one entry that is repeated
            `num_collectors` times. An entry is a callable that returns an environment, a Gymnasium
            id, or an environment that can be pickled. A list of callables or ids as an entry makes
            a batch of P environments.
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. Each worker gets
            a copy. ``None`` samples random actions. May also be TorchRL's InferenceServer with
            service backend "ray": each worker then gets a client, and the policy stays in the
            server.
        frames_per_batch (int): Number of frames in a batch. If sync, it is divided equally among
            all workers; if async, each batch is one worker's rollout. It is rounded up with a
            warning.
        collector_class (Any = "SyncDataCollector"): What each worker runs. SyncDataCollector or
            "single" steps environments in the worker itself. MultiSyncDataCollector or "sync", and
            MultiaSyncDataCollector or "async", start processes in each worker; a list in
            `create_env_fn` then has one entry per process.
        collector_kwargs (Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None): Arguments
            for each worker's collector: a dict, or a list with one dict per worker. They replace
            defaults; an argument that is passed to this collector itself wins. If workers have
            processes, `cat_results` and `prefetch` are allowed and apply to these. Async processes
            may run ahead of the worker's requests. So they may still use old weights after an
            update, or random actions after the last random frame.
        num_workers_per_collector (int = 1): Number of environments per worker, which are stepped as
            a batch, or the number of processes if workers have them.
        sync (bool = False): Wait for all workers and join their rollouts, in the order of workers.
            If ``False``, each rollout is returned as soon as it is ready.
        cat_results: How to join the rollouts if sync: "stack" along a new first dimension, or
            concatenate along dimension 0 or -1. ``None`` means "stack".
        preemptive_threshold: If sync, share of the workers, 0 to 1, that must finish before the
            others are stopped after their current step, with all their processes. Of B workers,
            ``ceil(preemptive_threshold * B)`` must finish. If workers have processes, `cat_results`
            must be "stack". ``None`` waits for all workers.
        ray_init_config (Mapping[str, Any] | None = None): Arguments of ``ray.init``. ``None`` joins
            the running cluster, or starts one. A cluster that is started listens on the loopback
            interface, unless "_node_ip_address" is given.
        remote_configs (Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None): Ray's actor
            options: a dict, or a list with one dict per worker. By default an actor reserves 1 CPU
            and 2 GiB, and 0.2 GPUs if `policy_device`, `env_device` or `device` is a GPU.
        num_collectors: Number of workers. Required if `create_env_fn` is not a list.
        update_after_each_batch: Send the policy's current weights automatically. If sync, all
            workers get them before each batch is collected. If async, the worker that returned a
            batch gets them before its next rollout starts.
        prefetch: Number of rollouts per worker, running or finished, beyond the batch being
            consumed. A batch is at most ``prefetch + 1`` policy versions old, counting the versions
            that its worker received. ``None`` means 0 if sync and 2 if async.
        inference: With "central", workers of this node only step environments and one policy acts
            for all of them. It runs in this process if sync, as in :class:`MultiSyncDataCollector`,
            else in an inference server, as in :class:`MultiaSyncDataCollector`. Workers of other
            nodes call copies of the policy, as with ``None``. An actor there needs a GPU in
            `remote_configs` if `policy_device` is a GPU.
        worker_init_timeout: Number of seconds in which an actor must build its environments,
            including time in which other programs had the CPU.
        start_method: How workers start processes, if they have any. "forkserver" forks them from a
            process that has already imported the modules they need. "spawn" starts new
            interpreters.
        ...: See MultiSyncDataCollector.

    Yields:
        TensorDicts. If async, [T] or [P, T]. If sync with B workers, `cat_results` "stack" gives
        [B, T] or [B, P, T], 0 gives [B*T] or [B*P, T], and -1 gives [B*T] or [P, B*T]. If workers
        have W sync processes, [W, T] or [W, P, T] replaces [T] or [P, T].

        With `preemptive_threshold`, rollouts may be shorter. "stack" pads them with zeros; padding
        has trajectory id -1, and ("collector", "mask") is true for real frames.

        At most two of the batches that you hold (async: of each worker) are in shared memory. While
        you hold both, further batches are copied to private memory.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, or the cluster lacks the resources that the actors
            reserve. Also raised if a rollout does not fit into memory (on this node) or the object
            store.
        ImportError: Ray is not installed.
    """

    def _make(self, given: Arguments) -> None:
        config = given["ray_init_config"]  # None joins a running cluster
        init_config = None if config is None else check.check_named("ray_init_config", config)
        self._remote_configs = given["remote_configs"]
        options = partial(_options_of_actors, self._remote_configs)
        sync = check_flag("sync", given["sync"])
        LaunchedCollector.__init__(
            self, given, sync, options, lambda _, bell: RayEngine(init_config, bell)
        )

    def _with_policies(self, given: Arguments, workers: int) -> Arguments:
        """Replace an inference service, TorchRL's or its like, by one client factory per actor."""
        policy = given["policy"]
        client = getattr(policy, "client", None)
        if getattr(policy, "service_backend", None) != "ray" or not callable(client):
            self._service = None
            return given
        if given["policy_factory"] is not None:
            raise ValueError(
                "policy_factory: expected None together with policy; pass one of the two"
            )
        self._service = policy
        factories = [partial(ServiceClient, client()) for _ in range(workers)]
        return given.instead(policy_factory=factories, policy=None)

    @completed_by(LaunchedCollector.add_collectors)
    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Start more actors, and wait until they are ready.

        They have the same arguments as the first workers. An async collector uses them at once. A
        sync collector includes them in the first batch that was not requested yet, and divides
        frames equally among all workers from then on.

        Args:
            ...: See LaunchedCollector.add_collectors.
            remote_configs: `remote_configs` of the new workers. Defaults to ``None``: the
                collector's, if that is a single dict.
        """
        configs = parse.one_for_all(remote_configs, self._remote_configs)
        options = partial(_options_of_actors, configs)
        return self._add(create_env_fn, num_envs, policy, collector_kwargs, options)

    @completed_by(LaunchedCollector.update_policy_weights_)
    def update_policy_weights_(self, policy_or_weights: Any = None, **options: Any) -> None:
        """Send new weights to the workers, which use them from their next rollout on.

        The call returns at once, also while rollouts run; a queued rollout uses the new weights
        when it starts. If the policy is an InferenceServer, the server itself is updated before the
        call returns.

        Args:
            ...: See WeightUpdates.update_policy_weights_.
            options: `weights`, `policy`, `policy_weights`, `worker_ids`, `model_id`, `weights_dict`
                and `wait`, by name, as in :class:`SyncDataCollector`. None of them is allowed with
                an InferenceServer.
        """
        if self._service is not None:
            update_service(self._service, policy_or_weights)
            self._pace.count_update()
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
        """Close environments and end the actors; rollouts in flight are lost. Idempotent.

        Args:
            ...: See Collector.shutdown.
            shutdown_ray: Also disconnect this process from Ray, whether this collector or the
                program connected it. Other actors that the process started end too (default:
                ``False``).

        Raises:
            TypeError: `shutdown_ray` is not a bool.
        """
        if not isinstance(shutdown_ray, bool):
            raise TypeError(f"shutdown_ray: expected True or False, got {shutdown_ray!r}")
        super().shutdown(timeout, close_env, raise_on_error)
        if shutdown_ray:
            import_ray().shutdown()

    @completed_by(shutdown)
    def async_shutdown(  # type: ignore[override]  # as TorchRL's, which differ
        self, shutdown_ray: bool = False, *, timeout: float | None = None, close_env: bool = True
    ) -> Done:
        """Shut the collector down, including background collection, and wait until that is done.

        Args:
            ...: See shutdown.

        Returns:
            An awaitable, as in TorchRL. Everything is done before it is returned.
        """
        self.shutdown(timeout, close_env, shutdown_ray=shutdown_ray)
        return Done()


class ServiceClient:
    """A policy that sends each TensorDict to an inference service and returns the reply."""

    def __init__(self, client: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self._client = client

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict with the policy's outputs."""
        return self._client(tensordict)


def update_service(service: Any, weights: Any) -> None:
    """Send new weights to the service's policy, of which it has the only copy."""
    if weights is None:
        raise ValueError(
            "policy_or_weights: expected a module or weights, got None; the policy runs in "
            "another actor, so pass its new weights"
        )
    if isinstance(weights, nn.Module):
        weights = TensorDict.from_module(weights).data
    service.update_model_weights(weights)
