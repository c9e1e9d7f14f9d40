"""The collectors that run workers in ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
    final_observation: Literal["unknown"] | None = None,
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
    """Define the signature of all collectors on torch.distributed."""


_RPC = ("visible_devices", "tensorpipe_options")  # only for RPCDataCollector


@completed_by(RayCollector, raises=False)
class DistributedDataCollector(LaunchedCollector):
    """Collect in ranks of torch.distributed, which a launcher starts here or elsewhere.

    A worker is a rank. Each rank shares a process group with this process only. So the default
    group remains free for the program, and a rank that dies does not affect others. Batches are
    ordered by rank.

    Args:
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. Each worker gets
            a copy. ``None`` samples random actions (default: ``None``).
        frames_per_batch: Number of frames in a batch. If sync, it is divided equally among all
            workers; if async, each batch is one worker's rollout. It is rounded up with a warning
            (default: 200).
        num_threads: Number of torch threads in each worker (default: 1).
        max_weight_update_interval: Send a worker the policy's current weights at the latest after
            it has returned this many batches without an update. -1 never sends them automatically
            (default: -1).
        slurm_kwargs: For the launcher "submitit": parameters of its executor. Each rank is a job.
            ``None`` means 10 minutes, partition "train", 32 CPUs and no GPU per job. Two further
            keys are supported. "folder" is the folder for files and logs of jobs; each run creates
            a private subfolder there (default: "log_test"). "cluster" is "slurm", "local" or
            "debug", which runs jobs as child processes (default: the available one).
        backend: torch.distributed backend for messages to ranks that do not share memory with this
            process. It must support CPU tensors (default: "gloo").
        launcher: How ranks start. "submitit": as cluster jobs, by the submitit package.
            "submitit_delayed": in jobs that :class:`submitit_delayed_launcher` submitted in
            advance. "mp": as processes of this machine (default: "submitit").
        tcp_port: Port where ranks connect. ``None`` means any free port (default: ``None``).
        tcp_address: Address of this machine to which ranks connect; nothing listens at other
            addresses. Traffic is not encrypted. ``None``: loopback if all ranks are on this
            machine, else the interface that reaches other machines (default: ``None``).
        worker_init_timeout: Number of seconds in which a rank must connect and build its
            environments. With ``launcher="mp"``, time in which other programs had the CPU does not
            count (default: 120.0).
        start_method: How the launcher "mp" starts ranks, and how ranks start processes.
            "forkserver" forks them from a process that has already imported the modules they need.
            "spawn" starts new interpreters (default: "forkserver").
        ...: See RayCollector.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, this torch lacks the backend, or nothing can listen at
            `tcp_address`.
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
        """Start more ranks, and wait until they are ready.

        They have the same arguments as the first workers. An async collector uses them at once. A
        sync collector includes them in the first batch that was not requested yet, and divides
        frames equally among all workers from then on.

        Args:
            ...: See RayCollector.add_collectors.
        """
        return self._add(
            NewWorkers(create_env_fn, num_envs, policy, collector_kwargs, _launch_options)
        )


@completed_by(DistributedDataCollector)
class DistributedSyncDataCollector(DistributedDataCollector):
    """Collect in ranks of torch.distributed; each batch joins the rollouts of all ranks.

    Args:
        frames_per_batch: Number of frames in a batch of all workers. It is divided equally, rounded
            up with a warning (default: 200).
        prefetch: Number of rollouts per worker, running or finished, beyond the batch being
            consumed. A batch is at most ``prefetch + 1`` policy versions old, counting the versions
            that its worker received. ``None`` means 0 (default: ``None``).
        update_interval: Send the policy's current weights to all ranks after this many batches; 1
            sends them before each collection (default: 1).
        max_weight_update_interval: Another name for `update_interval`; the smaller of the two
            applies. -1 has no effect (default: -1).
        ...: See DistributedDataCollector.

    Yields:
        TensorDicts. For B ranks, `cat_results` "stack" gives [B, T] or [B, P, T], 0 gives [B*T] or
        [B*P, T], and -1 gives [B*T] or [P, B*T]. If ranks have W sync processes, [W, T] or
        [W, P, T] replaces [T] or [P, T].

        With `preemptive_threshold`, rollouts may be shorter. "stack" pads them with zeros; padding
        has trajectory id -1, and ("collector", "mask") is true for real frames.
    """

    @takes(rank_arguments, without=("sync", "update_after_each_batch", *_RPC))
    def __init__(self, given: Given) -> None:
        updates = check.updates_each(given["update_interval"], given["max_weight_update_interval"])
        engine = check.engine_maker(given, check.group_carrier(given["backend"]))
        LaunchedCollector.__init__(self, given.instead(**updates), True, _launch_options, engine)


def _launch_options(devices: Sequence[Devices]) -> list[dict[str, Any]]:
    """Return empty launcher options, one per rank."""
    return [{} for _ in devices]
