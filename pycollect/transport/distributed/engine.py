"""Start ranks of torch.distributed through a launcher, wait for them, and end them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, Protocol

from pycollect._core import Bell, Mailbox, shared_memory_why_not
from pycollect.errors import WorkerError
from pycollect.transport.call_handle import CallHandle
from pycollect.transport.distributed.address import Invitation, RankAddress, this_node
from pycollect.transport.distributed.caller import RankCaller
from pycollect.transport.distributed.links import Carrier
from pycollect.transport.distributed.meeting import REFUSAL, Meeting
from pycollect.transport.distributed.rendezvous import Rendezvous
from pycollect.transport.messages import WorkerSpec, pickled_spec
from pycollect.transport.process import H, ProcessEnd
from pycollect.transport.processes.handle import MailboxHandle, ProcessMonitor
from pycollect.transport.processes.serve import MAX_REQUESTS
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.starting import StartingHandle
from pycollect.transport.waiting import (
    POLL_SECONDS,
    AnswerWaiter,
    AnyBell,
    AwaitedWorker,
    ThreadBell,
    check_available,
)


class LaunchedProcess(ProcessMonitor, Protocol):
    """Monitors a process by means of its launcher."""

    def watch(self, pid: int) -> None:
        """Monitor the process by its pid, because it shares memory with this process."""


class RankMonitor:
    """Monitors a rank: its launcher reports its exit, its meeting a refusal of shared memory.

    Args:
        process: Monitor of the process, from the launcher.
        meeting: Meeting with the rank. It is closed once the rank serves a mailbox or is ended.
    """

    def __init__(self, process: LaunchedProcess, meeting: Meeting) -> None:
        self._process = process
        self._meeting = meeting
        self._polled = 0.0
        self._end: ProcessEnd | None = None  # set by `kill`

    @property
    def native(self) -> Any:
        """The process as its launcher represents it."""
        return self._process.native

    def watch(self, pid: int) -> None:
        """Close the meeting and monitor the process: the rank serves a mailbox now."""
        self._meeting.close()
        self._process.watch(pid)

    @property
    def refused(self) -> bool:
        """Whether the rank has reported that it cannot share memory.

        Polls at intervals; does not wait.
        """
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return False
        self._polled = now
        return self._meeting.check([REFUSAL])

    @property
    def was_ended(self) -> bool:
        """Whether `kill` was called."""
        return self._end is not None

    @property
    def is_over(self) -> bool:
        """Whether the process is gone. Does not wait."""
        return self._end is not None or self._process.is_over

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU; 0.0 if unknown."""
        return self._process.cpu_delay

    def end(self) -> ProcessEnd:
        """Return how the process ended."""
        return self._end or self._process.end()

    def recent_log(self) -> str:
        """Return the last lines that the process logged."""
        return self._process.recent_log()

    def kill(self) -> None:
        """End the process and its environments' processes, and wait for the end. Idempotent."""
        if self._end is None:
            is_over = self._process.is_over
            self._end = self._process.end() if is_over else ProcessEnd("it was ended", "")
            self._process.kill()
            self._meeting.close()


class Launcher(Protocol):
    """Starts the processes of ranks."""

    def check_number(self, new: int) -> None:
        """Raise ValueError if the launcher cannot start that many more ranks."""

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> LaunchedProcess | None:
        """Start a rank; return its monitor, or ``None`` if the launcher can start no more."""


class DistributedEngine:
    """Starts ranks and waits for them. Each has a connection of its own to this process.

    Args:
        launcher: Launcher of the ranks.
        host: Interface of the :class:`Rendezvous`.
        port: Port of the rendezvous.
        carrier: Carrier of messages to ranks that share no memory with this process.
        init_timeout: Seconds within which a rank must have connected.

    Raises:
        ValueError: The rendezvous cannot listen at that address.
    """

    def __init__(
        self, launcher: Launcher, host: str, port: int, carrier: Carrier, init_timeout: float
    ) -> None:
        self._launcher = launcher
        self._carrier = carrier
        self._rendezvous = Rendezvous(host, port, init_timeout)
        self._node = this_node()
        self._bell: AnyBell = ThreadBell() if shared_memory_why_not() else Bell()
        self._waiter = AnswerWaiter(self._bell)
        self._monitors: list[RankMonitor] = []
        # At exit, runs before multiprocessing joins the remaining processes.
        self._leave = util.Finalize(self, _kill_all, (self._monitors,), exitpriority=100)

    def leave(self) -> None:
        """End all remaining processes, and free the port. Idempotent."""
        self._leave()
        self._rendezvous.close()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the launcher cannot start the additional ranks."""
        living = sum(not monitor.was_ended for monitor in self._monitors)
        self._launcher.check_number(len(options) - living)

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if rollouts in flight of that many bytes do not fit into memory."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share; messages contain the value itself."""
        return SharedValue(value, lambda stored: stored)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start the rank of one worker, which builds its environments at once.

        Args:
            spec: Specification of the worker.
            policy: Pickled policy or policy factory.
            options: Options of the launcher.
        """
        bell = self._bell
        mailbox = Mailbox(MAX_REQUESTS) if isinstance(bell, Bell) else None
        addresses = None
        if isinstance(bell, Bell) and mailbox is not None:
            addresses = (mailbox.address, bell.address)
        invitation = Invitation(self._node, os.getpid(), addresses, self._carrier)
        rank = f"{spec.index}.{spec.incarnation}"
        meeting = self._rendezvous.invite(rank, invitation)
        process = self._launcher.launch(meeting.address, f"pycollect-worker-{spec.index}", options)
        if process is None:
            text = (
                f"worker {spec.index} cannot be started: its launcher has no waiting job left; "
                "increase num_jobs"
            )
            raise WorkerError(text, spec.index, spec.incarnation, "")
        monitor = RankMonitor(process, meeting)
        self._monitors[:] = [*(other for other in self._monitors if not other.was_ended), monitor]

        carrier = self._carrier
        connect = partial(carrier.driver_end, meeting)  # holds no reference to this engine

        def by_calls() -> CallHandle:
            caller = RankCaller(carrier.name, connect, monitor, bell)
            return CallHandle(spec, policy, caller)

        served = None
        if isinstance(bell, Bell) and mailbox is not None:
            try:
                handle = MailboxHandle(spec, pickled_spec(spec), policy, mailbox, bell, monitor)
            except BaseException:
                monitor.kill()
                raise
            served = handle, monitor
        return StartingHandle(process.native, bell, served, by_calls)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """Return the first handle whose oldest call has an answer, or ``None`` after the timeout.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let workers close their environments, then kill the remaining processes."""
        self._waiter.wait_closed(handles, timeout)


def _kill_all(monitors: Sequence[RankMonitor]) -> None:
    for monitor in monitors:
        monitor.kill()
