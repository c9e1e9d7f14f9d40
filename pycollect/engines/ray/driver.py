"""Where the driver is, as actors are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycollect._core import Bell, SharedMemoryError, shared_memory_why_not
from pycollect.engines.other_process import has_pidfd
from pycollect.engines.waiting import SharedBell, ThreadBell


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver is.

    Attributes:
        node: Ray's id of its node.
        bell: what workers ring that share memory with it, and Ray for what it has to say; a
            ThreadBell where this process cannot share memory with any other.
    """

    node: str
    bell: SharedBell | ThreadBell


def driver_address(ray: Any, bell: SharedBell | None) -> DriverAddress:
    """Where this process is.

    Args:
        bell: that workers are to ring; None: one of its own.

    Raises:
        SharedMemoryError: they cannot ring it.
    """
    why_not = shared_memory_why_not()
    if not why_not and not has_pidfd():
        why_not = "this system does not support process file descriptors (pidfd)"
    if why_not and bell is not None:
        raise SharedMemoryError(why_not)
    own = bell or (ThreadBell() if why_not else Bell())
    return DriverAddress(ray.get_runtime_context().get_node_id(), own)
