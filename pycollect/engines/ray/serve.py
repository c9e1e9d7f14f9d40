"""The classes that run inside an actor."""

from __future__ import annotations

from typing import Any

from pycollect._core import SharedMemoryError, WorkerMailbox
from pycollect.batch.slab_rows import MemoryAddress
from pycollect.engines.descendants import begin_worker
from pycollect.engines.processes.serve import answer_all
from pycollect.engines.ray.session import import_ray
from pycollect.engines.remote_worker import RemoteWorker
from pycollect.engines.serving_host import ServingHost


class RayWorker:
    """Hosts one worker, which is asked through a mailbox where it shares memory, else by `call`.

    It is plain on purpose: no ``__len__``, ``__bool__``, ``__repr__`` or ``__getattr__`` that could
    raise, because Ray then reports a dead actor and the error is lost.
    """

    def __init__(self) -> None:
        self._called: RemoteWorker | None = None  # not where a mailbox is served

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress, driver: int) -> str:
        """Answer what is asked through a mailbox, until `close` is.

        Args:
            node: Ray's id of the node of the one that asks.
            driver: its process id. When it ends, this process and all that its environments
                started are killed.

        Returns:
            Why it cannot, at once; it is to be asked by `call` then. Else nothing.
        """
        if self.node() != node:
            return "it is on another node"
        try:
            end = WorkerMailbox(mailbox, bell)
            begin_worker(driver)
        except (SharedMemoryError, ValueError, RuntimeError) as error:
            # A container, or another user's process, for one.
            return str(error)
        answer_all(end)
        return ""

    def node(self) -> str:
        """Ray's id of the node that this is on."""
        node: str = import_ray().get_runtime_context().get_node_id()
        return node

    def call(self, method: str, *arguments: Any) -> Any:
        """Call one of RemoteWorker's methods: `build`, and others once that has answered."""
        if self._called is None:
            self._called = RemoteWorker()
        return getattr(self._called, method)(*arguments)


class RayServer:
    """Hosts what serves the workers of its node. As plain as RayWorker, for the same reason."""

    def __init__(self) -> None:
        self._host = ServingHost()

    def attend(self) -> None:
        """Serve until it is closed: one call for its whole life, behind `build`."""
        self._host.attend()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call one of ServingHost's methods."""
        return getattr(self._host, method)(*arguments)
