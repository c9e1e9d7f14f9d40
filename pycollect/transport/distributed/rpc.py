"""An agent of torch.distributed.rpc in this process, and the rank's end of a link through it.

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

_INTERFACE = "TP_SOCKET_IFNAME"  # environment variable: interface on which TensorPipe listens
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IDS = 1 << 15  # number of worker ids: torch uses signed 16-bit numbers
_TORCHS_PICKLER: Any = internal._internal_rpc_pickler


class SignedPickler:
    """Replaces the pickler of torch's RPC: signs its pickles and unpickles only signed ones.

    The signature follows the pickle, where torch's own pickler ignores it.

    Args:
        key: Key for the signatures of this process.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.trusted: set[bytes] = set()
        """Keys of the processes that may send messages."""
        self.agent: Any = None
        """The agent that uses this pickler, or ``None`` until it has started."""

    def _protects(self) -> bool:
        """Return whether the current agent is ours rather than the program's."""
        return self.agent is None or not _is_current_rpc_agent_set() or _current() is self.agent

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle and sign a value."""
        data, tensors = _TORCHS_PICKLER.serialize(value)
        return data + signature(self._key, data) if self._protects() else data, tensors

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
        """Check the signature and unpickle.

        Raises:
            ForgedError: The sender does not know the secret.
        """
        if self._protects():
            data, given = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
            if not any(is_signed(given, key, data) for key in self.trusted):
                raise ForgedError("an RPC message is not signed by a process of this collector")
        return _TORCHS_PICKLER.deserialize(data, tensors)


def _signed_agent(name: str, host: str, options: Mapping[str, Any], key: bytes) -> SignedPickler:
    """Start an agent whose messages are signed; return its pickler."""
    pickler = SignedPickler(key)
    internal._internal_rpc_pickler = pickler  # type: ignore[assignment] # before anything arrives
    try:
        _start(name, host, options)
    except BaseException:
        internal._internal_rpc_pickler = _TORCHS_PICKLER
        raise
    pickler.agent = _current()
    return pickler


class RpcAgent:
    """The agent that links use: the program's own, or else one that lives as long as the links."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links = 0
        self._pickler: SignedPickler | None = None  # None if the agent is the program's
        self._last_id = _IDS

    def acquire(
        self, name: str, host: str, options: Mapping[str, Any], key: bytes, peer_key: bytes
    ) -> None:
        """Count one more link; start an agent if this process has none.

        Args:
            name: Name of a new agent.
            host: Address on which a new agent listens.
            options: TensorPipe options of a new agent.
            key: Key for the signatures of this process.
            peer_key: Key for the signatures of the other end.
        """
        with self._lock:
            if not _is_current_rpc_agent_set():
                self._pickler = _signed_agent(name, host, options, key)
                self._links, self._last_id = 0, _IDS
            if self._pickler is not None:
                self._pickler.trusted.add(peer_key)
            self._links += 1

    def release(self) -> None:
        """Count one link less; end an agent of ours after the last one.

        No call of the agent may be running.
        """
        with self._lock:
            self._links -= 1
            if self._links == 0 and self._pickler is not None:
                self._end()

    def end(self) -> None:
        """End an agent of ours. An agent that outlives the interpreter crashes the process."""
        with self._lock:
            if self._pickler is not None:
                self._end()

    def _end(self) -> None:
        self._pickler = None
        if _is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        internal._internal_rpc_pickler = _TORCHS_PICKLER

    def url(self) -> bytes:
        """Return the address on which the agent listens."""
        agent = _current()
        return bytes(agent.store.get(f"addrs/{agent.get_worker_info().name}"))

    def add_peer(self, name: str, url: bytes) -> WorkerInfo:
        """Register the agent of another process, and return its id for calls."""
        agent = _current()
        with self._lock:
            info = WorkerInfo(name, self._unused_id(agent))
            agent.store.set(f"addrs/{name}", url)
            agent._update_group_membership(info, [], {}, True)
        return info

    def _unused_id(self, agent: Any) -> int:
        """Return an id that was never used: an agent keeps even broken connections by id."""
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
        """Call a function like `rpc_async`, and sign the call with that key."""
        data, tensors = _TORCHS_PICKLER.serialize(internal.PythonUDF(function, arguments, {}))
        is_async = hasattr(function, "_wrapped_async_rpc_function")
        signed = data + signature(key, data)
        call: Future[Any] = _invoke_rpc_python_udf(info, signed, tensors, timeout, is_async)
        return call

    def remove_peer(self, info: WorkerInfo) -> None:
        """Forget the agent of another process."""
        with self._lock:
            if _is_current_rpc_agent_set():
                agent = _current()
                agent._update_group_membership(info, [], {}, False)
                agent.store.delete_key(f"addrs/{info.name}")


