"""Channels to a worker: through shared memory, or through calls of another process."""

from __future__ import annotations

import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from pycollect._core import (
    Mailbox,
    Memory,
    RolloutControl,
    SharedMemoryError,
    SharedNumber,
    WorkerMailbox,
)
from pycollect.errors import without_frames
from pycollect.transport.messages import (
    Buffer,
    Collect,
    GetSteps,
    Request,
    SetHook,
    SetWeights,
    Stop,
)
from pycollect.transport.process import Caller
from pycollect.transport.shared_value import SharedValue, pack, unpack

MAX_REQUESTS = 64
"""Maximum number of unanswered requests in a mailbox."""

SentWeights: TypeAlias = tuple[int, int, SharedValue]
"""Serial number, policy version and packed weights."""

SentHooks: TypeAlias = Mapping[str, tuple[int, SharedValue]]
"""Serial number and pickled hook, by the hook's name."""


class Channel(Protocol):
    """The driver's end of a connection to one worker, which answers requests in their order.

    Only `publish` may be called by several threads, one at a time.
    """

    @property
    def in_place(self) -> bool:
        """Whether the worker shares memory with this process and writes into requests' rows."""

    @property
    def transport(self) -> str:
        """Name of the transport that carries the rollouts."""

    def form_of(self, value: SharedValue) -> Any:
        """Return the form in which a request contains a value. Keep the value until the answer."""

    def send(self, request: Request) -> Any:
        """Send a request; return an object to keep until it is answered."""

    @property
    def max_requests(self) -> float:
        """Maximum number of requests without an answer."""

    @property
    def is_pending(self) -> bool:
        """Whether a request has no answer yet, whatever was taken."""

    @property
    def has_answer(self) -> bool:
        """Whether the oldest request that was sent has an answer. Does not wait."""

    def drop_answer(self) -> None:
        """Take the answer of the oldest request without reading it."""

    def take_answer(self) -> Any:
        """Return the answer of the oldest request, once.

        It may be an `ErrorReport`, or a function that returns a `ProcessEnd` or an exception of the
        transport, perhaps after a short wait.

        Raises:
            SharedMemoryError: The worker has died, and the memory of its answer is gone.
        """

    def publish(
        self, weights: SentWeights | None, hooks: SentHooks, acknowledge: bool = False
    ) -> Callable[[], Any] | None:
        """Send weights and hooks that apply from the worker's next rollout, even a queued one.

        Args:
            weights: The newest weights, or ``None`` if there are none yet.
            hooks: All hooks.
            acknowledge: Whether to send the weights now in any case.

        Returns:
            Function that waits until the worker has the weights, and returns its answer. ``None``
            if it has them now, or if they travel with the next request.
        """

    def stop(self, number: int) -> None:
        """Stop the rollouts of all requests up to this number after their current step."""

    def steps(self) -> int | None:
        """Return the number of steps the worker has made, or ``None`` if unknown. Does not wait."""


class MailboxChannel:
    """A channel through shared memory. The worker rings a bell after each answer.

    Args:
        mailbox: Unused mailbox, whose address the worker has.
    """

    in_place: ClassVar[bool] = True
    transport: ClassVar[str] = "shared memory"
    max_requests: ClassVar[float] = MAX_REQUESTS

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._published: Any = None  # the memory of the published message

    def form_of(self, value: SharedValue) -> Any:
        """See `Channel`."""
        return value.memory.address

    def send(self, request: Request) -> Any:
        """See `Channel`."""
        message, memory = pack(request, Mailbox.ASK_BYTES)
        self._mailbox.ask(message)
        return memory

    @property
    def is_pending(self) -> bool:
        """See `Channel`."""
        return self._mailbox.answered < self._mailbox.asked

    @property
    def has_answer(self) -> bool:
        """See `Channel`."""
        return self._mailbox.has_answer

    def drop_answer(self) -> None:
        """See `Channel`."""
        self._mailbox.take_answer()

    def take_answer(self) -> Any:
        """See `Channel`."""
        return unpack(self._mailbox.take_answer())

    def publish(
        self, weights: SentWeights | None, hooks: SentHooks, acknowledge: bool = False
    ) -> None:
        """See `Channel`. The worker has the weights when this returns."""
        serial, version, packed = weights or (0, 0, None)
        memory = packed and packed.memory
        places = [(name, (number, hook.memory.address)) for name, (number, hook) in hooks.items()]
        self._mailbox.publish(pickle.dumps((serial, version, memory and memory.address, places)))
        self._published = weights, hooks

    def stop(self, number: int) -> None:
        """See `Channel`."""
        self._mailbox.stop(number)

    def steps(self) -> int:
        """See `Channel`."""
        return self._mailbox.steps


