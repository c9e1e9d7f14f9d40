"""The driver's end of a worker until it is known whether it shares memory with the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pycollect.errors import LimitError, is_interrupt, without_frames
from pycollect.transport.call_handle import CallHandle
from pycollect.transport.limits import limits_named
from pycollect.transport.messages import WorkerInfo
from pycollect.transport.processes.handle import MailboxHandle, ProcessMonitor
from pycollect.transport.waiting import LOOK_SECONDS, Rung


class ServingMonitor(ProcessMonitor, Protocol):
    """Watches a process that was asked to serve a mailbox."""

    @property
    def refused(self) -> bool:
        """Whether it has said that it cannot share memory. Does not wait."""

    def watch(self, pid: int) -> None:
        """It serves, and has told the number of its process."""


class StartingEitherWay:
    """A worker that is asked to serve a mailbox, which is to build its worker.

    Where it can it does so to its end; where it cannot it says so at once, and is asked by calls.
    Whoever waits sees the handle of the way that is known so far.

    Args:
        native: the process as its library knows it.
        bell: that it rings.
        mailbox: the handle of the mailbox, and what watches it; None: this process shares memory
            with no other.
        by_calls: makes the handle of the other way; None: what it needs is not there yet, it is to
            be asked again. What it raises is raised by `built`.
    """

    def __init__(
        self,
        native: Any,
        bell: Rung,
        mailbox: tuple[MailboxHandle, ServingMonitor] | None,
        by_calls: Callable[[], CallHandle | None],
    ) -> None:
        self.native = native
        self._bell = bell
        self._by_calls = by_calls
        self._failure: Exception | None = None
        self._is_to_close = False
        self._monitor: ServingMonitor | None = None  # of one that serves, as far as is known
        self._handle: MailboxHandle | CallHandle
        if mailbox is None:
            called = by_calls()
            assert called is not None, "by_calls: expected a handle, as there is no other"
            self._handle = called
        else:
            self._handle, self._monitor = mailbox

    def _settled(self) -> MailboxHandle | CallHandle:
        """Its handle, another one if it has said that it cannot share memory."""
        if self._is_undecided and self._failure is None:
            try:
                with limits_named(f"the connection to {self._handle.spec.name}"):
                    called = self._by_calls()
            except LimitError:  # the caller may try again
                raise
            except Exception as error:  # whoever asks for what was built is told
                if is_interrupt(error):
                    raise
                self._failure = without_frames(error)
            else:
                if called is not None:
                    self._handle, self._monitor = called, None
        return self._handle

    @property
    def _is_undecided(self) -> bool:
        """Whether it serves no mailbox, and is to have a handle of the other way."""
        return self._monitor is not None and self._monitor.refused and not self._is_to_close

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it was ready to run and had no CPU. Does not wait."""
        return self._handle.cpu_delay

    def built(self) -> tuple[WorkerInfo, MailboxHandle | CallHandle]:
        """What the worker is, and its handle from now on. Waits."""
        while True:
            seen = self._bell.count
            if self.has_answer or self.is_dead:
                break
            self._bell.wait_ring(seen, LOOK_SECONDS)
        if self._failure is not None:
            raise without_frames(self._failure)
        info = self._handle.read_info()
        if self._monitor is not None:
            self._monitor.watch(info.pid)
        return info, self._handle

    @property
    def has_answer(self) -> bool:
        """Whether the worker is built, or cannot be. Does not wait."""
        return self._settled().has_answer or self._failure is not None

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from it. Does not wait."""
        # To serve no more may be to have refused just now.
        return self._handle.is_dead and self._settled().is_dead and not self._is_undecided

    @property
    def is_owing(self) -> bool:
        """Whether it shares memory, and has not answered yet what it was asked for once built."""
        return isinstance(self._handle, MailboxHandle) and self._handle.is_owing

    def recent_log(self) -> str:
        """The last lines that its process logged, as far as they can be had."""
        return self._handle.recent_log()

    def ask_close(self) -> bool:
        """Ask it to close its environments; return whether it can still do so."""
        if self._is_undecided:  # nothing is built there
            return False
        self._is_to_close = True
        return self._handle.ask_close()

    @property
    def is_closing(self) -> bool:
        """Whether it has heard that it is to close. Does not wait."""
        return self._handle.is_closing

    def kill(self) -> None:
        """End its process."""
        self._handle.kill()
