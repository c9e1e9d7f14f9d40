"""An actor that runs a worker, and the driver's view of it: methods, log and end."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pycollect._core import SharedMemoryError, WorkerMailbox
from pycollect.data.slabs import MemoryAddress
from pycollect.transport.descendants import begin_worker, children_of, kill_tree
from pycollect.transport.host import WorkerHost
from pycollect.transport.process import OtherProcess, ProcessEnd
from pycollect.transport.processes.serve import answer_all
from pycollect.transport.ray.session import call_when_freed, end_of, import_ray
from pycollect.transport.serving_host import ServingHost
from pycollect.transport.waiting import AnyBell

_LOG_CHARACTERS = 2000


class Actor:
    """An actor that is a RayWorker. It ends with this object: Ray would let one serve for ever.

    Args:
        handle: Ray's.
        bell: AnyBell with each answer to a call, and if none can come any more.
    """

    transport: ClassVar[str] = "object store"
    is_gone: ClassVar[bool] = False  # its calls end with it

    def __init__(self, ray: Any, handle: Any, bell: AnyBell) -> None:
        self.ray = ray
        self.handle = handle
        self._bell = bell
        call_when_freed(self, _kill, ray, handle)

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
        """Call one of WorkerHost's methods, behind those that are queued."""
        return self._ringing(self.handle.call.remote(method, *arguments))

    def call_unqueued(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method that may run during a rollout, past the queue."""
        call = self.handle.call.options(concurrency_group="control")
        return self._ringing(call.remote(method, *arguments))

    def _ringing(self, reference: Any) -> Future[Any]:
        """Return a call's future. It rings when it is done, also if the actor has died."""
        future: Future[Any] = reference.future()
        bell = self._bell
        future.add_done_callback(lambda _: bell.ring())
        return future

    def process_end(self, error: Exception) -> ProcessEnd | None:
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


_ACCOUNT_SECONDS = 2.0  # in which Ray reports how an actor's process ended
_KILL_SECONDS = 2.0  # in which Ray ends one


class ActorMonitor:
    """Watches an actor on this node. Ray reports how it ended, and its process whether it did.

    Args:
        serving: the actor's one long call.
    """

    def __init__(self, actor: Actor, serving: Future[str]) -> None:
        self._actor = actor
        self._serving = serving
        self._process: OtherProcess | None = None

    @property
    def native(self) -> Any:
        """The actor's handle, Ray's own."""
        return self._actor.handle

    def watch(self, pid: int) -> None:
        """It has reported the number of its process."""
        self._process = OtherProcess(pid)

    @property
    def refused(self) -> bool:
        """Whether it has said that it cannot share memory. Does not wait."""
        serving = self._serving
        return serving.done() and serving.exception() is None and serving.result() != ""

    @property
    def is_over(self) -> bool:
        """Whether the process is gone, or serves no more. Does not wait."""
        return self._serving.done() or (self._process is not None and self._process.is_gone)

    cpu_delay: ClassVar[float] = 0.0  # its process is not known before it is built

    def end(self) -> ProcessEnd:
        """How it ended, as Ray knows it, for which it waits a little."""
        wait_futures([self._serving], _ACCOUNT_SECONDS)
        error = self._serving.exception() if self._serving.done() else None
        if error is not None:
            return replace(end_of(error), error=error)
        number = "" if self._process is None else f" {self._process.pid}"
        end = f"its process{number} on this node is gone"
        return ProcessEnd(end, end)

    def recent_log(self) -> str:
        """Return the end of the process's log."""
        return self._actor.log_of(self._process.pid) if self._process is not None else ""

    def kill(self) -> None:
        """End the actor and its process, and all that its environments started."""
        process = self._process
        if process is not None and not process.is_gone:
            for child in children_of(process.pid):
                kill_tree(child)
        self._actor.kill()
        if process is not None:  # else it was not built, and no memory was named to it
            process.wait_gone(_KILL_SECONDS)
            process.kill_all()


class RayWorker:
    """Hosts one worker, which is asked through a mailbox where it shares memory, else by `call`.

    It is plain on purpose: no ``__len__``, ``__bool__``, ``__repr__`` or ``__getattr__`` that could
    raise, because Ray then reports a dead actor and the error is lost.
    """

    def __init__(self) -> None:
        self._called: WorkerHost | None = None  # not where a mailbox is served

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
        """Call one of WorkerHost's methods: `build`, and others once that has answered."""
        if self._called is None:
            self._called = WorkerHost()
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
