"""An actor that runs a worker, and the driver's end of it: calls, log and exit."""

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
from pycollect.transport.waiting import AnyBell

_LOG_CHARACTERS = 2000


class Actor:
    """A RayWorker actor, for the driver. The actor ends when this object is garbage-collected.

    Ray alone would keep a serving actor forever.

    Args:
        ray: The module `ray`.
        handle: Ray's handle of the actor.
        bell: Bell to ring when a call is answered or can no longer be answered.
    """

    transport: ClassVar[str] = "object store"
    is_gone: ClassVar[bool] = False  # not needed: calls of a dead actor fail

    def __init__(self, ray: Any, handle: Any, bell: AnyBell) -> None:
        self.ray = ray
        self.handle = handle
        self._bell = bell
        call_when_freed(self, _kill, ray, handle)

    @property
    def native(self) -> Any:
        """Ray's handle of the actor."""
        return self.handle

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress) -> Future[str]:
        """Ask the actor to serve a mailbox of this process, which runs on `node`."""
        return self._ringing(self.handle.serve.remote(node, mailbox, bell, os.getpid()))

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of `WorkerHost` after all queued calls."""
        return self._ringing(self.handle.call.remote(method, *arguments))

    def call_unqueued(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method at once, also during a rollout; it skips the queue."""
        call = self.handle.call.options(concurrency_group="control")
        return self._ringing(call.remote(method, *arguments))

    def _ringing(self, reference: Any) -> Future[Any]:
        """Return the future of a call; ring the bell when the call is done or the actor died."""
        future: Future[Any] = reference.future()
        bell = self._bell
        future.add_done_callback(lambda _: bell.ring())
        return future

    def process_end(self, error: Exception) -> ProcessEnd | None:
        """Return how the actor ended if that made a call raise the error, else ``None``."""
        return end_of(error) if isinstance(error, self.ray.exceptions.RayError) else None

    def log_of(self, pid: int | None) -> str:
        """Return the end of the process's log, or "" if the process ran on another machine."""
        with contextlib.suppress(Exception):  # the folder of the logs is not part of Ray's API
            folder = Path(self.ray._private.worker._global_node.get_logs_dir_path())
            files = sorted(folder.glob(f"worker-*-{pid}.err"))
            return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """Kill the actor. Does not wait."""
        _kill(self.ray, self.handle)


def _kill(ray: Any, handle: Any) -> None:
    with contextlib.suppress(Exception):  # the actor or Ray is gone already
        if ray.is_initialized():
            ray.kill(handle)


_REPORT_SECONDS = 2.0  # for Ray to report how an actor's process ended
_KILL_SECONDS = 2.0  # for Ray to end an actor


class ActorMonitor:
    """Monitors an actor on this node.

    The process itself shows whether it has ended; Ray reports the cause.

    Args:
        actor: The actor.
        serving: Future of the call that serves the mailbox until the actor's end.
    """

    def __init__(self, actor: Actor, serving: Future[str]) -> None:
        self._actor = actor
        self._serving = serving
        self._process: OtherProcess | None = None

    @property
    def native(self) -> Any:
        """Ray's handle of the actor."""
        return self._actor.handle

    def watch(self, pid: int) -> None:
        """Monitor the actor's process by its pid."""
        self._process = OtherProcess(pid)

    @property
    def refused(self) -> bool:
        """Whether the actor has reported that it cannot share memory. Does not wait."""
        serving = self._serving
        return serving.done() and serving.exception() is None and serving.result() != ""

    @property
    def is_over(self) -> bool:
        """Whether the process is gone or serves no more. Does not wait."""
        return self._serving.done() or (self._process is not None and self._process.is_gone)

    cpu_delay: ClassVar[float] = 0.0  # unknown: the pid is not known while the worker is built

    def end(self) -> ProcessEnd:
        """Return how the actor ended. Waits a little for Ray's report."""
        wait_futures([self._serving], _REPORT_SECONDS)
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
        """End the actor, its process and all processes that its environments started."""
        process = self._process
        if process is not None and not process.is_gone:
            for child in children_of(process.pid):
                kill_tree(child)
        self._actor.kill()
        if process is not None:  # an actor without a pid was never built and shares no memory
            process.wait_gone(_KILL_SECONDS)
            process.kill_all()


class RayWorker:
    """Hosts one worker in an actor; serves a mailbox if memory can be shared, else `call`.

    The class is plain on purpose. If ``__len__``, ``__bool__``, ``__repr__`` or ``__getattr__``
    raised, Ray would report a dead actor and lose the error.
    """

    def __init__(self) -> None:
        self._host: WorkerHost | None = None  # None if a mailbox is served

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress, driver: int) -> str:
        """Answer requests from a mailbox until `close`.

        Args:
            node: Ray's id of the driver's node.
            mailbox: Address of the mailbox.
            bell: Address of the driver's bell.
            driver: Pid of the driver. When it ends, this process and its descendants are killed.

        Returns:
            "" after the end of service. If memory cannot be shared, the reason, at once; the driver
            then uses `call`.
        """
        if import_ray().get_runtime_context().get_node_id() != node:
            return "it is on another node"
        try:
            end = WorkerMailbox(mailbox, bell)
            begin_worker(driver)
        except (SharedMemoryError, ValueError, RuntimeError) as error:
            # For example in another container, or as another user.
            return str(error)
        answer_all(end)
        return ""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `WorkerHost`, first `build`."""
        if self._host is None:
            self._host = WorkerHost()
        return getattr(self._host, method)(*arguments)
