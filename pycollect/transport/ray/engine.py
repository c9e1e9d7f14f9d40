"""Start Ray actors, wait for them, and end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.data.devices import Devices
from pycollect.transport.bells import AnyBell, ThreadBell
from pycollect.transport.channel import MAX_REQUESTS
from pycollect.transport.engine import check_available, too_many_bytes
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.pickling import pickled_spec
from pycollect.transport.process import has_pidfd
from pycollect.transport.ray.actor import ActorProcess, RayWorker
from pycollect.transport.ray.session import SESSION, call_when_freed, check_resources, import_ray
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.spec import WorkerSpec


@dataclass(frozen=True)
class DriverAddress:
    """The driver's node and bell.

    Attributes:
        node: Ray's id of the driver's node.
        bell: Bell that workers ring if they share memory with the driver, and that rings when a
            call is answered. A ThreadBell if this process cannot share memory.
    """

    node: str
    bell: AnyBell


def driver_address(ray: Any, bell: AnyBell | None) -> DriverAddress:
    """Return this process's node and bell.

    Args:
        ray: The module `ray`.
        bell: Bell that workers are to ring. ``None`` creates one.

    Raises:
        SharedMemoryError: Workers cannot ring the bell.
    """
    why_not = shared_memory_why_not()
    if not why_not and not has_pidfd():
        why_not = "this system does not support process file descriptors (pidfd)"
    if why_not and bell is not None:
        raise SharedMemoryError(why_not)
    bell_or_new = bell or (ThreadBell() if why_not else Bell())
    return DriverAddress(ray.get_runtime_context().get_node_id(), bell_or_new)


def start_actor(
    spec: WorkerSpec, policy: SharedValue, process: ActorProcess, driver: DriverAddress
) -> WorkerHandle:
    """Ask an actor to build a worker and serve a mailbox of this process, if it has one.

    Args:
        spec: Specification of the worker.
        policy: Pickled policy or policy factory.
        process: The actor.
        driver: Address of this process.
    """
    bell, mailbox = driver.bell, None
    if bell.address is not None:
        mailbox = Mailbox(MAX_REQUESTS)
        process.serve(driver.node, mailbox.address, bell.address)
    return WorkerHandle(spec, pickled_spec(spec), policy, mailbox, process, bell)


DEFAULT_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}

PART_OF_A_GPU = 0.2
"""Number of GPUs that an actor reserves if it uses a GPU."""


class RayEngine:
    """Starts workers as actors of Ray, which it joins or starts for one collector.

    Args:
        init_config: Arguments of ``ray.init``. ``None`` joins the running cluster or starts one.
        bell: Bell that actors of this node ring. ``None`` creates one (default: ``None``).

    Raises:
        SharedMemoryError: Actors cannot ring the bell.
    """

    def __init__(self, init_config: Mapping[str, Any] | None, bell: AnyBell | None = None) -> None:
        SESSION.enter(init_config)
        self._ray = import_ray()
        # This also covers a collector that is dropped without shutdown().
        self._session = call_when_freed(self, SESSION.leave)
        self._driver = driver_address(self._ray, bell)
        self.bell = self._driver.bell

    def leave(self) -> None:
        """Shut Ray down if a collector started it and this was the last one. Idempotent."""
        if self._session.detach():
            SESSION.leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError, naming the resource, if the actors need more than the cluster has."""
        check_resources("remote_configs", options)

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if memory, or the object store, cannot hold that many bytes."""
        if in_place:
            check_available(needed)
            return
        capacity = int(self._ray.cluster_resources().get("object_store_memory", 0))
        if needed > capacity:
            raise too_many_bytes(needed, f"the object store has {capacity}")

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share."""
        return SharedValue(value, self._ray.put)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start the actor of one worker, which builds its environments at once.

        Args:
            spec: Specification of the worker.
            policy: Pickled policy or policy factory.
            options: Options of the actor.
        """
        actor = _actor_class().options(**options).remote()
        process = ActorProcess(self._ray, actor, self._driver.bell)
        try:
            return start_actor(spec, policy, process, self._driver)
        except BaseException:
            process.kill()
            raise


def _actor_class() -> Any:
    return import_ray().remote(concurrency_groups={"control": 1})(RayWorker)


def check_actor_options(configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if Ray does not accept the options of an actor."""
    for config in configs:
        try:
            _actor_class().options(**actor_options(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"remote_configs: {error}") from error


def actor_options(
    config: Mapping[str, Any] | None, devices: Devices | None = None
) -> dict[str, Any]:
    """Return the options of one actor: the defaults, overridden by the caller's.

    Args:
        config: Options from the caller.
        devices: Devices of the worker; an actor whose worker uses a GPU reserves a part of one.
    """
    uses_gpu = devices is not None and "cuda" in devices.worker_types
    gpus = PART_OF_A_GPU if uses_gpu else 0
    return {**DEFAULT_ACTOR_OPTIONS, "num_gpus": gpus, **(config or {})}
