"""An inference server in its own process, which its driver treats as a worker.

The process is next to the driver, or is an actor on another node that serves the workers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import torch

from pycollect._core import Bell, ServerSlots
from pycollect.data.slabs import MemoryAddress
from pycollect.data.weights import PolicyVersion, Weights, WeightSpec
from pycollect.inference.client import ClientSlots
from pycollect.inference.options import ServerSettings
from pycollect.inference.server import InferenceServer
from pycollect.policy.runner import build
from pycollect.transport.hosted import HostedServer
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.waiting import POLL_SECONDS


@dataclass(frozen=True)
class PolicyWorkerMaker:
    """Makes the inference server in its process; see :attr:`WorkerSpec.team`. Can be pickled.

    Attributes:
        settings: Settings of the server.
        driver: Addresses of the driver's slots and bell, so that workers outlive this process.
            ``None`` if the driver is on another node; then this process has its own.
    """

    settings: ServerSettings
    driver: tuple[MemoryAddress, MemoryAddress] | None = None

    def __call__(self, spec: WorkerSpec, policy: bytes) -> PolicyWorker:
        """Make the server for a pickled policy or factory."""
        loaded = cloudpickle.loads(policy)
        module = build(loaded) if spec.builds_policy else loaded
        if self.driver is None:
            clients = ClientSlots(Bell(), self.settings.groups)
            server = InferenceServer(self.settings, module, clients.slots, is_owned=True)
            return PolicyWorker(spec.index, server, clients.bell, clients)
        slots, bell = self.driver
        server = InferenceServer(self.settings, module, ServerSlots(slots), is_owned=True)
        return PolicyWorker(spec.index, server, Bell(bell))


class PolicyWorker(HostedServer):
    """Hosts an inference server, and calls the policy for workers that send requests.

    Args:
        index: Id of this process.
        server: Calls the policy.
        bell: Bell that workers knock at.
        clients: Slots of the workers; ``None`` if the driver has the slots.
    """

    def __init__(
        self, index: int, server: InferenceServer, bell: Bell, clients: ClientSlots | None = None
    ) -> None:
        self.index = index
        self._server, self._bell, self._clients = server, bell, clients
        self._knocks, self._awaited = 0, 1
        self._version = PolicyVersion()
        server.count_by(self._version)

    @property
    def weights(self) -> WeightSpec:
        """Form of the policy's weights."""
        return WeightSpec.of(self._server.policy)

    @property
    def device(self) -> torch.device:
        """Device on which the policy is called."""
        return self._server.device

    def wait(self) -> None:
        """Sleep until a worker sends a request, or a waiting request must be served."""
        max_wait = self._server.max_wait
        most = POLL_SECONDS if max_wait is None else min(max_wait, POLL_SECONDS)
        self._bell.wait_knock(self._knocks, most, self._awaited)
        self._knocks = self._bell.knocks

    def serve(self, version: int) -> None:
        """Call the policy for all requests, whose frames get that policy version."""
        self._version.number = version
        self._awaited = self._server.serve()

    def policy_client(self, worker: int) -> bytes:
        """See :meth:`HostedServer.policy_client`; only without slots in the driver."""
        assert self._clients is not None, (
            "policy_client: expected workers of another node than the driver's"
        )
        client: bytes = cloudpickle.dumps(self._clients.policy_of(worker))
        return client

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into the policy, in place."""
        self._server.load_weights(weights)
        self._server.refresh()

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed the random draws of the policy.

        Args:
            seeds: Distinguish this server from other servers.
            root: Seed of the random generators.
        """
        self._server.seed(root, *seeds)
