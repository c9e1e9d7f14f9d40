"""Collectors whose workers are ranks of torch.distributed or processes of its RPC."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import rpc

from pycollect import checks as check
from pycollect.api.binding import Arguments
from pycollect.api.multi import EngineMaker
from pycollect.api.ray import LaunchedCollector, RayCollector
from pycollect.api.set_up import no_options
from pycollect.api.signatures import (
    DistributedDataCollectorSignature,
    DistributedSyncDataCollectorSignature,
    RPCDataCollectorSignature,
)
from pycollect.arguments import check_flag, completed_by
from pycollect.driver.options import RemoteOptions
from pycollect.transport.channel import AnyBell
from pycollect.transport.distributed.delayed import WaitingJobLauncher, current_job_folder
from pycollect.transport.distributed.engine import DistributedEngine, Launcher
from pycollect.transport.distributed.launchers import (
    ChildLauncher,
    JobLauncher,
    check_job_parameters,
    executor_of,
    is_of_this_machine,
)
from pycollect.transport.distributed.links import Carrier, GroupCarrier, check_backend
from pycollect.transport.distributed.rendezvous import LOOPBACK, check_port, outside_address

_LAUNCHERS = ("mp", "submitit", "submitit_delayed")


def engine_maker(given: Mapping[str, Any], carrier: Carrier) -> EngineMaker:
    """Check the arguments that configure how ranks start and connect."""
    launcher = check.check_choice("launcher", given["launcher"], _LAUNCHERS)
    slurm_kwargs = _check_slurm_kwargs(launcher, given["slurm_kwargs"])
    port = check_port("tcp_port", given["tcp_port"])
    address = given["tcp_address"]
    if address is not None and not isinstance(address, str):
        raise TypeError(f"tcp_address: expected a string or None, got {type(address).__name__}")
    board = current_job_folder() if launcher == "submitit_delayed" else None

    def engine(remote: RemoteOptions, _: AnyBell | None) -> DistributedEngine:
        starts: Launcher = ChildLauncher(remote.start_method)
        host = LOOPBACK
        if launcher == "submitit":
            executor = executor_of("slurm_kwargs", slurm_kwargs)
            starts = JobLauncher(executor)
            host = LOOPBACK if is_of_this_machine(executor) else outside_address()
        if board is not None:
            starts = WaitingJobLauncher(board)
            host = LOOPBACK if board.one_machine else outside_address()
        own_port = port if board is None else port or board.port
        return DistributedEngine(starts, address or host, own_port, carrier, remote.init_timeout)

    return engine


def _check_slurm_kwargs(launcher: str, value: Any) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if launcher != "submitit":
        raise ValueError(
            f"slurm_kwargs: expected None with the launcher {launcher!r}, got {value!r}"
        )
    return check_job_parameters("slurm_kwargs", value)


_DEFAULTS: dict[str, Any] = {"num_worker_threads": 16, "rpc_timeout": 0, "_transports": ["uv"]}
_KNOWN = (*_DEFAULTS, "_channels")


def carrier(given: Mapping[str, Any]) -> Carrier:
    """Check the arguments about messages, and return their carrier."""
    if not rpc.is_available():
        raise ValueError(
            "RPCDataCollector: this build of torch has no torch.distributed.rpc; use "
            "DistributedDataCollector"
        )
    check_backend(given["backend"])
    options = check_tensorpipe_options(given["tensorpipe_options"])
    # Imported late, because the import fails without RPC.
    from pycollect.transport.distributed.rpc_link import RpcCarrier

    return RpcCarrier(options)


def check_tensorpipe_options(value: Any) -> dict[str, Any]:
    """Check the options and return all, with defaults."""
    if not isinstance(value, Mapping | None):
        raise TypeError(f"tensorpipe_options: expected a dict or None, got {type(value).__name__}")
    options = {**_DEFAULTS, **(value or {})}
    if unknown := [name for name in options if name not in _KNOWN]:
        raise ValueError(f"tensorpipe_options: expected keys among {list(_KNOWN)}, got {unknown}")
    if flags := [name for name, own in options.items() if isinstance(own, bool)]:
        raise ValueError(
            f"tensorpipe_options: expected no bool for {flags}, got {dict(value or {})}"
        )
    try:
        rpc.TensorPipeRpcBackendOptions(**options)
    except (TypeError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"tensorpipe_options: TensorPipe refused {options}: {text}") from error
    return options


def check_visible_devices(value: Any, ranks: int) -> None:
    """Raise TypeError or ValueError unless there is one device per rank; warn about GPUs."""
    if value is None:
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"visible_devices: expected a list or None, got {type(value).__name__}")
    if len(value) != ranks:
        raise ValueError(
            f"visible_devices: expected one device per rank ({ranks}), got {len(value)}"
        )
    try:
        numbers = [("cuda", number) if isinstance(number, int) else (number,) for number in value]
        devices = [torch.device(*number) for number in numbers]
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"visible_devices: expected devices, got {value!r}: {text}") from error
    if any(device.type != "cpu" for device in devices):
        warnings.warn(
            "visible_devices: has no effect, because rollouts are sent through host memory; choose "
            "the device of batches with storing_device",
            UserWarning,
            stacklevel=2,
        )


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
        engine = engine_maker(given, GroupCarrier(check_backend(given["backend"])))
        LaunchedCollector.__init__(self, given, sync, no_options, engine)


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
        name = "max_weight_update_interval"
        interval = check.check_positive("update_interval", given["update_interval"])
        interval = min(interval, check.check_count(name, given[name]) or interval)
        updates = {"update_after_each_batch": interval == 1, name: interval}
        engine = engine_maker(given, GroupCarrier(check_backend(given["backend"])))
        LaunchedCollector.__init__(self, given.instead(**updates), True, no_options, engine)


@completed_by(DistributedDataCollector, raises=False)
class RPCDataCollector(RPCDataCollectorSignature, DistributedDataCollector):
    """Collect in ranks that torch.distributed.rpc calls.

    A launcher starts the ranks on this machine or on others. Ranks that can open this process's
    memory write into the batch directly, as in :class:`DistributedDataCollector`. RPC carries
    requests and replies. Only this process calls the ranks, without a process group of all of them,
    so a rank that dies can be replaced.

    torch allows one RPC agent per process. If the program called `init_rpc` before the collector
    contacts ranks, its agent is used. Otherwise the collector creates an agent, which all
    collectors of this process share. Until the last of them is closed, `init_rpc` raises.

    Args:
        backend: Accepted and checked for compatibility with TorchRL. Weights also travel through
            RPC.
        visible_devices (Sequence[Any] | None = None): For compatibility with TorchRL: one device
            per rank. The devices are checked but not used, because rollouts travel in host memory
            and `storing_device` places the batches. A GPU gives a warning.
        tensorpipe_options (Mapping[str, Any] | None = None): Options of
            `TensorPipeRpcBackendOptions`: "num_worker_threads" (default: 16); "rpc_timeout",
            seconds in which a message must arrive, 0 for no limit (default: 0, because
            `worker_timeout` sets one); "_transports" (default: ["uv"]); and "_channels".
        tcp_address: Address of this machine to which ranks connect, and on which the agents of
            ranks listen, at any free port. torch executes its built-in operators for every process
            that connects there, but Python functions only if the call is signed. This process's own
            agent listens on the loopback interface. ``None``: loopback if all ranks are on this
            machine, else the interface that reaches other machines.
        ...: See DistributedDataCollector.

    Raises:
        TypeError: An argument has the wrong type or an unknown name, or cannot be pickled.
        ValueError: An argument is invalid, nothing can listen at `tcp_address`, TensorPipe does not
            know an option, or this torch was built without RPC.
    """

    def _make(self, given: Arguments) -> None:
        def options(devices: Sequence[Any]) -> list[Mapping[str, Any]]:
            check_visible_devices(given["visible_devices"], len(devices))
            return no_options(devices)

        engine = engine_maker(given, carrier(given))
        LaunchedCollector.__init__(self, given, check_flag("sync", given["sync"]), options, engine)
