"""An agent of torch.distributed.rpc in this process.

`init_rpc` makes a group of all processes. A process that joins or leaves asks every other one under
a lock of the group, and waits forever if one of them has died. Here no process joins a group: the
driver gets the address of each rank, and a rank only answers.

This uses private parts of torch; `tests/transport/test_rpc.py` fails if a new version changes them.
"""

from __future__ import annotations

import atexit
import fcntl
import os
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

from pycollect.transport.distributed.meeting import (
    SIGNATURE_BYTES,
    ForgedError,
    is_signed,
    signature,
)

_INTERFACE = "TP_SOCKET_IFNAME"  # environment variable: interface on which TensorPipe listens
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IDS = 1 << 15  # number of worker ids: torch uses signed 16-bit numbers
_TORCHS_PICKLER: Any = internal._internal_rpc_pickler


class SignedPickler:
    """Replaces the pickler of torch's RPC: signs its pickles and unpickles only signed ones.

    The signature follows the pickle, where torch's own pickler ignores it.
    """

    # Torch's compiler calls it when it is imported, which may be in the first call of a policy.
    _register_reducer = _TORCHS_PICKLER._register_reducer

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
        data, tensors = _TORCHS_PICKLER.serialize(value)
        return data + signature(self._key, data) if self._protects() else data, tensors

    def deserialize(self, data: bytes, tensors: list[torch.Tensor]) -> Any:
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

        A new agent gets the name, the host and the TensorPipe options. This process signs with
        `key`, and the other end with `peer_key`.
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
