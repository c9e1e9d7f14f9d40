"""This process's agent of torch.distributed.rpc: torch has one in each process.

`init_rpc` makes a group of all: whoever joins or leaves it asks every other one under a lock of
the group, and for ever where one of them has died. Here nobody joins: the driver is told the
address of each rank, and a rank, which only answers, knows nobody.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_autograd import _init as init_autograd
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_rpc import (
    TensorPipeAgent,
    WorkerInfo,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_and_start_rpc_agent,
)
from torch.distributed import rpc

_INTERFACE = "TP_SOCKET_IFNAME"  # where TensorPipe reads at which interface it is to listen
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IDS = 1 << 15  # of workers: 16 bits with a sign


class RpcAgent:
    """The agent while links are there that need it: the program's own, or else one for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links = 0
        self._is_ours = False
        self._last_id = _IDS

    def enter(self, name: str, host: str, options: Mapping[str, Any]) -> None:
        """There is one more link.

        Args:
            name: of the agent, if there is none yet.
            host: at which it is to listen then.
            options: of TensorPipe then.
        """
        with self._lock:
            if not _is_current_rpc_agent_set():
                _start(name, host, options)
                self._is_ours, self._links, self._last_id = True, 0, _IDS
            self._links += 1

    def leave(self) -> None:
        """A link is gone. An agent that nobody needs any more ends: the program may have its own.

        Nobody may be inside of what it calls.
        """
        with self._lock:
            self._links -= 1
            if self._links == 0 and self._is_ours:
                self._end()

    def end(self) -> None:
        """End it: this process does. An agent that outlives Python takes it down."""
        with self._lock:
            if self._is_ours:
                self._end()

    def _end(self) -> None:
        self._is_ours = False
        if _is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)

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
            raise RuntimeError(f"RPC has called {_IDS} ranks from this agent, and has no more ids")
        return self._last_id

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
