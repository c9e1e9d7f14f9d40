"""An actor on this node that serves a mailbox: whether it does, how it ended, its end."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any, ClassVar

from pycollect.engines.descendants import children_of, kill_tree
from pycollect.engines.other_process import OtherProcess
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.ray.actor import Actor
from pycollect.engines.ray.session import end_of

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

    def last_words(self) -> str:
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
