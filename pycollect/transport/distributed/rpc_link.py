"""Links in which calls of torch.distributed.rpc carry the messages.

The driver calls and a rank answers: to take a value, and to give one as soon as it has one. A call
that waits there is how the driver learns of a death.
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
    give,
    parts_of,
    rpc_keys,
    take,
    value_of,
)

_NO_END = 0.0  # of a call that waits for what a rank has to say


@dataclass(frozen=True)
class RpcCarrier:
    """Links by calls.

    Attributes:
        options: of TensorPipe.
    """

    options: Mapping[str, Any]
    name: ClassVar[str] = "rpc"

    def driver_end(self, meeting: Meeting) -> DriverLink:
        """The driver's end. Waits for the rank."""
        return DriverLink(meeting, self.options)

    def rank_end(self, meeting: Meeting) -> RankLink:
        """The rank's end."""
        name = f"pycollect-{secrets.token_hex(16)}"  # no other agent has it
        return RankLink(meeting, name, self.options)


class DriverLink:
    """The driver's end: calls a rank. Waits for it.

    Args:
        meeting: with the rank.
        options: of an agent of this process, if it has none.
    """

    def __init__(self, meeting: Meeting, options: Mapping[str, Any]) -> None:
        name, url = meeting.read(RPC)
        self._calls_key, answers = rpc_keys(meeting)
        self._own, self._other = Seal(meeting.key, DRIVER), Seal(meeting.key, WORKER)
        # No process calls the driver.
        AGENT.enter("pycollect-driver", LOOPBACK, options, self._calls_key, answers)
        try:
            self._rank = AGENT.meet(name, url)
        except BaseException:
            AGENT.leave()
            raise
        self._taken = self._given = 0
        self._came: queue.SimpleQueue[Future[Any] | str] = queue.SimpleQueue()
        self._closing = threading.Lock()

    def send(self, value: Any) -> RpcSent:
        """Send a value, and do not wait."""
        parts = parts_of(value, self._own)
        self._taken += 1
        try:
            call = AGENT.call(self._rank, self._calls_key, take, self._taken, parts)
        except RuntimeError as error:  # of torch: there is no agent any more, say
            raise LinkBrokenError(str(error)) from error
        call.add_done_callback(self._note_failure)
        return RpcSent(call)

    def _note_failure(self, call: Future[None]) -> None:
        try:
            call.value()
        except RuntimeError as error:
            self._came.put(str(error))

    def receive(self) -> Any:
        """The next value. Waits."""
        self._given += 1
        try:
            call = AGENT.call(self._rank, self._calls_key, give, self._given, timeout=_NO_END)
            call.add_done_callback(self._came.put)
            came = self._came.get()
            if isinstance(came, str):
                raise LinkBrokenError(came)
            parts: Parts | None = came.value()
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        if parts is None:
            raise LinkBrokenError("the rank has closed the connection")
        return value_of(parts, self._other)

    def close(self) -> None:
        """Call it no more, and wake whoever waits for it. Idempotent."""
        if self._closing.acquire(blocking=False):  # kept for good
            self._came.put("the connection is closed")
            AGENT.part(self._rank)
            AGENT.leave()


class RpcSent:
    """A call on its way."""

    def __init__(self, call: Future[None]) -> None:
        self._call = call

    def wait(self) -> None:
        """Until the rank has it. LinkBrokenError where it never will."""
        try:
            self._call.wait()
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
