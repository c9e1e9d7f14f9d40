"""What a collector asks of Ray: resources, actors, waiting for them, ending them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from pycollect.devices import Devices
from pycollect.engines.messages import WorkerSpec
from pycollect.engines.protocol import H, NodePolicies
from pycollect.engines.ray.actor import Actor
from pycollect.engines.ray.driver import driver_address
from pycollect.engines.ray.resources import check_resources
from pycollect.engines.ray.serve import RayWorker
from pycollect.engines.ray.servers import (
    ServerActor,
    ServerHandle,
    server_handle,
)
from pycollect.engines.ray.session import SESSION, import_ray, when_forgotten
from pycollect.engines.ray.starting import starting_actor
from pycollect.engines.shared_value import Shareable, SharedValue
from pycollect.engines.starting import StartingEitherWay
from pycollect.engines.waiting import (
    AnswerWaiter,
    SharedBell,
    Waited,
    check_available,
    too_many_bytes,
)

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
        self._session = when_forgotten(self, SESSION.leave)
        self._driver = driver_address(self._ray, bell)
        self._waiter = AnswerWaiter(self._driver.bell)
        self._started: WeakSet[StartingEitherWay] = WeakSet()
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
    ) -> StartingEitherWay:
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

    def ask_for_policies(self, policies: NodePolicies) -> None:
        """Workers on other nodes get their policy from there. It may hold this, not this it."""
        self._policies = weakref.ref(policies)

    def start_server(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingEitherWay:
        """Start an actor that calls the policy for workers of another node.

        Args:
            policy: the pickled policy or its factory.
            options: as `ServerEngine.options_on` tells them.
        """
        actor = ServerActor(self._ray, server_handle(options), self._driver.bell)
        by_calls = partial(ServerHandle, spec, policy, actor)
        return StartingEitherWay(actor.handle, self._driver.bell, None, by_calls)

    @property
    def owing(self) -> int:
        """How many actors of this node were asked for something and have not answered yet."""
        return sum(own.is_owing for own in self._started)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[Waited], timeout: float | None = None) -> None:
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
