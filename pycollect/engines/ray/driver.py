"""Where the driver is, as actors are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycollect._core import Bell, shared_memory_why_not
from pycollect.engines.other_process import has_pidfd
from pycollect.engines.waiting import Rung, ThreadBell


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver is.

    Attributes:
        node: Ray's id of its node.
        bell: what workers ring that share memory with it, and Ray for what it has to say. A Bell,
            unless this process cannot share memory with any other.
    """

    node: str
    bell: Rung


def driver_address(ray: Any) -> DriverAddress:
    """Where this process is."""
    shares = not shared_memory_why_not() and has_pidfd()
    bell = Bell() if shares else ThreadBell()
    return DriverAddress(ray.get_runtime_context().get_node_id(), bell)
