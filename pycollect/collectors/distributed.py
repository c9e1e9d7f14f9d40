"""The collectors that run workers in ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.arguments import check_flag
from pycollect.collectors.arguments import distributed as check
from pycollect.collectors.binding import Arguments
from pycollect.collectors.launched import LaunchedCollector
from pycollect.collectors.ray import RayCollector
from pycollect.collectors.set_up import NewWorkers, no_options
from pycollect.collectors.signatures import (
    DistributedDataCollectorSignature,
    DistributedSyncDataCollectorSignature,
)
from pycollect.docstrings import completed_by


@completed_by(RayCollector, raises=False)
class DistributedDataCollector(DistributedDataCollectorSignature, LaunchedCollector):
    """Collect in ranks of torch.distributed, which a launcher starts here or elsewhere.

    A worker is a rank. Each rank shares a process group with this process only. So the default
    group remains free for the program, and a rank that dies does not affect others. Batches are
    ordered by rank.

    Args:
        policy: A TensorDictModule, or an nn.Module or callable that takes tensors. Each worker gets
            a copy. ``None`` samples random actions.
        frames_per_batch (int = 200): Number of frames in a batch. If sync, it is divided equally
            among all workers; if async, each batch is one worker's rollout. It is rounded up with a
            warning.
        num_threads: Number of torch threads in each worker.
        max_weight_update_interval (int | None = -1): Send a worker the policy's current weights at
            the latest after it has returned this many batches without an update. -1 never sends
            them automatically.
        slurm_kwargs (Mapping[str, Any] | None = None): For the launcher "submitit": parameters of
            its executor. Each rank is a job. ``None`` means 10 minutes, partition "train", 32 CPUs
            and no GPU per job. Two further keys are supported. "folder" is the folder for files and
            logs of jobs; each run creates a private subfolder there (default: "log_test").
            "cluster" is "slurm", "local" or "debug", which runs jobs as child processes (default:
            the available one).
        backend (str = "gloo"): torch.distributed backend for messages to ranks that do not share
            memory with this process. It must support CPU tensors.
        launcher (str = "submitit"): How ranks start. "submitit": as cluster jobs, by the submitit
            package. "submitit_delayed": in jobs that :class:`submitit_delayed_launcher` submitted
            in advance. "mp": as processes of this machine.
        tcp_port (int | None = None): Port where ranks connect. ``None`` means any free port.
        tcp_address (str | None = None): Address of this machine to which ranks connect; nothing
            listens at other addresses. Traffic is not encrypted. ``None``: loopback if all ranks
            are on this machine, else the interface that reaches other machines.
        worker_init_timeout: Number of seconds in which a rank must connect and build its
            environments. With ``launcher="mp"``, time in which other programs had the CPU does not
            count.
        start_method: How the launcher "mp" starts ranks, and how ranks start processes.
            "forkserver" forks them from a process that has already imported the modules they need.
            "spawn" starts new interpreters.
        ...: See RayCollector.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, this torch lacks the backend, or nothing can listen at
            `tcp_address`.
    """

    def _make(self, given: Arguments) -> None:
        sync = check_flag("sync", given["sync"])
        engine = check.engine_maker(given, check.group_carrier(given["backend"]))
        LaunchedCollector.__init__(self, given, sync, no_options, engine)

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
        return self._add(NewWorkers(create_env_fn, num_envs, policy, collector_kwargs))


@completed_by(DistributedDataCollector)
class DistributedSyncDataCollector(DistributedSyncDataCollectorSignature, DistributedDataCollector):
    """Collect in ranks of torch.distributed; each batch joins the rollouts of all ranks.

    Args:
        frames_per_batch: Number of frames in a batch of all workers. It is divided equally, rounded
            up with a warning.
        prefetch: Number of rollouts per worker, running or finished, beyond the batch being
            consumed. A batch is at most ``prefetch + 1`` policy versions old, counting the versions
            that its worker received. ``None`` means 0.
        update_interval (int = 1): Send the policy's current weights to all ranks after this many
            batches; 1 sends them before each collection.
        max_weight_update_interval: Another name for `update_interval`; the smaller of the two
            applies. -1 has no effect.
        ...: See DistributedDataCollector.

    Yields:
        TensorDicts. For B ranks, `cat_results` "stack" gives [B, T] or [B, P, T], 0 gives [B*T] or
        [B*P, T], and -1 gives [B*T] or [P, B*T]. If ranks have W sync processes, [W, T] or
        [W, P, T] replaces [T] or [P, T].

        With `preemptive_threshold`, rollouts may be shorter. "stack" pads them with zeros; padding
        has trajectory id -1, and ("collector", "mask") is true for real frames.
    """

    def _make(self, given: Arguments) -> None:
        updates = check.updates_each(given["update_interval"], given["max_weight_update_interval"])
        engine = check.engine_maker(given, check.group_carrier(given["backend"]))
        LaunchedCollector.__init__(self, given.instead(**updates), True, no_options, engine)
