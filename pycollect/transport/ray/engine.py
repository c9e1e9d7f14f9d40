"""Start actors of Ray, wait for them, and end them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.data.devices import Devices
from pycollect.errors import result_of
from pycollect.transport.call_handle import CallHandle
from pycollect.transport.messages import WorkerSpec, pickled_spec
from pycollect.transport.process import H, NodePolicies, has_pidfd
from pycollect.transport.processes.handle import MailboxHandle
from pycollect.transport.processes.serve import MAX_REQUESTS
from pycollect.transport.ray.actor import Actor, ActorMonitor, RayWorker
from pycollect.transport.ray.servers import ServerActor, ServerHandle, server_handle
from pycollect.transport.ray.session import SESSION, call_when_freed, check_resources, import_ray
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.starting import StartingHandle
from pycollect.transport.waiting import (
    AnswerWaiter,
    AwaitedWorker,
    SharedBell,
    ThreadBell,
    check_available,
    too_many_bytes,
)


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


PolicyAt = Callable[[str, WorkerSpec], "bytes | None"]
"""What stands for the policy in a worker on a node, as `NodePolicies.policy_at` tells it."""


def starting_actor(
    spec: WorkerSpec,
    policy: SharedValue,
    actor: Actor,
    driver: DriverAddress,
    policy_at: PolicyAt | None = None,
) -> StartingHandle:
    """An actor that is asked to serve a mailbox of this process, else by calls of Ray.

    Args:
        policy: the pickled policy or its factory.
        policy_at: what it gets instead on another node; None: the same.
    """
    served = None
    if not isinstance(driver.bell, ThreadBell):
        mailbox = Mailbox(MAX_REQUESTS)
        serving = actor.serve(driver.node, mailbox.address, driver.bell.address)
        monitor = ActorMonitor(actor, serving)
        pickled = pickled_spec(spec)
        served = MailboxHandle(spec, pickled, policy, mailbox, driver.bell, monitor), monitor
    if policy_at is None or served is None:
        return StartingHandle(
            actor.handle, driver.bell, served, lambda: CallHandle(spec, policy, actor)
        )
    elsewhere = _Elsewhere(spec, policy, actor, driver.node, policy_at)
    return StartingHandle(actor.handle, driver.bell, served, elsewhere)


class _Elsewhere:
    """Asks an actor where it is, and makes its handle once its policy is there.

    Args:
        policy: that it gets where it is on the driver's node after all.
    """

    def __init__(
        self, spec: WorkerSpec, policy: SharedValue, actor: Actor, here: str, policy_at: PolicyAt
    ) -> None:
        self._spec, self._policy, self._actor = spec, policy, actor
        self._here, self._policy_at = here, policy_at
        self._located: Future[str] | None = None

    def __call__(self) -> CallHandle | None:
        """The handle; None: not yet."""
        if self._located is None:
            self._located = self._actor.node()
        if not self._located.done():
            return None
        node = self._node(self._located)
        if node == self._here:
            return CallHandle(self._spec, self._policy, self._actor)
        own = self._policy_at(node, self._spec)
        if own is None:
            return None
        return CallHandle(self._spec, SharedValue(own, lambda value: value), self._actor)

    def _node(self, located: Future[str]) -> str:
        try:
            return str(result_of(located))
        except Exception as error:
            process_end = self._actor.process_end(error)
            if process_end is None:
                raise
            raise process_end.death_of(self._spec) from error


DEFAULT_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}

PART_OF_A_GPU = 0.2
"""That an actor asks for which uses one."""


class RayEngine:
    """Ray, joined or started for one collector.

    Args:
        init_config: arguments of ``ray.init``; None: join the running cluster, else start one.
        bell: that actors of this node ring, and on which is waited for them; None: one of its own.

    Raises:
        SharedMemoryError: they cannot ring it.
    """

    def __init__(
        self, init_config: Mapping[str, Any] | None, bell: SharedBell | None = None
    ) -> None:
        SESSION.enter(init_config)
        self._ray = import_ray()
        # Also for a collector that is dropped without shutdown().
        self._session = call_when_freed(self, SESSION.leave)
        self._driver = driver_address(self._ray, bell)
        self._waiter = AnswerWaiter(self._driver.bell)
        self._started: WeakSet[StartingHandle] = WeakSet()
        self._policies: weakref.ref[NodePolicies] | None = None

    def leave(self) -> None:
        """Shut Ray down if a collector started it and this was the last one. Idempotent."""
        if self._session.detach():
            SESSION.leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError that names a resource of which the cluster has too little in total."""
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
        """A value for several of these workers."""
        return SharedValue(value, self._ray.put)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start the actor of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
            options: the actor's options.
        """
        handle = _actor_class().options(**options).remote()
        actor = Actor(self._ray, handle, self._driver.bell)
        own = self._policies
        elsewhere = None if own is None else partial(_policy_at, own, options)
        try:
            started = starting_actor(spec, policy, actor, self._driver, elsewhere)
        except BaseException:
            actor.kill()
            raise
        self._started.add(started)
        return started

    def set_node_policies(self, policies: NodePolicies) -> None:
        """Workers on other nodes get their policy from there. It may hold this, not this it."""
        self._policies = weakref.ref(policies)

    def start_server(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start an actor that calls the policy for workers of another node.

        Args:
            policy: the pickled policy or its factory.
            options: as `ServerEngine.server_options` tells them.
        """
        actor = ServerActor(self._ray, server_handle(options), self._driver.bell)
        by_calls = partial(ServerHandle, spec, policy, actor)
        return StartingHandle(actor.handle, self._driver.bell, None, by_calls)

    @property
    def pending(self) -> int:
        """How many actors of this node were asked for something and have not answered yet."""
        return sum(own.has_pending_requests for own in self._started)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        if sys.is_finalizing():  # Ray ends its processes by itself, and nothing can be imported
            return
        if self._ray.is_initialized():
            self._waiter.wait_closed(handles, timeout)


def _policy_at(
    policies: weakref.ref[NodePolicies], options: Mapping[str, Any], node: str, spec: WorkerSpec
) -> bytes | None:
    """What stands for the policy there, as long as the collector is there."""
    own = policies()
    return None if own is None else own.policy_at(node, spec, options)


def _actor_class() -> Any:
    return import_ray().remote(concurrency_groups={"control": 1})(RayWorker)


def check_actor_options(configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for actor options that Ray does not know, or of a wrong kind."""
    for config in configs:
        try:
            _actor_class().options(**actor_options(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"remote_configs: {error}") from error


def actor_options(
    config: Mapping[str, Any] | None, devices: Devices | None = None
) -> dict[str, Any]:
    """The options of one actor: the defaults, overridden by what the caller gave.

    Args:
        devices: of its worker; one that uses a GPU asks for a part of it.
    """
    uses_gpu = devices is not None and "cuda" in devices.of_worker
    gpus = PART_OF_A_GPU if uses_gpu else 0
    return {**DEFAULT_ACTOR_OPTIONS, "num_gpus": gpus, **(config or {})}
