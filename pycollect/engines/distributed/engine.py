"""Ranks of torch.distributed: started by a launcher, met, asked, awaited, ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, Protocol

from pycollect._core import Bell, Mailbox, shared_memory_why_not
from pycollect.engines.call_handle import CallHandle
from pycollect.engines.distributed.address import Invitation, RankAddress, this_node
from pycollect.engines.distributed.caller import RankCaller
from pycollect.engines.distributed.link import Carrier
from pycollect.engines.distributed.monitor import LaunchedProcess, RankMonitor
from pycollect.engines.distributed.rendezvous import Rendezvous
from pycollect.engines.messages import WorkerSpec, pickled_spec
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.serve import QUESTIONS
from pycollect.engines.protocol import H
from pycollect.engines.shared_value import Shareable, SharedValue
from pycollect.engines.starting import StartingEitherWay
from pycollect.engines.waiting import (
    AnswerWaiter,
    Rung,
    ThreadBell,
    Waited,
    check_available,
)
from pycollect.errors import WorkerError


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
        self._bell: Rung = ThreadBell() if shared_memory_why_not() else Bell()
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
    ) -> StartingEitherWay:
        """Start the rank of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
            options: the launcher's.
        """
        bell = self._bell
        mailbox = Mailbox(QUESTIONS) if isinstance(bell, Bell) else None
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
        return StartingEitherWay(process.native, bell, served, by_calls)

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[Waited], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        self._waiter.wait_closed(handles, timeout)


def _kill_all(monitors: Sequence[RankMonitor]) -> None:
    for monitor in monitors:
        monitor.kill()
