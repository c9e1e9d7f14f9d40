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

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import rpc
from torch.futures import Future

from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.link import LinkBrokenError
from pycollect.engines.distributed.rendezvous import LOOPBACK
from pycollect.engines.distributed.rpc_agent import AGENT
from pycollect.engines.distributed.rpc_rank import Parts, RankLink, give, parts_of, take, value_of

_NO_END = 0.0  # of a call that waits for what a rank has to say
_KEY = "rpc"


@dataclass(frozen=True)
class RpcCarrier:
    """Links by calls.

    Attributes:
        options: of TensorPipe.
    """

    options: Mapping[str, Any]
    name: ClassVar[str] = "rpc"

    def driver_end(self, address: RankAddress) -> DriverLink:
        """The driver's end. Waits for the rank."""
        name, url = address.told(address.store(), _KEY)
        return DriverLink(name, url, self.options)

    def rank_end(self, address: RankAddress, store: PrefixStore) -> RankLink:
        """The rank's end."""
        name = f"pycollect-{secrets.token_hex(16)}"  # no other agent has it
        link = RankLink(address, name, self.options)
        address.tell(store, _KEY, (name, AGENT.url()))
        return link


class DriverLink:
    """The driver's end: calls a rank.

    Args:
        name, url: of the rank's agent.
        options: of an agent of this process, if it has none.
    """

    def __init__(self, name: str, url: bytes, options: Mapping[str, Any]) -> None:
        AGENT.enter("pycollect-driver", LOOPBACK, options)  # nobody calls the driver
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
        parts = parts_of(value)
        self._taken += 1
        try:
            call = rpc.rpc_async(self._rank, take, (self._taken, parts))
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
            call = rpc.rpc_async(self._rank, give, (self._given,), timeout=_NO_END)
            call.add_done_callback(self._came.put)
            came = self._came.get()
            if isinstance(came, str):
                raise LinkBrokenError(came)
            parts: Parts | None = came.value()
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        if parts is None:
            raise LinkBrokenError("the rank has closed it")
        return value_of(parts)

    def close(self) -> None:
        """Call it no more, and wake whoever waits for it. Idempotent."""
        if self._closing.acquire(blocking=False):  # kept for good
            self._came.put("it is closed")
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
