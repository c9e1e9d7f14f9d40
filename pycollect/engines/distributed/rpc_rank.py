"""The rank's end of a link by calls of torch.distributed.rpc: what the driver calls there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import rpc
from torch.futures import Future

from pycollect.engines.distributed.groups import DRIVER, WORKER
from pycollect.engines.distributed.link import LinkBrokenError, packed, unpacked
from pycollect.engines.distributed.meeting import Meeting
from pycollect.engines.distributed.rpc_agent import AGENT
from pycollect.engines.distributed.seal import ForgedError, Seal, signature
from pycollect.engines.messages import Buffer

Parts = tuple[bytes, list[torch.Tensor], list[bytes]]
"""A value in transit: its pickle, its arrays, and the signatures of both."""

RPC = "rpc"
"""Key of the name and the address of a rank's agent."""

_TOLD_SECONDS = 1.0


def parts_of(value: Any, seal: Seal) -> Parts:
    """A value as it travels."""
    data, arrays = packed(value)
    seal.advance()
    parts: list[bytes | Buffer] = [data, *arrays]
    signatures = [seal.sign(number, part) for number, part in enumerate(parts)]
    return data, [torch.from_numpy(array) for array in arrays], signatures


def value_of(parts: Parts, seal: Seal) -> Any:
    """The value that has arrived.

    Raises:
        LinkBrokenError: it was not signed by the other end, or is not the next one.
    """
    data, tensors, signatures = parts
    arrays = [tensor.numpy() for tensor in tensors]
    signed: list[bytes | Buffer] = [data, *arrays]
    seal.advance()
    try:
        for number, (given, part) in enumerate(zip(signatures, signed, strict=True)):
            seal.check(number, given, part)
    except (ForgedError, ValueError) as error:
        raise LinkBrokenError(str(error)) from error
    return unpacked(data, arrays)


def rpc_keys(meeting: Meeting) -> tuple[bytes, bytes]:
    """Return the keys for signatures of calls and of their answers, the same for all ranks."""
    token = meeting.address.token
    return signature(token, b"rpc calls"), signature(token, b"rpc answers")


def take(number: int, parts: Parts) -> None:
    """Called by the driver: its value of that number. They may come in another order."""
    _end().take(number, parts)


@rpc.functions.async_execution  # type: ignore[untyped-decorator] # of torch
def give(number: int) -> Future[Parts | None]:
    """Called by the driver, which has all values before that number: wait for it.

    Returns:
        The value; None: there is none any more.
    """
    return _end().give(number)


class RankLink:
    """The rank's end: is called.

    Args:
        meeting: ends with the driver.
        name: of its agent.
        options: of TensorPipe.
    """

    def __init__(self, meeting: Meeting, name: str, options: Mapping[str, Any]) -> None:
        self._own, self._other = Seal(meeting.key, WORKER), Seal(meeting.key, DRIVER)
        self._changed = threading.Condition()
        self._early: dict[int, Parts] = {}
        self._next = 1  # to be taken
        self._taken: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        self._sent = 0
        self._unasked: dict[int, Parts] = {}
        self._asked: dict[int, Future[Parts | None]] = {}
        self._had = 0  # up to which the driver has them
        self._broken = False
        _ENDS.append(self)
        calls, answers = rpc_keys(meeting)
        AGENT.enter(name, meeting.address.own_host(), options, answers, calls)
        meeting.publish(RPC, (name, AGENT.url()))
        threading.Thread(target=self._await_end, args=(meeting,), daemon=True).start()

    def _await_end(self, meeting: Meeting) -> None:
        """Wait until the driver is gone."""
        meeting.await_end()
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._taken.put(None)

    def take(self, number: int, parts: Parts) -> None:
        """A value has come."""
        with self._changed:
            self._early[number] = parts
            while self._next in self._early:
                self._taken.put(self._early.pop(self._next))
                self._next += 1

    def give(self, number: int) -> Future[Parts | None]:
        """The driver waits for a value."""
        future: Future[Parts | None] = Future()
        with self._changed:
            self._had = number - 1
            self._changed.notify_all()
            if number in self._unasked:
                future.set_result(self._unasked.pop(number))
            else:
                self._asked[number] = future
        return future

    def send(self, value: Any) -> RankSent:
        """Send a value, and do not wait."""
        parts = parts_of(value, self._own)
        with self._changed:
            self._sent += 1
            number = self._sent
            future = self._asked.pop(number, None)
            if future is None:
                self._unasked[number] = parts
        if future is not None:
            future.set_result(parts)
        return RankSent(self, number)

    def await_had(self, number: int) -> None:
        """Until the driver has that value. LinkBrokenError where it never will."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._had >= number)
            if self._had < number:
                raise LinkBrokenError("the driver is gone")

    def receive(self) -> Any:
        """The next value. Waits."""
        parts = self._taken.get()
        if parts is None:
            raise LinkBrokenError("the driver is gone")
        return value_of(parts, self._other)

    def close(self) -> None:
        """Tell the driver that nothing comes any more.

        The agent ends with this process, which the driver ends when it has heard of that; where
        it cannot, it was told after a while.
        """
        with self._changed:
            futures = list(self._asked.values())
            self._asked.clear()
        for future in futures:
            future.set_result(None)
        with self._changed:
            self._changed.wait_for(lambda: self._broken, _TOLD_SECONDS)


class RankSent:
    """A value that waits to be asked for, or is on its way."""

    def __init__(self, link: RankLink, number: int) -> None:
        self._link, self._number = link, number

    def wait(self) -> None:
        """Until the driver has it. LinkBrokenError where it never will."""
        self._link.await_had(self._number)


_ENDS: list[RankLink] = []
"""That of this process."""


def _end() -> RankLink:
    return _ENDS[-1]
