"""Actors that call a policy for the workers of their node, where that is not the driver's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pycollect.transport.call_handle import CallHandle
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.process import H, NodePolicies
from pycollect.transport.ray.actor import Actor, RayServer
from pycollect.transport.ray.session import import_ray
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.starting import StartingHandle
from pycollect.transport.waiting import AwaitedWorker

if TYPE_CHECKING:
    from pycollect.transport.ray.engine import RayEngine

NODE = "node"
"""Among a server's options: Ray's id of the node that it is to be on."""

_TAKEN_OVER = ("runtime_env",)  # from the options of the worker that needs it


class ServerActor(Actor):
    """An actor that is a RayServer: once it has built, it serves, and is asked past that call."""

    _serving: Future[None] | None = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call one of ServingHost's methods."""
        if method != "build":
            return self.call_unqueued(method, *arguments)
        built = super().call(method, *arguments)
        self._serving = self._ringing(self.handle.attend.remote())
        return built

    @property
    def is_gone(self) -> bool:  # type: ignore[override]  # here it is known
        """Whether it serves no more. Does not wait."""
        return self._serving is not None and self._serving.done()


class ServerHandle(CallHandle):
    """The driver's end of such an actor. It is asked for no rollouts that weights could join."""

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Give it weights, which it takes before its next call of the policy.

        Returns:
            What to wait for until it has them.
        """
        return super().assign(serial, version, weights, True)


class ServerEngine:
    """Starts such actors, beside the workers of a RayEngine. It is an Engine, see there.

    Args:
        engine: of the workers; it is left by whoever leaves that.
        gpus: that a server's policy needs.
    """

    def __init__(self, engine: RayEngine, gpus: float) -> None:
        self._engine, self._gpus = engine, gpus

    def set_node_policies(self, policies: NodePolicies) -> None:
        """Have the engine's workers ask there for what stands for their policy."""
        self._engine.set_node_policies(policies)

    def server_options(self, node: str, of_worker: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a server's actor on a node.

        It asks for no CPU: where workers have reserved all of them, it could never start.

        Args:
            of_worker: those of an actor that it serves.
        """
        taken = {name: of_worker[name] for name in _TAKEN_OVER if name in of_worker}
        return {**taken, "num_cpus": 0, "num_gpus": self._gpus, NODE: node}

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """A node that lacks something says so itself."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """They hold no rollouts."""

    def put(self, value: Shareable) -> SharedValue:
        """A value for several of them."""
        return self._engine.put(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start one, which builds its policy at once.

        Args:
            policy: the pickled policy or its factory.
            options: as `server_options` tells them.
        """
        return self._engine.start_server(spec, policy, options)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """See :meth:`RayEngine.wait_any`."""
        return self._engine.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let them end, then end those that are still there."""
        self._engine.wait_closed(handles, timeout)

    def leave(self) -> None:
        """The workers' engine is left by whoever has it."""


def server_handle(options: Mapping[str, Any]) -> Any:
    """Ray's handle of an actor with such options, which is started. It is pinned to its node."""
    actor_class = import_ray().remote(concurrency_groups={"control": 1})(RayServer)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = {name: value for name, value in options.items() if name != NODE}
    pinned = NodeAffinitySchedulingStrategy(options[NODE], soft=False)
    return actor_class.options(**own, scheduling_strategy=pinned).remote()
