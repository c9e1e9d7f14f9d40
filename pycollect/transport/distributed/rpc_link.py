"""The driver's end of links that use calls of torch.distributed.rpc.

The driver calls and a rank answers. One kind of call pushes a value to the rank; the other pulls a
value and waits until the rank has one. A waiting call also shows the driver that a rank has died.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.futures import Future

from pycollect.transport.distributed.address import Seal
from pycollect.transport.distributed.links import LinkBrokenError
from pycollect.transport.distributed.meeting import DRIVER, WORKER, Meeting
from pycollect.transport.distributed.rendezvous import LOOPBACK
from pycollect.transport.distributed.rpc import (
    AGENT,
    RPC,
    Parts,
    RankLink,
    parts_of,
    pull,
    push,
    rpc_keys,
    value_of,
)

_NO_TIMEOUT = 0.0  # of a call that waits for a rank's value


@dataclass(frozen=True)
class RpcCarrier:
    """Links that use calls of torch.distributed.rpc.

    Attributes:
        options: Options of TensorPipe.
    """

    options: Mapping[str, Any]
    name: ClassVar[str] = "rpc"

    def driver_end(self, meeting: Meeting) -> DriverLink:
        """Wait for the rank and return the driver's end."""
        return DriverLink(meeting, self.options)

    def rank_end(self, meeting: Meeting) -> RankLink:
        """Return the rank's end."""
        name = f"pycollect-{secrets.token_hex(16)}"  # unique
        return RankLink(meeting, name, self.options)


class DriverLink:
    """The driver's end of a link, which calls the rank. Waits for the rank when it is created.

    Args:
        meeting: Meeting with the rank.
        options: TensorPipe options of a new agent, if this process has none.
    """

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

    def send(self, value: Any) -> RpcSent:
        """Send a value without waiting."""
        parts = parts_of(value, self._outgoing)
        self._pushed += 1
        try:
            call = AGENT.call(self._rank, self._calls_key, push, self._pushed, parts)
        except RuntimeError as error:  # torch raises it, for example, if the agent has ended
            raise LinkBrokenError(str(error)) from error
        call.add_done_callback(self._note_failure)
        return RpcSent(call)

    def _note_failure(self, call: Future[None]) -> None:
        try:
            call.value()
        except RuntimeError as error:
            self._events.put(str(error))

    def receive(self) -> Any:
        """Wait for the next value."""
        self._pulled += 1
        try:
            call = AGENT.call(self._rank, self._calls_key, pull, self._pulled, timeout=_NO_TIMEOUT)
            call.add_done_callback(self._events.put)
            event = self._events.get()
            if isinstance(event, str):
                raise LinkBrokenError(event)
            parts: Parts | None = event.value()
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        if parts is None:
            raise LinkBrokenError("the rank has closed the connection")
        return value_of(parts, self._incoming)

    def close(self) -> None:
        """Stop calling the rank, and wake a thread that waits for it. Idempotent."""
        if self._closing.acquire(blocking=False):  # never released
            self._events.put("the connection is closed")
            AGENT.remove_peer(self._rank)
            AGENT.release()


class RpcSent:
    """A call that pushes a value."""

    def __init__(self, call: Future[None]) -> None:
        self._call = call

    def wait(self) -> None:
        """Wait until the rank has the value.

        Raises:
            LinkBrokenError: The rank will never get it.
        """
        try:
            self._call.wait()
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
