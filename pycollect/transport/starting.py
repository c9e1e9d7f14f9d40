"""The driver's end of a worker until it is known whether the worker shares memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pycollect.errors import LimitError, is_interrupt, without_frames
from pycollect.transport.call_handle import CallHandle
from pycollect.transport.limits import limits_named
from pycollect.transport.messages import WorkerInfo
from pycollect.transport.processes.handle import MailboxHandle, ProcessMonitor
from pycollect.transport.waiting import POLL_SECONDS, AnyBell


class ServingMonitor(ProcessMonitor, Protocol):
    """Monitors a process that was asked to serve a mailbox."""

    @property
    def refused(self) -> bool:
        """Whether the process has reported that it cannot share memory. Does not wait."""

    def watch(self, pid: int) -> None:
        """Monitor the process by its pid, because it serves the mailbox."""


class StartingHandle:
    """A worker that was asked to build and serve through a mailbox.

    If it can share memory, it uses the mailbox until its end. If not, it refuses at once and is
    reached by remote calls instead. Callers see the handle of the transport that is known so far.

    Args:
        native: The process as its library represents it.
        bell: Bell that the worker rings.
        mailbox: Handle of the mailbox and its monitor. ``None`` if this process cannot share memory
            with other processes.
        by_calls: Function that makes the handle for remote calls. `built` raises its exceptions.
    """

    def __init__(
        self,
        native: Any,
        bell: AnyBell,
        mailbox: tuple[MailboxHandle, ServingMonitor] | None,
        by_calls: Callable[[], CallHandle],
    ) -> None:
        self.native = native
        self._bell = bell
        self._by_calls = by_calls
        self._failure: Exception | None = None
        self._is_to_close = False
        self._monitor: ServingMonitor | None = None  # None once remote calls are used
        self._handle: MailboxHandle | CallHandle
        if mailbox is None:
            self._handle = by_calls()
        else:
            self._handle, self._monitor = mailbox

    def _settled(self) -> MailboxHandle | CallHandle:
        """Return the current handle; switch to remote calls if the process cannot share memory."""
        if self._is_undecided and self._failure is None:
            try:
                with limits_named(f"the connection to {self._handle.spec.name}"):
                    self._handle = self._by_calls()
                self._monitor = None
            except LimitError:  # the caller may try again
                raise
            except Exception as error:  # `built` raises it
                if is_interrupt(error):
                    raise
                self._failure = without_frames(error)
        return self._handle

    @property
    def _is_undecided(self) -> bool:
        """Whether the process refused the mailbox and has no handle for remote calls yet."""
        return self._monitor is not None and self._monitor.refused and not self._is_to_close

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU. Does not wait."""
        return self._handle.cpu_delay

    def built(self) -> tuple[WorkerInfo, MailboxHandle | CallHandle]:
        """Wait until the worker is built; return its description and its handle."""
        while True:
            seen = self._bell.count
            if self.has_answer or self.is_dead:
                break
            self._bell.wait_ring(seen, POLL_SECONDS)
        if self._failure is not None:
            raise without_frames(self._failure)
        info = self._handle.read_info()
        if self._monitor is not None:
            self._monitor.watch(info.pid)
        return info, self._handle

    @property
    def has_answer(self) -> bool:
        """Whether the worker is built or cannot be built. Does not wait."""
        return self._settled().has_answer or self._failure is not None

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from the worker. Does not wait."""
        # The mailbox handle also counts as dead if the process has just refused the mailbox.
        return self._handle.is_dead and self._settled().is_dead and not self._is_undecided

    @property
    def has_pending_requests(self) -> bool:
        """Whether the worker shares memory, is built, and has unanswered requests."""
        return isinstance(self._handle, MailboxHandle) and self._handle.has_pending_requests

    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""
        return self._handle.recent_log()

    def ask_close(self) -> bool:
        """Ask the worker to close its environments; return whether it can still do so."""
        if self._is_undecided:  # the process has built nothing
            return False
        self._is_to_close = True
        return self._handle.ask_close()

    @property
    def is_closing(self) -> bool:
        """Whether the worker has received the close request. Does not wait."""
        return self._handle.is_closing

    def kill(self) -> None:
        """End the worker's process."""
        self._handle.kill()