class CallChannel:
    """A channel without shared memory: each request is a call in the other process.

    Args:
        caller: Makes the calls.
    """

    in_place: ClassVar[bool] = False
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
        """See `Channel`."""
        return value.reference

    def send(self, request: Request) -> None:
        """See `Channel`. A request for a rollout also carries weights that were not sent yet."""
        weights = self._weights
        if isinstance(request, Collect) and weights is not None and weights[0] > self._sent_serial:
            serial, version, packed = weights
            request = request._replace(serial=serial, version=version, weights=packed.reference)
            self._sent_serial = serial
        self._calls.append(self._caller.call(request))

    @property
    def is_pending(self) -> bool:
        """See `Channel`."""
        return not all(call.done() for call in self._calls)

    @property
    def has_answer(self) -> bool:
        """See `Channel`."""
        return bool(self._calls) and self._calls[0].done()

    def drop_answer(self) -> None:
        """See `Channel`."""
        self._calls.popleft()

    def take_answer(self) -> Any:
        """See `Channel`."""
        call = self._calls.popleft()
        return call.result() if call.exception() is None else partial(self._result, call)

    def _result(self, call: Future[Any]) -> Any:
        """Wait for the result of a call; return it, or what its exception means."""
        error = call.exception()
        if error is None:
            return call.result()
        return self._caller.process_end(error) or without_frames(error)

    def publish(
        self, weights: SentWeights | None, hooks: SentHooks, acknowledge: bool = False
    ) -> Callable[[], Any] | None:
        """See `Channel`. Weights travel with the next rollout if nothing is queued."""
        for name, (serial, hook) in hooks.items():
            if serial > self._hook_serials.get(name, 0):
                self._hook_serials[name] = serial
                self._caller.call_unqueued(SetHook(name, serial, hook.reference))
        if weights is None or weights is self._weights:
            return None
        self._weights = weights
        if not (self._calls or acknowledge):
            return None
        serial, version, packed = weights
        call = self._caller.call_unqueued(SetWeights(serial, version, packed.reference))
        return partial(self._result, call)

    def stop(self, number: int) -> None:
        """See `Channel`. Sends one message, which skips the queue."""
        if number > self._stopped:
            self._stopped = number
            self._caller.call_unqueued(Stop(number))

    def steps(self) -> int | None:
        """See `Channel`."""
        if self._steps_call is None:
            self._steps_call = self._caller.call_unqueued(GetSteps())
        if not self._steps_call.done():
            return None
        call, self._steps_call = self._steps_call, None
        steps = self._result(call)
        return steps if isinstance(steps, int) else None  # reading the rollout raises the error


class Published(NamedTuple):
    """Weights and hooks that are newer than those of a worker.

    Attributes:
        weights: Packed weights; ``None`` if the worker has the newest.
        hooks: Serial number and pickled hook, by name.
    """

    serial: int
    version: int
    weights: Buffer | None
    hooks: dict[str, tuple[int, Buffer]]


class WorkerEnd(Protocol):
    """The worker's end of a channel, as far as a `WorkerHost` needs it."""

    @property
    def in_place(self) -> bool:
        """Whether the worker shares memory with the driver."""

    @property
    def moves(self) -> int:
        """Number that grows with each step of a rollout. May be read at any time."""

    def bytes_of(self, form: Any) -> bytes:
        """Return the bytes of a value from its form in a request."""

    def control(self, number: int, min_steps: int) -> RolloutControl:
        """Return the control of the rollout of a request."""

    def published(self, serial: int, hooks: Mapping[str, int]) -> Published | None:
        """Return what is newer than the weights with this serial number and these hooks'."""


class MailboxEnd:
    """The worker's end of a MailboxChannel."""

    in_place: ClassVar[bool] = True

    def __init__(self, mailbox: WorkerMailbox) -> None:
        self._mailbox = mailbox

    @property
    def moves(self) -> int:
        """See `WorkerEnd`."""
        return self._mailbox.steps.value

    def bytes_of(self, form: Any) -> bytes:
        """See `WorkerEnd`."""
        return Memory.attach(form).array().tobytes()

    def control(self, number: int, min_steps: int) -> RolloutControl:
        """See `WorkerEnd`."""
        return RolloutControl(self._mailbox.stop, number, min_steps, self._mailbox.steps)

    def published(self, serial: int, hooks: Mapping[str, int]) -> Published | None:
        """See `WorkerEnd`."""
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
        """See `WorkerEnd`."""
        return self._moves.value

    def bytes_of(self, form: Any) -> bytes:
        """See `WorkerEnd`."""
        return bytes(form)

    def control(self, number: int, min_steps: int) -> RolloutControl:
        """See `WorkerEnd`."""
        return RolloutControl(self._stop, number, min_steps, self._moves)

    def published(self, serial: int, hooks: Mapping[str, int]) -> Published | None:
        """See `WorkerEnd`."""
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
