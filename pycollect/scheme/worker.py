"""What all workers of a scheme have in common, whatever they do."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from pycollect.engines.ray.session import import_ray
from pycollect.errors import warn_user
from pycollect.scheme.names import VERSION, WEIGHTS

_LOGGER = logging.getLogger(__name__)


class Worker:
    """A worker, in this process or, by :meth:`as_remote`, in a Ray actor.

    Attributes:
        index_worker: which of its set it is; 0 is the local one.
        actor: the actor that it has.
        is_remote: whether it is a Ray actor.
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
        """This class as Ray's actor class: ``cls.as_remote(...).remote(...)`` makes an actor.

        Args:
            num_cpus: cores that each actor reserves; None: Ray's default.
            num_gpus: GPUs, or a part of one.
            memory: bytes.
            object_store_memory: is not told Ray, which reserves none for actors any more; a warning
                says so.
            resources: others, by name.

        Returns:
            What ``ray.remote`` makes of the class.
        """
        if object_store_memory is not None:
            warn_user("object_store_memory: Ray reserves none for actors any more; it is ignored")
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
        """Log which worker this is, and where."""
        where = f" in a Ray actor on {self.get_node_ip()}" if self.is_remote else ""
        _LOGGER.info("created %s %d%s", type(self).__name__, self.index_worker, where)

    def get_weights(self) -> dict[str, Any]:
        """The actor's weights.

        Returns:
            Its state dict, with tensors on the CPU.
        """
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.actor.state_dict().items()
        }

    def terminate_worker(self) -> None:
        """End this Ray actor, behind what was asked of it before.

        Raises:
            RuntimeError: the worker is not in an actor.
        """
        if not self.is_remote:
            raise RuntimeError("terminate_worker: expected a worker in a Ray actor; use stop()")
        import_ray().actor.exit_actor()

    def get_node_ip(self) -> str:
        """The address of the node that it is on."""
        return str(import_ray().util.get_node_ip_address())

    def find_free_port(self) -> int:
        """A TCP port that is free on its node now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def setup_torch_data_parallel(self, url: str, rank: int, world_size: int, backend: str) -> None:
        """Join torch's default process group.

        Args:
            url: where its ranks meet.
            rank: of this process.
            world_size: how many there are.
            backend: a name that torch.distributed knows.
        """
        torch.distributed.init_process_group(
            backend=backend, init_method=url, rank=rank, world_size=world_size
        )

    @staticmethod
    def get_host() -> str:
        """The name of the node that it is on."""
        return os.uname()[1]


def resolved_weights(name: str, weights: Any) -> Any:
    """Weights with their version as a dict; a reference to such in Ray's object store is read.

    Args:
        name: of the argument.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(weights, Mapping) and type(weights).__name__ == "ObjectRef":
        weights = import_ray().get(weights)
    if not isinstance(weights, Mapping) or not {VERSION, WEIGHTS} <= set(weights):
        came = list(weights) if isinstance(weights, Mapping) else type(weights).__name__
        raise TypeError(f"{name}: expected a dict with {VERSION!r} and {WEIGHTS!r}, got {came}")
    return weights


def check_weights(name: str, weights: Any, own: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError where weights are not of the names and shapes of `own`."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"{name}: expected a dict as {WEIGHTS!r}, got {type(weights).__name__}")
    missing, unexpected = (
        sorted(one.keys() - other.keys(), key=str)
        for one, other in ((own, weights), (weights, own))
    )
    if missing or unexpected:
        raise ValueError(
            f"{name}: expected the weights that the actor has in {WEIGHTS!r}; missing: {missing}, "
            f"unexpected: {unexpected}"
        )
    for key, value in own.items():
        came = getattr(weights[key], "shape", None)
        if isinstance(value, torch.Tensor) and came != value.shape:
            shape = came if came is None else tuple(came)
            raise ValueError(f"{name}: expected {key!r} of shape {tuple(value.shape)}, got {shape}")
