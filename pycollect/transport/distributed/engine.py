"""Ranks of torch.distributed: started by a launcher, watched, ended."""

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
    """Watches a process as its launcher does."""

    def watch(self, pid: int) -> None:
        """It is on this machine, shares memory with this process, and has that number."""


class RankMonitor:
    """Watches a rank: its launcher reports how it ended, its meeting whether it has refused.

    Args:
        process: watches the process, of which the launcher knows.
        meeting: is closed once the rank serves a mailbox, or is ended.
    """

    def __init__(self, process: LaunchedProcess, meeting: Meeting) -> None:
        self._process = process
        self._meeting = meeting
        self._looked = 0.0
        self._end: ProcessEnd | None = None  # of one that was ended

    @property
    def native(self) -> Any:
        """The process as its launcher knows it."""
        return self._process.native

    def watch(self, pid: int) -> None:
        """Close the meeting and watch the process: the rank serves a mailbox now."""
        self._meeting.close()
        self._process.watch(pid)

    @property
    def refused(self) -> bool:
        """Whether it has said that it cannot share memory. Looks now and then; does not wait."""
        now = time.monotonic()
        if now - self._looked < POLL_SECONDS:
            return False
        self._looked = now
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
        """Seconds for which it was ready to run and had no CPU; 0.0 where that is not known."""
        return self._process.cpu_delay

    def end(self) -> ProcessEnd:
        """How it ended."""
        return self._end or self._process.end()

    def recent_log(self) -> str:
        """The last lines that it logged."""
        return self._process.recent_log()

    def kill(self) -> None:
        """End it, and all that its environments started; it is gone then. Idempotent."""
        if self._end is None:
            is_over = self._process.is_over
            self._end = self._process.end() if is_over else ProcessEnd("it was ended", "")
            self._process.kill()
            self._meeting.close()


class Launcher(Protocol):
    """Starts processes somewhere."""

    def check_number(self, new: int) -> None:
        """Raise ValueError if it cannot start so many more."""

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> LaunchedProcess | None:
        """Start one that is to be a rank, and say what watches it; None: there are no more."""


class DistributedEngine:
    """Ranks, each in a process group of its own with this process.

    Args:
        host, port: where they meet, see :class:`Rendezvous`.
        carrier: of messages to ranks that share no memory with this process.
        init_timeout: seconds in which a rank must have come.

    Raises:
        ValueError: nobody can meet there.
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
        # Before multiprocessing, at exit, waits for processes that nobody has ended.
        self._leave = util.Finalize(self, _kill_all, (self._monitors,), exitpriority=100)

    def leave(self) -> None:
        """End all processes that are left, and free the port. Idempotent."""
        self._leave()
        self._rendezvous.close()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the launcher cannot start those that are new."""
        living = sum(not monitor.was_ended for monitor in self._monitors)
        self._launcher.check_number(len(options) - living)

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """A value for several of these workers; in a message it is itself."""
        return SharedValue(value, lambda own: own)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> StartingHandle:
        """Start the rank of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
            options: the launcher's.
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
        self._monitors[:] = [*(own for own in self._monitors if not own.was_ended), monitor]

        carrier = self._carrier
        connect = partial(carrier.driver_end, meeting)  # does not keep this engine

        def by_calls() -> CallHandle:
            caller = RankCaller(carrier.name, connect, monitor, bell)
            return CallHandle(spec, policy, caller)

        served = None
        if isinstance(bell, Bell) and mailbox is not None:
            try:
                own = MailboxHandle(spec, pickled_spec(spec), policy, mailbox, bell, monitor)
            except BaseException:
                monitor.kill()
                raise
            served = own, monitor
        return StartingHandle(process.native, bell, served, by_calls)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        self._waiter.wait_closed(handles, timeout)


def _kill_all(monitors: Sequence[RankMonitor]) -> None:
    for monitor in monitors:
        monitor.kill()
