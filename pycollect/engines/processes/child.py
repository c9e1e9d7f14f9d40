"""A worker process that this one has started: whether it runs, how it ended, what it wrote."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, Protocol

from pycollect.engines.cpu_delay import seconds_without_cpu
from pycollect.engines.descendants import kill_orphans, kill_tree
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.processes.log import WorkerLog


class Child(Protocol):
    """A process of multiprocessing's, however it was started."""

    @property
    def native(self) -> Any:
        """Multiprocessing's own."""

    @property
    def is_over(self) -> bool:
        """Whether it is gone. Does not wait."""

    def exit_code(self) -> int | None:
        """How it ended: as multiprocessing's ``exitcode``; None if that is not known."""

    def kill(self) -> None:
        """End the process and its group, and take note of its end."""


class ChildMonitor:
    """Watches a child of this process, and ends it.

    Args:
        log: its standard error.
    """

    def __init__(self, child: Child, log: WorkerLog) -> None:
        self._child = child
        self._log = log

    @property
    def native(self) -> Any:
        """Multiprocessing's own."""
        return self._child.native

    @property
    def is_over(self) -> bool:
        """Whether the process is gone; it stays there for `kill` to be sure of its group.

        Whoever waits for it asks every now and then: what it wrote until then is shown, too.
        """
        self._log.show()
        return self._child.is_over

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it, or what it has started, was ready to run and had no CPU."""
        return seconds_without_cpu(self.native.pid)

    def end(self) -> ProcessEnd:
        """How it ended; no more is known."""
        pid, code = self.native.pid, self._child.exit_code()
        if code is None:
            end = f"its process {pid} is gone"
        elif code < 0:
            end = f"its process {pid} was ended by {signal.Signals(-code).name}"
        else:
            end = f"its process {pid} ended with exit code {code}"
        return ProcessEnd(end, end)

    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._log.end()

    def kill(self) -> None:
        """End the process and all that its environments started."""
        if not self._child.is_over:
            kill_tree(self.native.pid)
        self._child.kill()
        kill_orphans()
        self._log.close()


def kill_group(pid: int, number_is_its_own: bool) -> None:
    """Kill a child and the group that it leads, or is to lead.

    Its number is nobody else's until its end was taken note of, and then as long as one of its
    group is left: that group has no leader.

    Args:
        number_is_its_own: whether nobody has taken note of its end.
    """
    ways = [os.killpg, os.kill]  # it may not lead one yet
    if not number_is_its_own:
        if _exists(pid):  # the number is another process's by now
            return
        ways = [os.killpg]
    for send in ways:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _exists(pid: int) -> bool:
    """Whether there is a process of that number."""
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
