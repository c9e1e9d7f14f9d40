"""Links that use calls of torch.distributed.rpc: both ends, and how they are made.

The driver calls and a rank answers. One kind of call pushes a value to the rank; the other pulls a
value and waits until the rank has one. A waiting call also shows the driver that a rank has died.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed import rpc
from torch.futures import Future

from pycollect.transport.distributed.links import LinkBrokenError, Sent, broken_by, packed, unpacked
from pycollect.transport.distributed.meeting import (
    DRIVER,
    WORKER,
    ForgedError,
    Meeting,
    Seal,
    signature,
)
from pycollect.transport.distributed.rendezvous import LOOPBACK
from pycollect.transport.distributed.rpc import AGENT
from pycollect.transport.messages import Buffer

Parts = tuple[bytes, list[torch.Tensor], list[bytes]]
"""A value that is being sent: its pickle, its arrays, and the signatures of both."""

RPC = "rpc"
"""Key under which a rank publishes the name and address of its agent."""

_CLOSE_SECONDS = 1.0


def parts_of(value: Any, seal: Seal) -> Parts:
    """Pickle and sign a value."""
    data, arrays = packed(value)
    seal.advance()
    parts: list[bytes | Buffer] = [data, *arrays]
    signatures = [seal.sign(number, part) for number, part in enumerate(parts)]
    return data, [torch.from_numpy(array) for array in arrays], signatures


def value_of(parts: Parts, seal: Seal) -> Any:
    """Check and unpickle a value that has arrived."""
    data, tensors, signatures = parts
    arrays = [tensor.numpy() for tensor in tensors]
    signed: list[bytes | Buffer] = [data, *arrays]
    seal.advance()
    with broken_by(ForgedError, ValueError):
        for number, (given, part) in enumerate(zip(signatures, signed, strict=True)):
            seal.check(number, given, part)
    return unpacked(data, arrays)


def rpc_keys(meeting: Meeting) -> tuple[bytes, bytes]:
    """Return the keys for signatures of calls and of their answers, the same for all ranks."""
    token = meeting.address.token
    return signature(token, b"rpc calls"), signature(token, b"rpc answers")


def push(number: int, parts: Parts) -> None:
    """Accept a value from the driver, which calls this. Values may arrive out of order."""
    _end().push(number, parts)


@rpc.functions.async_execution  # type: ignore[untyped-decorator] # of torch
def pull(number: int) -> Future[Parts | None]:
    """Return a future of the rank's value of that number, or of ``None`` if no more come.

    The driver calls this when it has all earlier values.
    """
    return _end().pull(number)


class RankLink:
    """The rank's end of a link, which the driver calls; the link ends with the meeting."""

    def __init__(self, meeting: Meeting, name: str, options: Mapping[str, Any]) -> None:
        self._outgoing, self._incoming = Seal(meeting.key, WORKER), Seal(meeting.key, DRIVER)
        self._changed = threading.Condition()
        self._early: dict[int, Parts] = {}  # pushed values that came out of order
        self._next = 1  # number of the next pushed value
        self._pushed: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        self._sent = 0
        self._unpulled: dict[int, Parts] = {}  # values that wait for the driver's call
        self._pulls: dict[int, Future[Parts | None]] = {}  # calls that wait for a value
        self._delivered = 0  # the driver has all values up to this number
        self._broken = False
        _ENDS.append(self)
        calls, answers = rpc_keys(meeting)
        AGENT.acquire(name, meeting.address.local_host(), options, answers, calls)
        meeting.publish(RPC, (name, AGENT.url()))
        threading.Thread(target=self._await_end, args=(meeting,), daemon=True).start()

    def _await_end(self, meeting: Meeting) -> None:
        """Wait until the driver is gone, then wake all waiting threads."""
        meeting.await_end()
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._pushed.put(None)

    def push(self, number: int, parts: Parts) -> None:
        """Queue a value from the driver, in order."""
        with self._changed:
            self._early[number] = parts
            while self._next in self._early:
                self._pushed.put(self._early.pop(self._next))
                self._next += 1

    def pull(self, number: int) -> Future[Parts | None]:
        """Return a future of the value of that number. The driver has all earlier values."""
        future: Future[Parts | None] = Future()
        with self._changed:
            self._delivered = number - 1
            self._changed.notify_all()
            if number in self._unpulled:
                future.set_result(self._unpulled.pop(number))
            else:
                self._pulls[number] = future
        return future

    def send(self, value: Any) -> Sent:
        parts = parts_of(value, self._outgoing)
        with self._changed:
            self._sent += 1
            number = self._sent
            future = self._pulls.pop(number, None)
            if future is None:
                self._unpulled[number] = parts
        if future is not None:
            future.set_result(parts)
        return partial(self.await_delivery, number)

    def await_delivery(self, number: int) -> None:
        """Wait until the driver has that value."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._delivered >= number)
            if self._delivered < number:
                raise LinkBrokenError("the driver is gone")

    def receive(self) -> Any:
        parts = self._pushed.get()
        if parts is None:
            raise LinkBrokenError("the driver is gone")
        return value_of(parts, self._incoming)

    def close(self) -> None:
        """Notify the driver that no more values come.

        The agent ends with this process. The driver ends the process once it is notified, so wait
        for that a little.
        """
        with self._changed:
            futures = list(self._pulls.values())
            self._pulls.clear()
        for future in futures:
            future.set_result(None)
        with self._changed:
            self._changed.wait_for(lambda: self._broken, _CLOSE_SECONDS)


_ENDS: list[RankLink] = []
"""The rank's end of this process, if it has one."""


