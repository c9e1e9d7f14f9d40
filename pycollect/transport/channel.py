"""Channels to a worker, through shared memory or calls, and the bells that announce answers."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from pycollect._core import (
    Mailbox,
    Memory,
    RolloutControl,
    SharedMemoryError,
    SharedNumber,
    WorkerMailbox,
)
from pycollect.data.slabs import MemoryAddress
from pycollect.transport.messages import (
    Buffer,
    Collect,
    GetSteps,
    Request,
    SetHook,
    SetWeights,
    Stop,
)
from pycollect.transport.pickling import SharedValue, pack, unpack
from pycollect.transport.process import Caller

T = TypeVar("T")

POLL_SECONDS = 0.02
"""How often a driver looks whether its workers are alive while they answer."""

IDLE_SECONDS = 0.25
"""How often it looks while none answers; the end of a worker on this machine rings the bell."""


class AnyBell(Protocol):
    """Interface of a bell: the core's `Bell`, one that works while it waits, or a ThreadBell."""

    @property
    def address(self) -> MemoryAddress | None:
        """Address by which other processes find the bell; ``None`` if they cannot ring it."""

    @property
    def count(self) -> int:
        """Number of rings so far."""

    def ring(self) -> None:
        """Wake all waiting threads."""

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` differs from `seen`; return whether it does. May return early."""

    def ring_when_gone(self, pid: int) -> None:
        """Ring when a process on this machine has ended."""


class ThreadBell:
    """A bell for threads of this process, used if memory cannot be shared."""

    address: ClassVar[None] = None

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def ring(self) -> None:
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._count != seen, seconds)

    def ring_when_gone(self, pid: int) -> None:
        """Do nothing."""


def wait_for(bell: AnyBell, look: Callable[[], T], seconds: float = math.inf) -> T:
    """Call `look` at each ring until it is true or the time is over; return its last result.

    It is also called at intervals, because some events ring no bell.
    """
    deadline = time.monotonic() + seconds
    while True:
        seen = bell.count
        result = look()
        left = deadline - time.monotonic()
        if result or left <= 0:
            return result
        bell.wait_ring(seen, min(left, IDLE_SECONDS))


MAX_REQUESTS = 64
"""Number of requests and answers that fit into a mailbox."""

SentWeights: TypeAlias = tuple[int, int, SharedValue]
"""Serial number, policy version and packed weights."""

SentHooks: TypeAlias = Mapping[str, tuple[int, SharedValue]]
"""Serial number and pickled hook, by the hook's name."""


class MailboxChannel:
    """A channel through shared memory. The worker rings a bell after each answer.

    Only `publish` may be called by several threads, one at a time.

    Attributes:
        in_place: Whether the worker shares memory with this process and writes into requests' rows.
        transport: Name of the transport that carries the rollouts.
        max_requests: Maximum number of unanswered requests.
    """

    in_place: ClassVar[bool] = True
    transport: ClassVar[str] = "shared memory"
    max_requests: ClassVar[float] = MAX_REQUESTS

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._published: Any = None  # the memory of the published message

    def form_of(self, value: SharedValue) -> Any:
        """Return the form in which a request contains a value. Keep the value until the answer."""
        return value.memory.address

    def send(self, request: Request) -> Any:
        """Send a request; return an object to keep until it is answered."""
        message, memory = pack(request, Mailbox.ASK_BYTES)
        self._mailbox.ask(message)
        return memory

    @property
    def is_pending(self) -> bool:
        """Whether a request has no answer yet, whatever was taken."""
        return self._mailbox.answered < self._mailbox.asked

    @property
    def has_answer(self) -> bool:
        """Whether the oldest request that was sent has an answer. Does not wait."""
        return self._mailbox.has_answer

    def drop_answer(self) -> None:
        """Take the answer of the oldest request without reading it."""
        self._mailbox.take_answer()

    def take_answer(self) -> Any:
        """Return the answer of the oldest request, once.

        It may be an `ErrorReport`. From a `CallChannel`, it may also be an exception of the
        transport, which `Caller.process_end` explains.

        Raises:
            SharedMemoryError: The worker has died, and the memory of its answer is gone.
        """
        return unpack(self._mailbox.take_answer())

    def publish(
        self, weights: SentWeights | None, hooks: SentHooks, acknowledge: bool = False
    ) -> None:
        """Send weights and all hooks, which apply from the next rollout, even a queued one.

        The worker has the weights when this returns, whatever `acknowledge` is.
        """
        serial, version, packed = weights or (0, 0, None)
        memory = packed and packed.memory
        places = [(name, (number, hook.memory.address)) for name, (number, hook) in hooks.items()]
        self._mailbox.publish(pickle.dumps((serial, version, memory and memory.address, places)))
        self._published = weights, hooks

    def stop(self, number: int) -> None:
        """Stop the rollouts of all requests up to this number after their current step."""
        self._mailbox.stop(number)

    def steps(self) -> int:
        """Return the number of steps the worker has made, or ``None`` if unknown. Does not wait."""
        return self._mailbox.steps


class CallChannel:
    """A channel without shared memory: each request is a call in the other process."""

    in_place: ClassVar[bool] = False
    is_pending: ClassVar[bool] = False  # only mailboxes count requests without taking answers
    max_requests: ClassVar[float] = math.inf

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.transport = caller.transport
        self._calls: deque[Future[Any]] = deque()
        self._weights: SentWeights | None = None
        self._sent_serial = 0
        self._hook_serials: dict[str, int] = {}
        self._stopped = 0
        self._steps_call: Future[Any] | None = None

    def form_of(self, value: SharedValue) -> Any:
        return value.reference

    def send(self, request: Request) -> None:
        """See `MailboxChannel`. A rollout's request also carries weights that were not sent yet."""
        weights = self._weights
        if isinstance(request, Collect) and weights is not None and weights[0] > self._sent_serial:
            serial, version, packed = weights
            request = request._replace(
                serial=serial, weights_version=version, weights=packed.reference
            )
            self._sent_serial = serial
        self._calls.append(self._caller.call(request))

    @property
    def has_answer(self) -> bool:
        return bool(self._calls) and self._calls[0].done()

    def drop_answer(self) -> None:
        self._calls.popleft()

    def take_answer(self) -> Any:
        call = self._calls.popleft()
        return call.exception() or call.result()

    def publish(
        self, weights: SentWeights | None, hooks: SentHooks, acknowledge: bool = False
    ) -> Future[Any] | None:
        """See `MailboxChannel`. Return ``None`` if the weights travel with the next rollout.

        They do if nothing is queued, unless `acknowledge` is true.
        """
        for name, (serial, hook) in hooks.items():
            if serial > self._hook_serials.get(name, 0):
                self._hook_serials[name] = serial
                self._caller.call(SetHook(name, serial, hook.reference), unqueued=True)
        if weights is None or weights is self._weights:
            return None
        self._weights = weights
        if not (self._calls or acknowledge):
            return None
        serial, version, packed = weights
        return self._caller.call(SetWeights(serial, version, packed.reference), unqueued=True)

    def stop(self, number: int) -> None:
        """See `MailboxChannel`. Sends one message, which skips the queue."""
        if number > self._stopped:
            self._stopped = number
            self._caller.call(Stop(number), unqueued=True)

    def steps(self) -> int | None:
        if self._steps_call is None:
            self._steps_call = self._caller.call(GetSteps(), unqueued=True)
        if not self._steps_call.done():
            return None
        call, self._steps_call = self._steps_call, None
        steps = call.exception() or call.result()
        return steps if isinstance(steps, int) else None  # reading the rollout raises the error


Channel: TypeAlias = MailboxChannel | CallChannel
"""The driver's end of a connection to one worker, which answers requests in their order."""


class Published(NamedTuple):
    """Weights and hooks that are newer than a worker's. A hook has a serial number.

    `weights` is ``None`` if the worker has the newest.
    """

    serial: int
    version: int
    weights: Buffer | None
    hooks: dict[str, tuple[int, Buffer]]


class MailboxEnd:
    """The worker's end of a MailboxChannel."""

    in_place: ClassVar[bool] = True

    def __init__(self, mailbox: WorkerMailbox) -> None:
        self._mailbox = mailbox

    @property
    def moves(self) -> int:
        """Number that grows with each step of a rollout. May be read at any time."""
        return self._mailbox.steps.value

    def bytes_of(self, form: Any) -> bytes:
        """Return the bytes of a value from its form in a request."""
        return Memory.attach(form).array().tobytes()

    def control(self, number: int, min_steps: int) -> RolloutControl:
        """Return the control of the rollout of a request."""
        return RolloutControl(self._mailbox.stop, number, min_steps, self._mailbox.steps)

    def published(self, serial: int, hooks: Mapping[str, int]) -> Published | None:
        """Return weights and hooks with serial numbers above these."""
        while message := self._mailbox.published():
            newest, version, address, places = pickle.loads(message)
            new = {name: place for name, place in places if place[0] > hooks.get(name, 0)}
            if newest <= serial and not new:
                return None
            try:
                packed = Memory.attach(address).array() if newest > serial else None
                attached = {
                    name: (number, Memory.attach(place).array())
                    for name, (number, place) in new.items()
                }
            except SharedMemoryError:
                if self._mailbox.published() == message:
                    raise
                continue  # newer ones were published meanwhile
            return Published(newest, version, packed, attached)
        return None


class CallEnd:
    """The worker's end of a CallChannel. Any thread may call its methods."""

    in_place: ClassVar[bool] = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: tuple[int, int, Buffer | None] = (0, 0, None)
        self._hooks: dict[str, tuple[int, Buffer]] = {}
        self._stop = SharedNumber()  # rollouts up to this request end after their current step
        self._moves = SharedNumber()

    @property
    def moves(self) -> int:
        return self._moves.value

    def bytes_of(self, form: Any) -> bytes:
        return bytes(form)

    def control(self, number: int, min_steps: int) -> RolloutControl:
        return RolloutControl(self._stop, number, min_steps, self._moves)

    def published(self, serial: int, hooks: Mapping[str, int]) -> Published | None:
        with self._lock:
            newest, version, packed = self._weights
            new = {name: own for name, own in self._hooks.items() if own[0] > hooks.get(name, 0)}
        if newest <= serial and not new:
            return None
        return Published(newest, version, packed if newest > serial else None, new)

    def receive(self, request: Stop | SetWeights | SetHook) -> None:
        """Take a request that skips the queue."""
        with self._lock:
            match request:
                case Stop(number):
                    self._stop.value = max(self._stop.value, number)
                case SetHook(name, serial, hook):
                    self._hooks = {**self._hooks, name: (serial, hook)}
                case SetWeights(serial) if serial > self._weights[0]:
                    self._weights = tuple(request)


WorkerEnd: TypeAlias = MailboxEnd | CallEnd
"""The worker's end of a channel."""