AGENT = RpcAgent()
"""The agent of this process."""

atexit.register(AGENT.end)


def _current() -> Any:
    return _get_current_rpc_agent()


def _start(name: str, host: str, options: Mapping[str, Any]) -> None:
    """Start an agent as `init_rpc` does, for a group of one that is not static."""
    init_autograd(0)
    backend = rpc.TensorPipeRpcBackendOptions(**options)
    with _listening_at(host):
        _set_and_start_rpc_agent(TensorPipeAgent(HashStore(), name, 0, None, backend, {}, []))


@contextmanager
def _listening_at(host: str) -> Iterator[None]:
    """Make TensorPipe listen on the interface of an address, unless the environment sets one."""
    interface = None if _INTERFACE in os.environ else _interface_of(host)
    if interface is not None:
        os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        if interface is not None:
            del os.environ[_INTERFACE]


def _interface_of(host: str) -> str | None:
    """Return the name of this machine's interface with that IPv4 address, or ``None``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None


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
    """Check and unpickle a value that has arrived.

    Raises:
        LinkBrokenError: The value was not signed by the other end, or is out of order.
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


def push(number: int, parts: Parts) -> None:
    """Accept a value from the driver, which calls this. Values may arrive out of order."""
    _end().push(number, parts)


@rpc.functions.async_execution  # type: ignore[untyped-decorator] # of torch
def pull(number: int) -> Future[Parts | None]:
    """Return a future of the rank's value of that number, for the driver.

    The driver calls this when it has all earlier values.

    Returns:
        Future of the value, or of ``None`` if no more values come.
    """
    return _end().pull(number)


class RankLink:
    """The rank's end of a link; the driver calls it.

    Args:
        meeting: Meeting with the driver. The link ends with it.
        name: Name of a new agent.
        options: TensorPipe options of a new agent.
    """

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

    def send(self, value: Any) -> RankSent:
        """Send a value without waiting."""
        parts = parts_of(value, self._outgoing)
        with self._changed:
            self._sent += 1
            number = self._sent
            future = self._pulls.pop(number, None)
            if future is None:
                self._unpulled[number] = parts
        if future is not None:
            future.set_result(parts)
        return RankSent(self, number)

    def await_delivery(self, number: int) -> None:
        """Wait until the driver has that value.

        Raises:
            LinkBrokenError: The driver will never get it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._delivered >= number)
            if self._delivered < number:
                raise LinkBrokenError("the driver is gone")

    def receive(self) -> Any:
        """Wait for the next value."""
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


class RankSent:
    """A value that waits for the driver's call or is being sent."""

    def __init__(self, link: RankLink, number: int) -> None:
        self._link, self._number = link, number

    def wait(self) -> None:
        """Wait until the driver has the value.

        Raises:
            LinkBrokenError: The driver will never get it.
        """
        self._link.await_delivery(self._number)


_ENDS: list[RankLink] = []
"""The rank's end of this process, if it has one."""


def _end() -> RankLink:
    return _ENDS[-1]
