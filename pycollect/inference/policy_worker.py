"""The policy in a process of its own: to its driver a worker, which serves the other ones.

It is a process beside the driver, or an actor on another node, for the workers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import torch

from pycollect._core import Bell, ServerSlots
from pycollect.data.slabs import MemoryAddress
from pycollect.data.weights import PolicyVersion, WeightForm, Weights
from pycollect.inference.client import Seats
from pycollect.inference.options import ServerSettings
from pycollect.inference.server import InferenceServer
from pycollect.policy.runner import build
from pycollect.transport.hosted import HostedServer
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.waiting import POLL_SECONDS


@dataclass(frozen=True)
class PolicyWorkerMaker:
    """Makes it in its process, see :attr:`WorkerSpec.team`; pickles.

    Attributes:
        driver: addresses of the driver's slots and bell: workers that there are outlive this
            process. None: it has its own, as the driver is on another node.
    """

    settings: ServerSettings
    driver: tuple[MemoryAddress, MemoryAddress] | None = None

    def __call__(self, spec: WorkerSpec, policy: bytes) -> PolicyWorker:
        """That of a policy, or of its factory, pickled."""
        given = cloudpickle.loads(policy)
        made = build(given) if spec.builds_policy else given
        if self.driver is None:
            seats = Seats(Bell(), self.settings.groups)
            server = InferenceServer(self.settings, made, seats.slots, is_ours=True)
            return PolicyWorker(spec.index, server, seats.bell, seats)
        slots, bell = self.driver
        server = InferenceServer(self.settings, made, ServerSlots(slots), is_ours=True)
        return PolicyWorker(spec.index, server, Bell(bell))


class PolicyWorker(HostedServer):
    """Calls the policy for workers that ask.

    Args:
        server: that does it.
        bell: at which they knock.
        seats: of theirs; None: they have the driver's.
    """

    def __init__(
        self, index: int, server: InferenceServer, bell: Bell, seats: Seats | None = None
    ) -> None:
        self.index = index
        self._server, self._bell, self._seats = server, bell, seats
        self._heard, self._awaited = 0, 1
        self._version = PolicyVersion()
        server.count_by(self._version)

    @property
    def weights(self) -> WeightForm:
        """Form of the policy's weights."""
        return WeightForm.of(self._server.policy)

    @property
    def device(self) -> torch.device:
        """Where it is called."""
        return self._server.device

    def wait(self) -> None:
        """Sleep until a worker asks, or those that are held back are to be served."""
        patience = self._server.patience
        most = POLL_SECONDS if patience is None else min(patience, POLL_SECONDS)
        self._bell.wait_knock(self._heard, most, self._awaited)
        self._heard = self._bell.knocks

    def serve(self, version: int) -> None:
        """Call the policy for them, whose frames carry that version."""
        self._version.number = version
        self._awaited = self._server.serve()

    def policy_client(self, worker: int) -> bytes:
        """See :meth:`HostedServer.policy_client`; where the driver has no seats for them."""
        assert self._seats is not None, (
            "policy_client: expected workers of another node than the driver's"
        )
        stand_in: bytes = cloudpickle.dumps(self._seats.policy_of(worker))
        return stand_in

    def load_weights(self, weights: Weights) -> None:
        """New weights, in place."""
        self._server.load_weights(weights)
        self._server.refresh()

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """What the policy draws follows from these from now on.

        Args:
            seeds: tell it from other servers.
        """
        self._server.seed(root, *seeds)
