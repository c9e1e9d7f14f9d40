"""An inference server in its own process, which its driver treats as a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cloudpickle
import torch

from pycollect._core import Bell, ServerSlots
from pycollect.checks import built_policy
from pycollect.data.slabs import MemoryAddress
from pycollect.data.weights import PolicyVersion, Weights, WeightSpec
from pycollect.inference.options import ServerSettings
from pycollect.inference.server import InferenceServer
from pycollect.transport.bells import POLL_SECONDS
from pycollect.transport.hosted import HostedServer
from pycollect.transport.spec import WorkerSpec


@dataclass(frozen=True)
class PolicyWorkerMaker:
    """Makes the inference server in its process; see :attr:`WorkerSpec.maker`. Can be pickled.

    Attributes:
        settings: Settings of the server.
        slots: Address of the clients' slots, in memory of the driver, so that they outlive this
            process.
        bell: Address of the bell that clients knock at.
    """

    settings: ServerSettings
    slots: MemoryAddress
    bell: MemoryAddress

    def __call__(self, spec: WorkerSpec, policy: bytes) -> PolicyWorker:
        """Make the server for a pickled policy or factory."""
        loaded = cloudpickle.loads(policy)
        module = built_policy(loaded) if spec.builds_policy else loaded
        server = InferenceServer(self.settings, module, ServerSlots(self.slots), is_owned=True)
        return PolicyWorker(spec.index, server, Bell(self.bell))


class PolicyWorker(HostedServer):
    """Hosts an inference server, and calls the policy for workers that send requests.

    Args:
        index: Id of this process.
        server: Calls the policy.
        bell: Bell that workers knock at.
    """

    def __init__(self, index: int, server: InferenceServer, bell: Bell) -> None:
        self.index = index
        self._server, self._bell = server, bell
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

    def serve(self, load_newest: Callable[[], int]) -> None:
        """Call the policy for all requests, whose frames get the version of the newest weights."""

        def load() -> None:
            self._version.number = load_newest()

        self._awaited = self._server.serve(before_call=load)

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into the policy, in place."""
        self._server.load_weights(weights)
        self._server.refresh()

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        """Seed the random draws of the policy with `root`."""
        self._server.seed(root)
