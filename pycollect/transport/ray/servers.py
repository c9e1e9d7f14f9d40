"""Actors that call a policy for the workers of another node than the driver's."""

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
"""Option of a server: Ray's id of the node it must run on."""

_COPIED_OPTIONS = ("runtime_env",)  # from the options of the worker that needs the server


class ServerActor(Actor):
    """A RayServer actor, for the driver. It serves after `build`; later calls skip the queue."""

    _serving: Future[None] | None = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of `ServingHost`."""
        if method != "build":
            return self.call_unqueued(method, *arguments)
        built = super().call(method, *arguments)
        self._serving = self._ringing(self.handle.attend.remote())
        return built

    @property
    def is_gone(self) -> bool:  # type: ignore[override]  # a ClassVar in Actor
        """Whether the actor serves no more. Does not wait."""
        return self._serving is not None and self._serving.done()


class ServerHandle(CallHandle):
    """The driver's end of a server actor.

    Weights are always sent at once, because a server gets no rollout requests to carry them.
    """

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Send weights, which the server loads before its next call of the policy.

        Returns:
            A call that completes when the server has the weights.
        """
        return super().assign(serial, version, weights, True)


class ServerEngine:
    """Starts server actors next to the workers of a RayEngine; an `Engine`.

    Args:
        engine: Engine of the workers. Its owner leaves it.
        gpus: Number of GPUs that a server reserves.
    """

    def __init__(self, engine: RayEngine, gpus: float) -> None:
        self._engine, self._gpus = engine, gpus

    def set_node_policies(self, policies: NodePolicies) -> None:
        """Let workers on other nodes get their policy from `policies`."""
        self._engine.set_node_policies(policies)

    def server_options(self, node: str, of_worker: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a server's actor on a node.

        It reserves no CPU, because workers may have reserved all CPUs of the node.

        Args:
            node: Ray's id of the node.
            of_worker: Options of an actor that the server serves.
        """
        copied = {name: of_worker[name] for name in _COPIED_OPTIONS if name in of_worker}
        return {**copied, "num_cpus": 0, "num_gpus": self._gpus, NODE: node}

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Accept all options: Ray reports a node that lacks a resource."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Accept any size: servers hold no rollouts."""

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several servers share."""
        return self._engine.put(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start a server, which builds its policy at once.

        Args:
            spec: Specification of the server.
            policy: Pickled policy or policy factory.
            options: Options from `server_options`.
        """
        return self._engine.start_server(spec, policy, options)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """See :meth:`RayEngine.wait_any`."""
        return self._engine.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let servers end, then kill the remaining actors."""
        self._engine.wait_closed(handles, timeout)

    def leave(self) -> None:
        """Do nothing: the owner of the workers' engine leaves it."""


def server_handle(options: Mapping[str, Any]) -> Any:
    """Start a server actor on its node; return Ray's handle."""
    actor_class = import_ray().remote(concurrency_groups={"control": 1})(RayServer)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rays_options = {name: value for name, value in options.items() if name != NODE}
    pinned = NodeAffinitySchedulingStrategy(options[NODE], soft=False)
    return actor_class.options(**rays_options, scheduling_strategy=pinned).remote()
