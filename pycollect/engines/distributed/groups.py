"""Process groups of two, the driver and one rank, that are nobody's default group.

A rank that dies takes no other group with it, and a program that trains with torch.distributed
has its default group for itself.

Weights are therefore sent to each rank, not broadcast: a broadcast needs a group of all ranks,
which does not outlive the death of one, and a moment at which all take part.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

DRIVER, WORKER = 0, 1
"""The ranks in each group."""

_CONNECT_SECONDS = 30.0  # both are there already

BACKENDS = ("gloo", "nccl", "mpi", "ucc")


def check_backend(name: Any) -> str:
    """Return the name of a backend that can carry messages.

    Raises:
        ValueError: The name is unknown, torch was built without it, or it cannot carry messages.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {name!r}")
    backend = str(name)
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        raise ValueError(f"backend: this torch was built without {backend!r}; use 'gloo'")
    if backend in ("nccl", "mpi"):
        raise ValueError(
            f"backend: expected 'gloo' or 'ucc', got {backend!r}; NCCL cannot send rollouts from "
            "host memory, and MPI cannot add ranks one by one"
        )
    return backend


def group_of_two(backend: str, store: Any, rank: int, host: str) -> Any:
    """The group of the driver and one worker. Waits for the other one.

    Args:
        store: through which both find each other; it must not believe another process.
        host: the address of this rank's own interface; it listens there alone.

    Raises:
        RuntimeError: they have not.
    """
    limit = timedelta(seconds=_CONNECT_SECONDS)
    if backend == "ucc":
        return dist.ProcessGroupUCC(store, rank, 2, limit)
    kind: Any = dist.ProcessGroupGloo  # whose stub lacks its options
    options = kind._Options()
    options._timeout = limit
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, 2, options)
