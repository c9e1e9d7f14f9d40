"""The inference server: receives requests, calls the policy and answers; and where it runs.

It runs in a process of its own (`PolicyWorker`), or in the driver while that waits (`ServingBell`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import torch
from tensordict.nn.probabilistic import set_interaction_type

from pycollect._core import Bell, Placement, RolloutControl, ServerSlots, Slab, Uninterrupted
from pycollect.checks import built_policy
from pycollect.data.devices import CPU, indexed
from pycollect.data.frame import BatchLeaves
from pycollect.data.generators import Generators
from pycollect.data.slabs import MemoryAddress
from pycollect.data.weights import (
    PolicyVersion,
    Weights,
    WeightSpec,
    device_of,
    load_weights,
    moved_to,
)
from pycollect.errors import is_interrupt
from pycollect.inference.batching import (
    BatchScheduler,
    CallTiming,
    Client,
    InferenceBatch,
    schedulers_for,
)
from pycollect.inference.client import JoinReply, JoinRequest
from pycollect.inference.group import ServedPolicy
from pycollect.inference.options import ServerSettings
from pycollect.policy.calling import GraphPool
from pycollect.policy.device import PolicyStream
from pycollect.transport.channel import POLL_SECONDS
from pycollect.transport.messages import Hosted, WorkerInfo, WorkerSpec
from pycollect.transport.pickling import ErrorReport, pack, unpack

_SERVER_STREAM = 2**32 - 1  # key of the server's random stream; workers use their ids


class InferenceServer:
    """Calls one policy for all clients with requests. Only one thread may use it at a time.

    Args:
        policy: The policy in any of the accepted forms. If it must be called on another device, a
            copy is used.
        is_owned: Whether a factory made the policy, so that only the collector has it.

    Attributes:
        policy: The policy that is called, perhaps a copy.
        version: Its version; frames record its value at the time of the call.
        stream: Stream on which it is called.
    """

    def __init__(
        self, settings: ServerSettings, policy: Any, slots: ServerSlots, is_owned: bool = False
    ) -> None:
        self.is_owned = is_owned
        self._exploration = settings.exploration
        self._slots, self._parts = slots, settings.groups
        self.version = PolicyVersion()
        self.stream = PolicyStream(CPU)
        device = settings.device
        place = indexed(device or device_of(policy) or CPU)
        self.policy = moved_to(policy, place)
        explicit = device is not None
        self._served = ServedPolicy(self.policy, place, explicit, graphs=GraphPool())
        self._generators: Generators | None = None
        self._clients: list[Client] = []
        self._timing = CallTiming() if settings.measures else None
        self._schedulers = schedulers_for(settings, self._served, self._timing)
        self._turn = 0  # index of the scheduler to serve next
        self._count_pending: weakref.WeakMethod[Callable[[], int]] | None = None

    @property
    def device(self) -> torch.device:
        return self._served.device

    def count_pending_by(self, count: Callable[[], int]) -> None:
        """Set the method that counts the workers that may send a request. Keeps no reference."""
        self._count_pending = weakref.WeakMethod(count)

    @property
    def pending(self) -> int:
        """Number of workers that may send a request; 0 if it is unknown."""
        count = None if self._count_pending is None else self._count_pending()
        return 0 if count is None else count()

    def load_weights(self, weights: Weights) -> None:
        """Write new weights into the policy that is called, in place."""
        load_weights(self.policy, weights)

    def seed(self, root: int) -> None:
        """Seed the random draws of the policy, which has its own random stream."""
        sequence = np.random.SeedSequence(root, spawn_key=(_SERVER_STREAM,))
        self._generators = Generators(sequence, self._served.device)

    def refresh(self) -> None:
        """Check before the next calls whether the policy has changed."""
        with self.stream.on_stream():
            for scheduler in self._schedulers:
                scheduler.refresh()

    def serve(
        self, pending: int | None = None, before_call: Callable[[], None] | None = None
    ) -> int:
        """Call the policy for all requests that need not wait for others.

        Return the number of further requests before the server can do anything, at least 1.
        `pending` is the number of workers with a request of the driver that is not answered yet; if
        ``None``, all workers count. `before_call` is called after requests were read, before the
        policy is called.
        """
        pending = len(self._slots) // self._parts if pending is None else pending
        if len(self._schedulers) == 1:
            asking = self._asking()
            return max(self._serve_at(self._schedulers[0], asking, pending, before_call), 1)
        # A worker sends requests to the schedulers in turn. So a request that is seen at one
        # scheduler follows a request at the scheduler before it, which is read later.
        *before, newest = [self._asking() for _ in self._schedulers]
        turns = [
            (self._turn + later) % len(self._schedulers) for later in range(len(self._schedulers))
        ]
        awaited = []
        for turn, clients in zip(turns, (newest, *reversed(before)), strict=True):
            scheduler = self._schedulers[turn]
            asking = [client for client in clients if client.scheduler == turn and client in newest]
            awaited.append(self._serve_at(scheduler, asking, pending, before_call))
        return max(min(awaited), 1)

    def _serve_at(
        self,
        scheduler: BatchScheduler,
        asking: Sequence[Client],
        pending: int,
        before_call: Callable[[], None] | None,
    ) -> int:
        """Serve the requests at a scheduler, or let them wait; return how many more are needed."""
        lacking = scheduler.lacking(asking, pending, self._others(asking))
        if asking and not scheduler.holds_back(lacking):
            if before_call is not None:
                before_call()
            for batch in scheduler.calls(asking):
                self._call(batch)
            self._turn = (self._schedulers.index(scheduler) + 1) % len(self._schedulers)
        return scheduler.awaited(lacking, pending)

    def _others(self, asking: Sequence[Client]) -> list[Client]:
        """Return the clients that have joined and have no request; none if nothing is measured."""
        if self._timing is None or not self._timing.is_slow:
            return []
        known = set(asking)
        return [own for own in self._clients if own.group is not None and own not in known]

    def _asking(self) -> list[Client]:
        """Return the clients with a request for actions; answer join requests.

        A client that did not join this server had joined one that has died, and is being replaced.
        """
        slots = self._slots
        asking = slots.asking()
        self._add_clients()
        for number in slots.with_message():
            asking.remove(number)
            request = slots.question(number)
            if request is not None:
                self._join(self._clients[number], request)
        if self._timing is not None and self._timing.is_slow:
            for number in asking:
                self._timing.saw(number, slots.asked_at(number))
        return [client for number in asking if (client := self._clients[number]).group is not None]

    def _add_clients(self) -> None:
        """Add clients for new slots, because workers can be added at any time."""
        for number in range(len(self._clients), len(self._slots)):
            schedulers = len(self._schedulers)
            self._clients.append(
                Client(number, number % self._parts, number % schedulers, number // schedulers)
            )

    @property
    def max_wait(self) -> float | None:
        each = [wait for scheduler in self._schedulers if (wait := scheduler.max_wait) is not None]
        return min(each, default=None)

    def _join(self, client: Client, request: bytes) -> None:
        """Answer a client's join request."""
        answer: JoinReply | ErrorReport
        try:
            joining: JoinRequest = unpack(request)
            with self._settings():
                answer = self._schedulers[client.scheduler].join(client, joining)
        except Exception as error:  # the worker raises it while it is built
            if is_interrupt(error):
                raise
            answer = ErrorReport.of(error)
        self._answer(client, answer)

    def _call(self, batch: InferenceBatch) -> None:
        version = self.version.number  # read first, because new weights may arrive during the call
        began = time.monotonic()
        with self._settings():
            try:
                batch.group.call(batch.places)
            except Exception as error:  # each of the workers raises it
                if is_interrupt(error):
                    raise
                report = ErrorReport.of(error)
                for number in batch.numbers:
                    self._answer(self._clients[number], report)
            else:
                if self._timing is not None:  # before the workers wake, and delay this thread
                    self._timing.called(batch.numbers, began, time.monotonic())
                self._slots.answer_all(batch.numbers, version)

    def _answer(self, client: Client, value: JoinReply | ErrorReport) -> None:
        message, client.kept = pack(value, ServerSlots.BYTES)
        self._slots.answer(client.number, message)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Activate the policy's stream, interaction type and random generators.

        They belong to the whole program, so they are restored before this thread sleeps.
        """
        generators = self._generators
        with (
            self.stream.on_stream(),
            torch.no_grad(),
            set_interaction_type(self._exploration),
            nullcontext() if generators is None else generators.active(),
        ):
            yield


class PolicyWorker(Hosted):
    """An inference server as a :class:`Hosted`, so that it is managed like a worker.

    The clients' slots are in memory of the driver, so that they outlive this process.
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

    def info(self) -> WorkerInfo:
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
            self._server.version.number = load_newest()

        self._awaited = self._server.serve(before_call=load)

    def load_weights(self, weights: Weights) -> None:
        self._server.load_weights(weights)
        self._server.refresh()

    def set_seed(self, seeds: Sequence[int], root: int) -> None:
        self._server.seed(root)

    def collect(
        self, slab: Slab, row: int, policy_version: int, random: bool, control: RolloutControl
    ) -> NoReturn:
        """Raise NotImplementedError: a server collects nothing."""
        raise NotImplementedError("a worker without environments collects nothing")


class ServingBell:
    """A Bell that serves inference requests in the thread that waits for it.

    The policy is therefore called in the thread that waits for a batch, which is otherwise idle.
    """

    def __init__(self, bell: Bell, server: InferenceServer) -> None:
        self._bell, self._server = bell, server
        self.ring, self.ring_when_gone = bell.ring, bell.ring_when_gone
        self._serving = threading.Lock()

    @property
    def address(self) -> MemoryAddress:
        return self._bell.address

    @property
    def count(self) -> int:
        return self._bell.count

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until a worker has answered or the time is over; return whether `count` changed.

        Meanwhile, this thread serves inference requests, unless another thread does so when the
        wait begins. Waits are short, so a thread that does not serve takes over with one of its
        next waits.
        """
        seconds, serves = min(seconds, POLL_SECONDS), False
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