def _end() -> RankLink:
    return _ENDS[-1]


_NO_TIMEOUT = 0.0  # of a call that waits for a rank's value


@dataclass(frozen=True)
class RpcCarrier:
    """Links that use calls of torch.distributed.rpc."""

    options: Mapping[str, Any]
    name: ClassVar[str] = "rpc"

    def driver_end(self, meeting: Meeting) -> DriverLink:
        return DriverLink(meeting, self.options)

    def rank_end(self, meeting: Meeting) -> RankLink:
        name = f"pycollect-{secrets.token_hex(16)}"  # unique
        return RankLink(meeting, name, self.options)


class DriverLink:
    """The driver's end of a link, which calls the rank. Waits for the rank when it is created."""

    def __init__(self, meeting: Meeting, options: Mapping[str, Any]) -> None:
        name, url = meeting.read(RPC)
        self._calls_key, answers = rpc_keys(meeting)
        self._outgoing, self._incoming = Seal(meeting.key, DRIVER), Seal(meeting.key, WORKER)
        # No process calls the driver.
        AGENT.acquire("pycollect-driver", LOOPBACK, options, self._calls_key, answers)
        try:
            self._rank = AGENT.add_peer(name, url)
        except BaseException:
            AGENT.release()
            raise
        self._pushed = self._pulled = 0
        self._events: queue.SimpleQueue[Future[Any] | str] = queue.SimpleQueue()
        self._closing = threading.Lock()

    def send(self, value: Any) -> Sent:
        parts = parts_of(value, self._outgoing)
        self._pushed += 1
        with broken_by(RuntimeError):  # for example, because the agent has ended
            call = AGENT.call(self._rank, self._calls_key, push, self._pushed, parts)
        call.add_done_callback(self._note_failure)
        return partial(_await, call)

    def _note_failure(self, call: Future[None]) -> None:
        try:
            call.value()
        except RuntimeError as error:
            self._events.put(str(error))

    def receive(self) -> Any:
        self._pulled += 1
        with broken_by(RuntimeError):
            call = AGENT.call(self._rank, self._calls_key, pull, self._pulled, timeout=_NO_TIMEOUT)
            call.add_done_callback(self._events.put)
            event = self._events.get()
            if isinstance(event, str):
                raise LinkBrokenError(event)
            parts: Parts | None = event.value()
        if parts is None:
            raise LinkBrokenError("the rank has closed the connection")
        return value_of(parts, self._incoming)

    def close(self) -> None:
        """Stop calling the rank, and wake a thread that waits for it. Idempotent."""
        if self._closing.acquire(blocking=False):  # never released
            self._events.put("the connection is closed")
            AGENT.remove_peer(self._rank)
            AGENT.release()


def _await(call: Future[None]) -> None:
    """Wait until the rank has a value that the call pushes."""
    with broken_by(RuntimeError):
        call.wait()
