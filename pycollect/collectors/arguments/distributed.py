"""The arguments that only collectors on torch.distributed have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollect import checks as check
from pycollect.engines.distributed.children import ChildLauncher
from pycollect.engines.distributed.engine import DistributedEngine
from pycollect.engines.distributed.groups import check_backend
from pycollect.engines.distributed.rendezvous import LOOPBACK
from pycollect.scheduler.options import RemoteOptions

_LAUNCHERS = ("mp",)


def engine_maker(given: Mapping[str, Any]) -> Callable[[RemoteOptions], DistributedEngine]:
    """Check what says how ranks start and meet; what makes the engine of it.

    Raises:
        ValueError: a launcher or backend that there is not, a port that cannot be.
    """
    launcher = check.check_choice("launcher", given["launcher"], _LAUNCHERS)
    if given["slurm_kwargs"] is not None:
        raise ValueError(f"slurm_kwargs: expected None with the launcher {launcher!r}")
    backend = check_backend(given["backend"])
    port = _check_port(given["tcp_port"])
    host = _check_address(given["tcp_address"])

    def engine(remote: RemoteOptions) -> DistributedEngine:
        return DistributedEngine(
            ChildLauncher(), host or LOOPBACK, port, backend, remote.init_timeout
        )

    return engine


def _check_port(value: Any) -> int:
    """A port to listen at; 0: any that is free."""
    if value is None:
        return 0
    port = check.check_integer("tcp_port", value)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"tcp_port: expected a number from 0 to 65535, or None, got {port}")
    return port


def _check_address(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"tcp_address: expected a string or None, got {type(value).__name__}")
    return value
