"""Worker processes: how they are watched, called and ended, and their CPU time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pycollect.errors import WorkerDied
from pycollect.transport.messages import Request, WorkerSpec
from pycollect.transport.worker_process import children_of, kill_orphans, kill_tree

_NANOSECONDS = 1e9


def seconds_without_cpu(pid: int) -> float:
    """Return for how many seconds a process or its slowest descendant waited for a CPU.

    Counts the main threads. Of several processes, the longest wait counts, because their parent
    waits for the slowest one. Returns 0.0 if the system does not report it or the process does not
    exist. Does not wait.
    """
    return max(waited(pid), *(seconds_without_cpu(child) for child in children_of(pid)), 0.0)


def waited(pid: int | str) -> float:
    """Return how long a thread of /proc was ready to run but had no CPU; 0.0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / _NANOSECONDS
    return 0.0


class OtherProcess:
    """A process of this machine that leads its own process group.

    Raises:
        OSError: The system does not support process file descriptors, or forbids them.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll: select.poll | None = None  # None: the process is gone already
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, descriptor)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended. Does not wait."""
        return self.wait_gone(0.0)

    def wait_gone(self, seconds: float | None) -> bool:
        """Wait until the process has ended, for that time at most; return whether it has."""
        if self._poll is None:
            return True
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def kill_all(self) -> None:
        """Kill the process, its group and all its descendants, and wait for the process.

        The pid of a group leader is not reused while the group has members.
        """
        if not self.is_gone:
            kill_tree(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_gone(None)
        kill_orphans()


def has_pidfd() -> bool:
    """Return whether process file descriptors are available: since Linux 5.3, unless forbidden."""
    try:
        OtherProcess(os.getpid())
    except (OSError, AttributeError):
        return False
    return True


@dataclass(frozen=True)
class ProcessEnd:
    """How a worker's process ended.

    An `error` that is being raised right now is not stored, which would keep its frames alive.
    """

    summary: str  # one line that describes the end
    details: str  # everything that is known about the end
    error: BaseException | None = None  # exception that reported the end

    def before_build(self, log: str) -> ProcessEnd:
        """Return the end of a worker that was never built, with a hint if it logged nothing."""
        if log or not self.summary.endswith("exit code 1"):
            return self
        hint = (
            "before it was built. Workers import the program's script, so create the collector "
            'under if __name__ == "__main__":'
        )
        return replace(self, summary=f"{self.summary} {hint}")

    def death_of(self, spec: WorkerSpec) -> WorkerDied:
        """Return the error for the worker that ran in the process."""
        text = f"{spec.name} died: {self.summary}"
        death = WorkerDied(text, spec.index, spec.incarnation, self.details)
        death.__cause__ = self.error
        return death


class Caller(Protocol):
    """Sends requests to a worker in another process, as calls with results."""

    @property
    def transport(self) -> str:
        """Name of the transport that carries calls and results."""

    def call(self, request: Request, unqueued: bool = False) -> Future[Any]:
        """Send a request, after all queued ones.

        If `unqueued`, it skips the queue and is answered at once, also during a rollout.
        """

    def process_end(self, error: BaseException) -> ProcessEnd | None:
        """Return how the process ended if that caused the error of a call, else ``None``."""


class WorkerProcess(ABC):
    """A process that was started for a worker: how it is watched, reached and ended."""

    native: Any  # the process as its library represents it, such as an actor handle

    def watch(self, pid: int, shares_memory: bool) -> None:  # noqa: B027 (optional)
        """Take the pid of the built worker, on this machine if it `shares_memory`."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the process is gone or sends no more answers. Does not wait."""

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU; 0.0 if unknown."""
        return 0.0

    @abstractmethod
    def end(self) -> ProcessEnd:
        """Return how the process ended, once it is over."""

    @abstractmethod
    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and its environments' processes, and wait for the end. Idempotent."""

    @property
    def refused(self) -> bool:
        """Whether the process has reported that it cannot share memory. Does not wait."""
        return False

    def by_calls(self) -> Caller:
        """Reach the process by calls from now on, because it cannot share memory."""
        raise AssertionError("by_calls: expected a process that does not share memory")
