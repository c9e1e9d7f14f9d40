"""Base classes: a worker, and a set of a local worker and remote ones in Ray actors."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from pycollect.checks import check_count, check_integer, check_positive
from pycollect.errors import WorkerDied, WorkerError, warn_user
from pycollect.scheme.names import VERSION, WEIGHTS, device_here, device_of
from pycollect.transport.ray.session import (
    SESSION,
    call_when_freed,
    check_amounts,
    check_resources,
    end_of,
    import_ray,
)

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
        given = {name: value for name, value in options.items() if value is not None}
        there = type(cls.__name__, (cls,), {"is_remote": True, "__doc__": cls.__doc__})
        return import_ray().remote(**given)(there)

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
    """Return weights with their version as a dict; a Ray object reference is fetched first."""
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


default_remote_config: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 0.2,
    "memory": 5 * 1024**3,
    "object_store_memory": 2 * 1024**3,
}
"""Default resources of a remote worker, as in PyTorchRL."""

_STOP_SECONDS = 10.0  # grace period of remote workers before they are killed
_STILL_SECONDS = 60.0  # between two warnings that workers are not ready yet


S = TypeVar("S", bound="WorkerSet")


class WorkerSet:
    """A local worker and, if two or more are requested, remote workers in Ray actors.

    Ray is joined or started when the first remote worker is made.

    Attributes:
        worker_class: Class of all workers.
        remote_config: Resources that each remote worker reserves.
        worker_params: Keyword arguments of the workers.
        num_workers: Number of remote workers; with 0 or 1 the local worker does the work.

    Args:
        worker: A subclass of :class:`Worker`.
        worker_params: Keyword arguments of the class, except `index_worker`.
        index_parent_worker: Index of the worker that this set works for.
        worker_remote_config: Resources of each remote worker: arguments of `Worker.as_remote`.
            Missing ones come from `default_remote_config`, except `num_gpus` on a CPU.
        num_workers: Number of remote workers; with 0 or 1 the local worker does the work (default:
            1).
        local_device: Device of the local worker, "cpu" or "cuda:number". ``None`` means CUDA if it
            is available. If it is a GPU, remote workers reserve a part of one (default: ``None``).
        initial_weights: Initial weights of the local worker, which passes them to the others.
            Defaults to ``None``: the actor's own.
        add_local_worker: Whether to make a local worker (default: ``True``).
        total_parent_workers: Number of parents, each with its own set (default: ``None``).

    Raises:
        ValueError: The cluster lacks the resources that the workers reserve.
        WorkerError: A remote worker could not be made. The others are ended.
    """

    def __init__(
        self,
        worker: type[Worker],
        worker_params: dict[str, Any],
        index_parent_worker: int,
        worker_remote_config: Mapping[str, Any] = default_remote_config,
        num_workers: int = 1,
        local_device: Any = None,
        initial_weights: Any = None,
        add_local_worker: bool = True,
        total_parent_workers: int | None = None,
    ) -> None:
        self._process = os.getpid()
        self.worker_class = worker
        self.num_workers = check_count("num_workers", num_workers)
        self.worker_params = worker_params
        self.remote_config = _remote_config(worker_remote_config, local_device)
        self._index_parent = check_integer("index_parent", index_parent_worker)
        self._total_parents = check_count("total_parent_workers", total_parent_workers)
        self._remote_workers: list[Any] = []
        self._session: weakref.finalize[Any, Any] | None = None
        self._local_worker: Any = None
        if add_local_worker:
            device_here("local_device", local_device)
            params = {**worker_params, "device": local_device, "initial_weights": initial_weights}
            self._local_worker = worker(index_worker=0, **self._local_params(params))
        try:
            if self.num_workers > 1:
                self._add(self.num_workers)
        except BaseException:
            self.stop()
            raise

    def _local_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def __enter__(self: S) -> S:
        """Return the set itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the workers."""
        self.stop()

    def local_worker(self) -> Any:
        """Return the worker in this process.

        Returns:
            The worker itself, or ``None`` without a local worker.
        """
        return self._local_worker

    def remote_workers(self) -> list[Any]:
        """Return the workers in Ray actors.

        Returns:
            Ray's actor handles, in the order of their indices, which start at 1. Call their methods
            as ``worker.collect_data.remote()``.
        """
        return self._remote_workers

    def add_workers(self, num_workers: int) -> None:
        """Make more remote workers, which start with the local worker's weights.

        Args:
            num_workers: Number of additional workers.
        """
        self._add(check_positive("num_workers", num_workers))
        self.num_workers = len(self._remote_workers)

    def _add(self, count: int) -> None:
        if self._session is None:  # join or start Ray, until `stop` or the end of this object
            SESSION.enter(None)
            self._session = call_when_freed(self, SESSION.leave)
        there = len(self._remote_workers)
        check_resources("worker_remote_config", [self.remote_config] * (there + count))
        self._remote_workers += self._made(range(there + 1, there + count + 1))

    def _made(self, indices: Sequence[int]) -> list[Any]:
        if self._local_worker is not None:
            self.worker_params["initial_weights"] = import_ray().put(self._weights())
        made_by = self.worker_class.as_remote(**self.remote_config).remote
        made = [made_by(index_worker=index, **self.worker_params) for index in indices]
        ready = {
            worker.__ray_ready__.remote(): index
            for worker, index in zip(made, indices, strict=True)
        }
        try:
            _await(ready)
        except BaseException:
            for worker in made:
                import_ray().kill(worker)
            raise
        return made

    def _weights(self) -> dict[str, Any]:
        local = self._local_worker
        return {VERSION: getattr(local, "actor_version", 0), WEIGHTS: local.get_weights()}

    def stop(self) -> None:
        """Finish current calls, close environments, and end the remote workers. Idempotent.

        Workers that need more than ten seconds are killed.
        """
        if os.getpid() != self._process:  # a fork must not end its parent's workers
            return
        if hasattr(self._local_worker, "stop"):
            self._local_worker.stop()
        workers, self._remote_workers = self._remote_workers, []
        if workers and import_ray().is_initialized():
            _end(workers)
        if self._session is not None and self._session.detach():
            SESSION.leave()


def _remote_config(given: Mapping[str, Any], local_device: Any) -> dict[str, Any]:
    argument = "worker_remote_config"
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}: expected a dict, got {type(given).__name__}")
    known = {*default_remote_config, "resources"}
    if not known >= set(given):
        raise ValueError(
            f"{argument}: expected keys from {sorted(known)}, got {sorted(map(str, given))}"
        )
    check_amounts(argument, given)
    if given is not default_remote_config and given.get("object_store_memory") is not None:
        warn_user(
            f"{argument}: 'object_store_memory' is ignored, because Ray no longer reserves it for "
            "actors"
        )
    config = {**default_remote_config, **given, "object_store_memory": None}
    if device_of("local_device", local_device).type == "cpu":
        config["num_gpus"] = None
    return config


def _await(ready: dict[Any, int]) -> None:
    """Wait until all workers are made; raise the first error."""
    ray = import_ray()
    while ready:
        done, _ = ray.wait(list(ready), timeout=_STILL_SECONDS)
        if not done:
            warn_user(f"workers {sorted(ready.values())} are not built yet; still waiting for them")
        for reference in done:
            index = ready.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                raise lost(index, error) from error


def lost(index: int, error: Exception) -> WorkerError:
    """Return the error for a remote worker that ended."""
    end = end_of(error)
    return WorkerDied(f"worker {index} died: {end.summary}", index, 0, end.details)


def _end(workers: Sequence[Any]) -> None:
    ray = import_ray()
    ends = []
    for worker in workers:
        if hasattr(worker, "stop"):
            worker.stop.remote()
        ends.append(worker.__ray_terminate__.remote())
    ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS)
    for worker in workers:
        ray.kill(worker)
