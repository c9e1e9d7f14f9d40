"""The driver's view of one actor: its methods, its log, its end."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from pycollect.batch.slab_rows import MemoryAddress
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.ray.session import end_of, when_forgotten
from pycollect.engines.waiting import Rung

_LOG_CHARACTERS = 2000


class Actor:
    """An actor that is a RayWorker. It ends with this object: Ray would let one serve for ever.

    Args:
        handle: Ray's.
        bell: Rung with each answer to a call, and if none can come any more.
    """

    transport: ClassVar[str] = "object store"
    is_gone: ClassVar[bool] = False  # its calls end with it

    def __init__(self, ray: Any, handle: Any, bell: Rung) -> None:
        self.ray = ray
        self.handle = handle
        self._bell = bell
        when_forgotten(self, _kill, ray, handle)

    @property
    def native(self) -> Any:
        """Ray's handle."""
        return self.handle

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress) -> Future[str]:
        """Ask it to serve a mailbox of this process, which is on that node."""
        return self._ringing(self.handle.serve.remote(node, mailbox, bell, os.getpid()))

    def node(self) -> Future[str]:
        """Ray's id of the node that it is on."""
        return self._ringing(self.handle.node.remote())

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call one of RemoteWorker's methods, behind those that are queued."""
        return self._ringing(self.handle.call.remote(method, *arguments))

    def call_beside(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method that may run during a rollout, past the queue."""
        call = self.handle.call.options(concurrency_group="control")
        return self._ringing(call.remote(method, *arguments))

    def _ringing(self, reference: Any) -> Future[Any]:
        """Return a call's future. It rings when it is done, also if the actor has died."""
        future: Future[Any] = reference.future()
        bell = self._bell
        future.add_done_callback(lambda _: bell.ring())
        return future

    def loss(self, error: Exception) -> ProcessEnd | None:
        """Return how the actor ended if that made a call raise the error, else None."""
        return end_of(error) if isinstance(error, self.ray.exceptions.RayError) else None

    def log_of(self, pid: int | None) -> str:
        """Return the end of its process's log, if the process ran on this machine."""
        with contextlib.suppress(Exception):  # the place of the logs is not part of Ray's API
            folder = Path(self.ray._private.worker._global_node.get_logs_dir_path())
            files = sorted(folder.glob(f"worker-*-{pid}.err"))
            return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """End it, and do not wait."""
        _kill(self.ray, self.handle)


def _kill(ray: Any, handle: Any) -> None:
    with contextlib.suppress(Exception):  # it is gone already, or Ray is
        if ray.is_initialized():
            ray.kill(handle)
