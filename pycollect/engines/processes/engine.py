"""Worker processes on this machine: started, asked through mailboxes, awaited, ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.engines.messages import WorkerSpec, pickled_for_child
from pycollect.engines.processes.child import ChildMonitor
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.serve import QUESTIONS, serve
from pycollect.engines.processes.start import start_child
from pycollect.engines.protocol import H
from pycollect.engines.shared_value import Shareable, SharedValue
from pycollect.engines.waiting import AnswerWaiter, SharedBell, Waited, check_available


class ProcessEngine:
    """Starts worker processes and waits for them. They end with this process, whatever ends it.

    Args:
        start_method: how they start, see :func:`start_child`.
        bell: that they ring, and on which is waited for them; None: one of its own.

    Raises:
        SharedMemoryError: processes cannot share memory here.
    """

    def __init__(self, start_method: str = "forkserver", bell: SharedBell | None = None) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._start_method = start_method
        self._bell: SharedBell = Bell() if bell is None else bell
        self._waiter = AnswerWaiter(self._bell)
        self._handles: list[MailboxHandle] = []
        # Before multiprocessing, at exit, waits for processes that nobody has ended.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        """End all processes that are left. Idempotent."""
        self._leave()

    @property
    def owing(self) -> int:
        """How many workers that are built were asked for something and have not answered yet."""
        return sum(handle.is_owing for handle in self._handles)

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Processes share what there is."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """A value for several of these workers."""
        return SharedValue(value)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> MailboxHandle:
        """Start the process of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory.
            options: none are known.
        """
        mailbox = Mailbox(QUESTIONS)
        pickled, inherited = pickled_for_child(spec)
        arguments = (mailbox.address, self._bell.address, os.getpid(), inherited)
        name = f"pycollect-{spec.name}".replace(" ", "-")
        monitor = ChildMonitor(*start_child(serve, arguments, name, self._start_method))
        try:
            handle = MailboxHandle(spec, pickled, policy, mailbox, self._bell, monitor)
        except BaseException:
            monitor.kill()
            raise
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        return self._waiter.wait_any(handles, timeout)

    def wait_closed(self, handles: Sequence[Waited], timeout: float | None = None) -> None:
        """Let workers close their environments, then end those that are still there."""
        self._waiter.wait_closed(handles, timeout)


def _kill_all(handles: Sequence[MailboxHandle]) -> None:
    for handle in handles:
        handle.kill()
