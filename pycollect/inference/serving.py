"""Where an inference server runs: in a process of its own, or in the driver while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from pycollect._core import Bell, Placement, RolloutControl, ServerSlots, Slab, Uninterrupted
from pycollect.checks import built_policy
from pycollect.data.frame import BatchLeaves
from pycollect.data.slabs import MemoryAddress
from pycollect.data.weights import PolicyVersion, Weights, WeightSpec
from pycollect.inference.options import ServerSettings
from pycollect.inference.server import InferenceServer
from pycollect.transport.channel import POLL_SECONDS
from pycollect.transport.messages import WorkerInfo, WorkerSpec
from pycollect.worker.report import RolloutReport


class PolicyWorker:
    """An inference server as a :class:`Hosted`, so that it is managed like a worker.

    Args:
        spec: Specification of this process.
        policy: The pickled policy or its factory.
        settings: Settings of the server.
        slots: Address of the clients' slots, in memory of the driver, so that they outlive this
            process.
        bell: Address of the bell that clients knock at.
    """

    leaves = BatchLeaves((), ())
    batch_size: tuple[int, ...] = ()
    stepped = version = 0
    post_collect_hook: Callable[[Any], Any] | None = None
    placement: Placement  # never read, because a server collects nothing

    def __init__(
        self,
        spec: WorkerSpec,
        policy: bytes,
        settings: ServerSettings,
        slots: MemoryAddress,
        bell: MemoryAddress,
    ) -> None:
        self.index = spec.index
        loaded = cloudpickle.loads(policy)
        module = built_policy(loaded) if spec.builds_policy else loaded
        self._server = InferenceServer(settings, module, ServerSlots(slots), is_owned=True)
        self._bell = Bell(bell)
        self._knocks, self._awaited = 0, 1
        self._version = PolicyVersion()
        self._server.count_by(self._version)

    def info(self) -> WorkerInfo:
        """Return the form of the policy's weights, and the device on which it is called."""
        weights, device = WeightSpec.of(self._server.policy), self._server.device
        return WorkerInfo(self.leaves, 0, 0, (), 0, weights=weights, device=device)

    def serve(self, load_newest: Callable[[], int]) -> None:
        """Sleep until a worker sends a request or a waiting one is due; call the policy for all.

        The newest weights are loaded after the requests were read, so that a worker gets all
        weights that were sent before it asked. Their version is that of the frames.
        """
        max_wait = self._server.max_wait
        most = POLL_SECONDS if max_wait is None else min(max_wait, POLL_SECONDS)
        self._bell.wait_knock(self._knocks, most, self._awaited)
        self._knocks = self._bell.knocks

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

    def collect(
        self, slab: Slab, row: int, policy_version: int, random: bool, control: RolloutControl
    ) -> RolloutReport:
        """Raise NotImplementedError: a server collects nothing."""
        raise NotImplementedError("a worker without environments collects nothing")

    def set_hook(self, name: str, hook: Any) -> None:
        """Do nothing: a server has no hooks."""

    def resume(self, state: Any, seeds: Sequence[int]) -> None:
        """Do nothing: a server is seeded again instead."""

    def reset(self) -> None:
        """Do nothing: a server has no environments."""

    def set_share(self, frames: int) -> None:
        """Do nothing: a server collects no frames."""

    def generator_state(self) -> None:
        """Return ``None``: a server has no generator state to save."""

    def close(self) -> None:
        """Do nothing: a server holds nothing to close."""


class ServingBell:
    """A Bell that serves inference requests in the thread that waits for it.

    The policy is therefore called in the thread that waits for a batch, which is otherwise idle.

    Args:
        bell: Bell on which the thread sleeps.
        server: Calls the policy.
    """

    def __init__(self, bell: Bell, server: InferenceServer) -> None:
        self._bell, self._server = bell, server
        self._serving = threading.Lock()

    @property
    def address(self) -> MemoryAddress:
        """Address by which workers find the bell."""
        return self._bell.address

    @property
    def count(self) -> int:
        """Number of times that the bell was rung."""
        return self._bell.count

    def ring(self) -> None:
        """Wake the waiting threads."""
        self._bell.ring()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until a worker has answered or the time is over; return whether `count` changed.

        Meanwhile, this thread serves inference requests, unless another thread does so when the
        wait begins. Waits are short, so a thread that does not serve takes over with one of its
        next waits.
        """
        serves = False
        try:
            with Uninterrupted():
                serves = self._serving.acquire(blocking=False)
            if not serves:
                return self._bell.wait_ring(seen, seconds)
            self._server.refresh()
            self._serve(seen, seconds)
        finally:
            if serves:
                self._serving.release()
        return self._bell.count != seen

    def _serve(self, seen: int, seconds: float) -> None:
        """Alternate between serving and sleeping; a client that knocked does not knock again."""
        server, deadline = self._server, time.monotonic() + seconds
        pending = server.pending  # does not change, because an answer rings and ends the wait
        while True:
            knocks = self._bell.knocks
            awaited = server.serve(pending)
            left = deadline - time.monotonic()
            if self._bell.count != seen or left <= 0:
                return
            max_wait = server.max_wait
            seconds_left = left if max_wait is None else min(left, max_wait)
            self._bell.wait_knock(knocks, seconds_left, awaited)
