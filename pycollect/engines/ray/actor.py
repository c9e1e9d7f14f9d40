"""One actor as the driver has it: calls of it, what it logged, its end."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from pycollect.batch.slab_rows import MemoryAddress
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.ray.forgotten import when_forgotten
from pycollect.engines.waiting import Rung

_LOG_CHARACTERS = 2000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PID = re.compile(r"\bpid[:=] ?(\d+)")
_NODE = re.compile(r"\bip[:=] ?([\w.:]*\w)", re.IGNORECASE)
_EXIT_CODE = re.compile(r"\bexit code (\d+)")


class Actor:
    """An actor that is a RayWorker. It ends with this object: Ray would let one serve for ever.

    Args:
        handle: Ray's.
        bell: rung with each answer to a call, and where none can come any more.
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
        """Call a method that may run beside a rollout: past the queue."""
        call = self.handle.call.options(concurrency_group="control")
        return self._ringing(call.remote(method, *arguments))

    def _ringing(self, reference: Any) -> Future[Any]:
        """A call's future, which rings once it is done, also where the actor has died."""
        future: Future[Any] = reference.future()
        bell = self._bell
        future.add_done_callback(lambda _: bell.ring())
        return future

    def loss(self, error: Exception) -> ProcessEnd | None:
        """How the actor ended, where that is why a call raised this; None: it is not."""
        return end_of(error) if isinstance(error, self.ray.exceptions.RayError) else None

    def log_of(self, pid: int | None) -> str:
        """The end of what its process logged, if that ran on this machine."""
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


def end_of(error: BaseException) -> ProcessEnd:
    """Return how an actor's process ended, and its pid and node, from Ray's exception."""
    text = _COLOURS.sub("", str(error))
    pid, node = _PID.search(text), _NODE.search(text)
    places = [pid and f"process {pid[1]}", node and f"on node {node[1]}"]
    place = " ".join(filter(None, places))
    cause = _cause(type(error).__name__, text)
    return ProcessEnd(f"{cause} ({place})" if place else cause, text)


def _cause(kind: str, text: str) -> str:
    """Extract the cause from Ray's text, which also contains paragraphs of advice."""
    if kind == "OutOfMemoryError":
        return "Ray killed it because its node was low on memory"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else kind
    _, of_process, detail = last.partition("Worker exit detail: ")
    exit_code = _EXIT_CODE.search(detail)
    if exit_code:
        return f"it ended with exit code {exit_code[1]}"
    if "connection error" in detail:  # Ray's end of the connection saw it go, and no more
        return "it was killed, or it crashed"
    return (detail.partition(". ")[0] if of_process else last).removesuffix(".")
