"""The arguments that only collectors on torch.distributed have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollect import checks as check
from pycollect.engines.distributed.children import ChildLauncher
from pycollect.engines.distributed.delayed import BoardLauncher, current_board
from pycollect.engines.distributed.engine import DistributedEngine, Launcher
from pycollect.engines.distributed.executors import (
    check_job_parameters,
    executor_of,
    is_of_this_machine,
)
from pycollect.engines.distributed.group_link import GroupCarrier
from pycollect.engines.distributed.groups import check_backend
from pycollect.engines.distributed.jobs import JobLauncher
from pycollect.engines.distributed.link import Carrier
from pycollect.engines.distributed.rendezvous import LOOPBACK, check_port, outside_address
from pycollect.scheduler.options import RemoteOptions

_LAUNCHERS = ("mp", "submitit", "submitit_delayed")


def group_carrier(backend: Any) -> Carrier:
    """Messages by groups of torch.distributed, with that backend.

    Raises:
        ValueError: there is none, or it cannot carry them.
    """
    return GroupCarrier(check_backend(backend))


def engine_maker(
    given: Mapping[str, Any], carrier: Carrier
) -> Callable[[RemoteOptions], DistributedEngine]:
    """Check what says how ranks start and meet; what makes the engine of it.

    Args:
        carrier: of messages to ranks.

    Raises:
        ValueError: a launcher that there is not, a port that cannot be.
    """
    launcher = check.check_choice("launcher", given["launcher"], _LAUNCHERS)
    slurm_kwargs = _check_slurm_kwargs(launcher, given["slurm_kwargs"])
    port = check_port("tcp_port", given["tcp_port"])
    address = _check_address(given["tcp_address"])
    board = current_board() if launcher == "submitit_delayed" else None

    def engine(remote: RemoteOptions) -> DistributedEngine:
        starts: Launcher = ChildLauncher(remote.start_method)
        host = LOOPBACK
        if launcher == "submitit":
            executor = executor_of("slurm_kwargs", slurm_kwargs)
            starts = JobLauncher(executor)
            host = LOOPBACK if is_of_this_machine(executor) else outside_address()
        if board is not None:
            starts = BoardLauncher(board)
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


def updates_each(update_interval: Any, max_weight_update_interval: Any) -> dict[str, Any]:
    """What other collectors are told by two arguments, of those of one in step.

    Raises:
        ValueError: `update_interval` is no positive number.
    """
    interval = check.check_positive("update_interval", update_interval)
    most = check.check_count("max_weight_update_interval", max_weight_update_interval)
    interval = min(interval, most) if most else interval
    return {
        "update_after_each_batch": interval == 1,
        "max_weight_update_interval": interval,
    }


def _check_address(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"tcp_address: expected a string or None, got {type(value).__name__}")
    return value
