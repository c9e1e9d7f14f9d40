"""Methods that all workers of a scheme share."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from pycollect.errors import warn_user
from pycollect.scheme.names import VERSION, WEIGHTS
from pycollect.transport.ray.session import import_ray

_LOGGER = logging.getLogger(__name__)


class Worker:
    """A worker in this process or, through :meth:`as_remote`, in a Ray actor.

    Attributes:
        index_worker: Index of the worker in its set; 0 is the local one.
        actor: The worker's actor.
        is_remote: Whether the worker is a Ray actor.
    """

    is_remote: ClassVar[bool] = False

    def __init__(self, index_worker: int) -> None:
        self.index_worker = index_worker
        self.actor: Any = None

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        object_store_memory: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> Any:
        """Return this class as a Ray actor class.

        ``cls.as_remote(...).remote(...)`` makes an actor.

        Args:
            num_cpus: Number of CPUs that each actor reserves. Defaults to ``None``: Ray's default.
            num_gpus: Number of GPUs, which may be a fraction. Defaults to ``None``: Ray's default.
            memory: Memory in bytes. Defaults to ``None``: Ray's default.
            object_store_memory: Ignored with a warning, because Ray no longer reserves any for
                actors (default: ``None``).
            resources: Custom resources by name (default: ``None``).

        Returns:
            The result of ``ray.remote`` for this class.
        """
        if object_store_memory is not None:
            warn_user("object_store_memory: ignored, because Ray no longer reserves it for actors")
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "memory": memory,
            "resources": None if resources is None else dict(resources),
        }
        there = type(cls.__name__, (cls,), {"is_remote": True, "__doc__": cls.__doc__})
        return import_ray().remote(
            **{name: value for name, value in options.items() if value is not None}
        )(there)

    def print_worker_info(self) -> None:
        """Log the worker's name and node."""
        where = f" in a Ray actor on {self.get_node_ip()}" if self.is_remote else ""
        _LOGGER.info("created %s %d%s", type(self).__name__, self.index_worker, where)

    def get_weights(self) -> dict[str, Any]:
        """Return the actor's weights.

        Returns:
            The state dict, with tensors on the CPU.
        """
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.actor.state_dict().items()
        }

    def terminate_worker(self) -> None:
        """End this Ray actor after all earlier calls.

        Raises:
            RuntimeError: The worker is not a Ray actor.
        """
        if not self.is_remote:
            raise RuntimeError("terminate_worker: this worker is not a Ray actor; call stop()")
        import_ray().actor.exit_actor()

    def get_node_ip(self) -> str:
        """Return the IP address of the worker's node."""
        return str(import_ray().util.get_node_ip_address())

    def find_free_port(self) -> int:
        """Return a TCP port that is currently free on the worker's node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def setup_torch_data_parallel(self, url: str, rank: int, world_size: int, backend: str) -> None:
        """Join torch's default process group.

        Args:
            url: `init_method` of the group.
            rank: Rank of this process.
            world_size: Number of ranks.
            backend: Backend of torch.distributed.
        """
        torch.distributed.init_process_group(
            backend=backend, init_method=url, rank=rank, world_size=world_size
        )

    @staticmethod
    def get_host() -> str:
        """Return the host name of the worker's node."""
        return os.uname()[1]


def resolved_weights(name: str, weights: Any) -> Any:
    """Return weights with their version as a dict; a Ray object reference is fetched first.

    Args:
        name: Name of the argument.

    Raises:
        TypeError: The value is neither.
    """
    if not isinstance(weights, Mapping) and type(weights).__name__ == "ObjectRef":
        weights = import_ray().get(weights)
    if not isinstance(weights, Mapping) or not {VERSION, WEIGHTS} <= set(weights):
        came = list(weights) if isinstance(weights, Mapping) else type(weights).__name__
        raise TypeError(f"{name}: expected a dict with {VERSION!r} and {WEIGHTS!r}, got {came}")
    return weights


def check_weights(name: str, weights: Any, own: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if names or shapes of weights differ from `own`."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name}: expected a dict for {WEIGHTS!r}, got {type(weights).__name__}")
    missing, unexpected = (
        sorted(one.keys() - other.keys(), key=str)
        for one, other in ((own, weights), (weights, own))
    )
    if missing or unexpected:
        raise ValueError(
            f"{name}: expected the actor's weights in {WEIGHTS!r}; missing: {missing}, "
            f"unexpected: {unexpected}"
        )
    for key, value in own.items():
        came = getattr(weights[key], "shape", None)
        if isinstance(value, torch.Tensor) and came != value.shape:
            shape = came if came is None else tuple(came)
            raise ValueError(f"{name}: expected {key!r} of shape {tuple(value.shape)}, got {shape}")
