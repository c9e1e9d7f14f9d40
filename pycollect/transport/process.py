"""Worker processes: the interface of an engine, how a process ended, and its CPU time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pycollect.errors import WorkerDied
from pycollect.transport.descendants import children_of, kill_orphans, kill_tree
from pycollect.transport.messages import Rollout, RolloutRequest, WorkerInfo, WorkerSpec
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.waiting import AwaitedWorker

_NANOSECONDS = 1e9


def seconds_without_cpu(pid: int) -> float:
    """Return for how many seconds a process or its slowest descendant waited for a CPU.

    Counts the main threads. Of several processes, the longest wait counts, because their parent
    waits for the slowest one. Returns 0.0 if the system does not report it or the process does not
    exist. Does not wait.
    """
    return max(_waited(pid), *(seconds_without_cpu(child) for child in children_of(pid)), 0.0)


def _waited(pid: int) -> float:
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

    Attributes:
        summary: One line that describes the end.
        details: Everything that is known about the end.
        error: Exception that reported the end. ``None`` if it is being raised right now: storing it
            would keep its frames alive.
    """

    summary: str
    details: str
    error: BaseException | None = None

    def death_of(self, spec: WorkerSpec) -> WorkerDied:
        """Return the error for the worker that ran in the process."""
        text = f"{spec.name} died: {self.summary}"
        death = WorkerDied(text, spec.index, spec.incarnation, self.details)
        death.__cause__ = self.error
        return death


class WorkerProcess(AwaitedWorker, Protocol):
    """The driver's end of a worker's process, from its start to its end."""

    @property
    def native(self) -> Any:
        """The process as its library represents it: multiprocessing's object or an actor handle."""

    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""


class StartingWorker(WorkerProcess, Protocol):
    """A worker that was started. Its first answer reports that it is built."""

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU; 0.0 if unknown.

        Does not wait.
        """

    def built(self) -> tuple[WorkerInfo, WorkerHandle]:
        """Wait until the worker is built; return its description and its handle.

        Raises:
            WorkerDied: The process is gone.
            Exception: The exception that building the worker raised.
        """


class WorkerHandle(WorkerProcess, Protocol):
    """The driver's end of a built worker: a queue of calls, read in order.

    It may be the same object as the StartingWorker. The rows of a dropped request stay in use until
    the worker has answered it.

    Methods that wait raise WorkerDied if the process is gone. An exception in the worker is raised
    unchanged.
    """

    @property
    def in_place(self) -> bool:
        """Whether the worker shares memory with this process and writes into its requests' rows."""

    @property
    def transport(self) -> str:
        """Name of the transport that carries the rollouts."""

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout, together with weights that were assigned since the previous one."""

    def stop(self) -> None:
        """Stop the oldest rollout after its current step. Does not wait. May be repeated."""

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Send the worker weights that apply from the next rollout it starts, even a queued one.

        Args:
            serial: Number that grows with every call; the highest one received counts.
            version: Policy version that rollouts with these weights carry.
            weights: Packed weights.
            acknowledge: Whether to send the weights now in any case.

        Returns:
            A call to wait for with `answer`, or ``None`` if nothing was sent now.
        """

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Send hooks that apply from the next rollout the worker starts, even a queued one.

        Args:
            hooks: A growing serial number and a pickled hook for each name.
        """

    def rollout(self) -> Rollout:
        """Wait for the oldest rollout and return it. It stays the oldest until `pop`."""

    def pop(self) -> None:
        """Discard the oldest rollout."""

    def drop_rollouts(self) -> None:
        """Discard all unread rollouts."""

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of a method of `WorkerHost`."""

    def await_answer(self, call: Any, seconds: float) -> bool:
        """Wait for the answer to a call of `request`, at most for the given seconds.

        Returns:
            Whether the call has an answer or can no longer get one.
        """

    def answer(self, call: Any) -> Any:
        """Wait for a call of `request` or `assign` and return its result."""

    def steps(self) -> int | None:
        """Return the number of steps the worker has made, or ``None`` if unknown. Does not wait."""


H = TypeVar("H", bound=AwaitedWorker)


class Engine(Protocol):
    """Starts workers and waits for them."""

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError, naming the resource, if these workers need more than there is."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if rollouts in flight of that many bytes do not fit into memory.

        Args:
            in_place: Whether the workers write in place.
        """

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share."""

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingWorker:
        """Start a worker, which builds its environments at once.

        Args:
            policy: Pickled policy or policy factory.
        """

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """Return the first handle whose oldest call has an answer, or ``None`` after the timeout.

        A dead worker's call counts as answered.
        """

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let workers close their environments, then kill the remaining processes.

        Args:
            timeout: Seconds that the workers have. ``None`` means the usual time (default:
                ``None``).
        """

    def leave(self) -> None:
        """Release everything the engine holds. Idempotent."""
