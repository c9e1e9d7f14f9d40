"""An agent of torch.distributed.rpc in this process, and what runs in a rank that has one.

`init_rpc` makes a group of all processes. A process that joins or leaves asks every other one under
a lock of the group, and waits forever if one of them has died. Here no process joins a group: the
driver gets the address of each rank, and a rank only answers.

This uses private parts of torch; `tests/test_rpc.py` fails if a new version changes them.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_autograd import _init as init_autograd
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_rpc import (
    TensorPipeAgent,
    WorkerInfo,
    _get_current_rpc_agent,
    _invoke_rpc_python_udf,
    _is_current_rpc_agent_set,
    _set_and_start_rpc_agent,
)
from torch.distributed import rpc
from torch.distributed.rpc import internal
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.futures import Future

from pycollect.transport.distributed.address import (
    SIGNATURE_BYTES,
    ForgedError,
    Seal,
    is_signed,
    signature,
)
from pycollect.transport.distributed.links import LinkBrokenError, packed, unpacked
from pycollect.transport.distributed.meeting import DRIVER, WORKER, Meeting
from pycollect.transport.messages import Buffer

_INTERFACE = "TP_SOCKET_IFNAME"  # where TensorPipe reads at which interface it is to listen
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IDS = 1 << 15  # of workers: 16 bits with a sign
_TORCHS_PICKLER: Any = internal._internal_rpc_pickler


class SignedPickler:
    """Replaces the pickler of torch's RPC: unpickles signed bytes only, and signs its own.

    A signature follows the pickle; torch's own pickler ignores it there.

    Args:
        own: key for the signatures of this process.
    """

    def __init__(self, own: bytes) -> None:
        self._own = own
        self.trusted: set[bytes] = set()
        """Keys of the processes that may send something."""
        self.agent: Any = None
        """The agent that is protected; None: the one that is about to start."""

    def _protects(self) -> bool:
        """Return whether the current agent is not another one, of the program."""
        return self.agent is None or not _is_current_rpc_agent_set() or _current() is self.agent

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle, and sign."""
        data, tensors = _TORCHS_PICKLER.serialize(value)
        return data + signature(self._own, data) if self._protects() else data, tensors

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        """Check the signature, and unpickle.

        Raises:
            ForgedError: these bytes come from a process that does not know the secret.
        """
        if self._protects():
            data, given = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
            if not any(is_signed(given, key, data) for key in self.trusted):
                raise ForgedError("an RPC message is not signed by a process of this collector")
        return _TORCHS_PICKLER.deserialize(data, tensors)


def _signed_agent(name: str, host: str, options: Mapping[str, Any], own: bytes) -> SignedPickler:
    """Start an agent whose messages are signed; return its pickler."""
    pickler = SignedPickler(own)
    internal._internal_rpc_pickler = pickler  # type: ignore[assignment] # before anything arrives
    try:
        _start(name, host, options)
    except BaseException:
        internal._internal_rpc_pickler = _TORCHS_PICKLER
        raise
    pickler.agent = _current()
    return pickler


class RpcAgent:
    """The agent while links are there that need it: the program's own, or else one for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links = 0
        self._pickler: SignedPickler | None = None  # of an agent of ours
        self._last_id = _IDS

    def enter(
        self, name: str, host: str, options: Mapping[str, Any], own: bytes, other: bytes
    ) -> None:
        """There is one more link.

        Args:
            name: of the agent, if there is none yet.
            host: at which it is to listen then.
            options: of TensorPipe then.
            own, other: keys for the signatures of this process and of the other end.
        """
        with self._lock:
            if not _is_current_rpc_agent_set():
                self._pickler = _signed_agent(name, host, options, own)
                self._links, self._last_id = 0, _IDS
            if self._pickler is not None:
                self._pickler.trusted.add(other)
            self._links += 1

    def leave(self) -> None:
        """A link is gone. An agent that nobody needs any more ends: the program may have its own.

        Nobody may be inside of what it calls.
        """
        with self._lock:
            self._links -= 1
            if self._links == 0 and self._pickler is not None:
                self._end()

    def end(self) -> None:
        """End it: this process does. An agent that outlives Python takes it down."""
        with self._lock:
            if self._pickler is not None:
                self._end()

    def _end(self) -> None:
        self._pickler = None
        if _is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        internal._internal_rpc_pickler = _TORCHS_PICKLER

    def url(self) -> bytes:
        """Where it listens."""
        agent = _current()
        return bytes(agent.store.get(f"addrs/{agent.get_worker_info().name}"))

    def meet(self, name: str, url: bytes) -> WorkerInfo:
        """Whom to call, of an agent elsewhere."""
        agent = _current()
        with self._lock:
            info = WorkerInfo(name, self._unused_id(agent))
            agent.store.set(f"addrs/{name}", url)
            agent._update_group_membership(info, [], {}, True)
        return info

    def _unused_id(self, agent: Any) -> int:
        """None is given twice: an agent keeps connections by it, broken ones, too."""
        taken = {info.id for info in agent.get_worker_infos()}
        self._last_id -= 1
        while self._last_id in taken:
            self._last_id -= 1
        if self._last_id < 0:
            raise RuntimeError(f"the RPC agent has used all its {_IDS} ids of ranks")
        return self._last_id

    def call(
        self,
        info: WorkerInfo,
        key: bytes,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[Any]:
        """Call like `rpc_async`, and sign the call with that key."""
        data, tensors = _TORCHS_PICKLER.serialize(internal.PythonUDF(function, arguments, {}))
        waits = hasattr(function, "_wrapped_async_rpc_function")
        signed = data + signature(key, data)
        call: Future[Any] = _invoke_rpc_python_udf(info, signed, tensors, timeout, waits)
        return call

    def part(self, info: WorkerInfo) -> None:
        """It is called no more."""
        with self._lock:
            if _is_current_rpc_agent_set():
                agent = _current()
                agent._update_group_membership(info, [], {}, False)
                agent.store.delete_key(f"addrs/{info.name}")


AGENT = RpcAgent()
"""That of this process."""

atexit.register(AGENT.end)


def _current() -> Any:
    return _get_current_rpc_agent()


def _start(name: str, host: str, options: Mapping[str, Any]) -> None:
    """What `init_rpc` does, for a group of one that is not static."""
    init_autograd(0)
    own = rpc.TensorPipeRpcBackendOptions(**options)
    with _listening_at(host):
        _set_and_start_rpc_agent(TensorPipeAgent(HashStore(), name, 0, None, own, {}, []))


@contextmanager
def _listening_at(host: str) -> Iterator[None]:
    """TensorPipe listens at the interface that has this number, unless it was told another one."""
    interface = None if _INTERFACE in os.environ else _interface_of(host)
    if interface is not None:
        os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if interface is not None:
            del os.environ[_INTERFACE]


def _interface_of(host: str) -> str | None:
    """The name of the interface of this machine that has this number of IPv4; None: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


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
