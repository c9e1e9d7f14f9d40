"""The collectors whose workers are ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect.arguments import check_flag
from pycollect.collectors.adding import NewWorkers
from pycollect.collectors.arguments import distributed as check
from pycollect.collectors.arguments.given import Given, takes
from pycollect.collectors.launched import LaunchedCollector
from pycollect.collectors.ray import RayCollector
from pycollect.collectors.single import SyncDataCollector
from pycollect.devices import Devices
from pycollect.docstrings import completed_by
from pycollect.envs.info import AskedInfo


def rank_arguments(
    create_env_fn: Any,
    policy: Any = None,
    *,
    frames_per_batch: int = 200,
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
    slurm_kwargs: Mapping[str, Any] | None = None,
    backend: str = "gloo",
    num_collectors: int | None = None,
    update_after_each_batch: bool = False,
    max_weight_update_interval: int | None = -1,
    update_interval: int = 1,
    launcher: str = "submitit",
    tcp_port: int | None = None,
    tcp_address: str | None = None,
    visible_devices: Sequence[Any] | None = None,
    tensorpipe_options: Mapping[str, Any] | None = None,
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
    """What collectors on torch.distributed take."""


_RPC = ("visible_devices", "tensorpipe_options")  # of RPCDataCollector alone


@completed_by(RayCollector, raises=False)
class DistributedDataCollector(LaunchedCollector):
    """Collects in ranks of torch.distributed, which a launcher starts, here or elsewhere.

    Each rank has a process group of its own with this process: none is the default group, which
    stays the program's, and a rank that dies takes no other with it. A worker is one of the ranks;
    rows of a batch are in their order.

    Args:
        policy: a TensorDictModule, an nn.Module or callable over tensors, or None for random
            actions. Each worker gets a copy.
        frames_per_batch: sync: frames of all ranks together, each collects its share, rounded up
            with a warning; async: of each rank's batch.
        collector_class: what each rank runs: SyncDataCollector or "single"; or, with processes of
            its own, MultiSyncDataCollector or "sync", MultiaSyncDataCollector or "async".
        num_workers_per_collector: environments per rank, stepped as a batch; with processes, as
            many of them.
        num_collectors: the number of ranks, where `create_env_fn` is not a list.
        slurm_kwargs: of the launcher "submitit": parameters of its executor; None: 10 minutes,
            partition "train", 32 CPUs and no GPU per job. Each job is one rank. Two are ours:
            "folder", "log_test" by default, in which each run makes a folder for the files and
            logs of its jobs that only this user can open, and "cluster", "slurm", "local" or
            "debug", whose jobs are children of this process; None: what is there.
        backend: what carries messages to ranks that share no memory with this process: "gloo", or
            another of torch's that can carry what lies in host memory.
        launcher: "submitit": jobs of a cluster, by the package of that name; "submitit_delayed":
            jobs that :class:`submitit_delayed_launcher` has submitted before; or "mp": processes of
            this machine.
        tcp_port: where ranks meet; None: any that is free.
        tcp_address: the address, of this machine, where they meet; nothing listens at another one.
            None: the loopback interface where all ranks are on this machine, else the one
            that reaches others. What arrives there is not encrypted.
        worker_init_timeout: seconds in which a rank must have come and built its environments; with
            ``launcher="mp"`` those for which other programs had the CPU do not count.
        start_method: of the ranks of the launcher "mp", and of the processes that ranks have, as
            :class:`MultiSyncDataCollector` has it.
        ...: those of :class:`RayCollector`.

    Raises:
        ValueError: also for a backend that this torch has not, and an address where nobody can
            listen.
    """

    @takes(rank_arguments, without=("update_interval", *_RPC))
    def __init__(self, given: Given) -> None:
        sync = check_flag("sync", given["sync"])
        engine = check.engine_maker(given, check.group_carrier(given["backend"]))
        super().__init__(given, sync, _launch_options, engine)

    @completed_by(RayCollector.add_collectors)
    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int = 1,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Start more ranks, with the arguments of the others. Blocks until they are built.

        Async they are asked for rollouts at once; sync they are part of the first batch that is
        not asked for yet, from which on every rank collects an equal share.

        Args:
            ...: those of :class:`RayCollector`'s.
        """
        return self._add(
            NewWorkers(create_env_fn, num_envs, policy, collector_kwargs, _launch_options)
        )


@completed_by(DistributedDataCollector)
class DistributedSyncDataCollector(DistributedDataCollector):
    """Collects in ranks of torch.distributed, in step: each batch is of all of them.

    Args:
        frames_per_batch: frames of all ranks together, each collects its share, rounded up with a
            warning.
        prefetch: rollouts per rank, running or finished, beyond the one being consumed; None: 0. A
            batch is at most ``prefetch + 1`` versions old, of those that its rank was given.
        update_interval: ranks get the policy's current weights after so many batches; 1: before
            each collection.
        max_weight_update_interval: means what `update_interval` does; the smaller number counts.
        ...: those of :class:`DistributedDataCollector`.

    Yields:
        TensorDicts. With B ranks: "stack" [B, T] or [B, P, T]; 0: [B*T] or [B*P, T]; -1: [B*T] or
        [P, B*T]. Ranks with W processes that are sync: [W, T] or [W, P, T] in the place of [T] or
        [P, T]. With `preemptive_threshold`, rollouts may be shorter; stacked, zeros with the
        trajectory id -1 follow such a one, and ("collector", "mask") is True where there is a
        frame.
    """

    @takes(rank_arguments, without=("sync", "update_after_each_batch", *_RPC))
    def __init__(self, given: Given) -> None:
        updates = check.updates_each(given["update_interval"], given["max_weight_update_interval"])
        engine = check.engine_maker(given, check.group_carrier(given["backend"]))
        LaunchedCollector.__init__(self, given.instead(**updates), True, _launch_options, engine)


def _launch_options(devices: Sequence[Devices]) -> list[dict[str, Any]]:
    """The launcher's options of ranks with these devices: none."""
    return [{} for _ in devices]
