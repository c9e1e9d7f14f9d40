"""A worker process of this one: whether it runs, how it ended, what it wrote, its end."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from pycollect.engines.processes.log import WorkerLog


class ChildMonitor:
    """Watches a child of this process, and ends it.

    Args:
        process: multiprocessing's.
        log: its standard error.
    """

    def __init__(self, process: Any, log: WorkerLog) -> None:
        self.native = process
        self._log = log

    @property
    def is_over(self) -> bool:
        """Whether the process is gone; it stays there for `kill` to be sure of its group.

        Whoever waits for it asks every now and then: what it wrote until then is shown, too.
        """
        self._log.show()
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.native.pid, flags) is not None
        except ChildProcessError:  # somebody else has taken note of its end
            return True

    def end(self) -> tuple[str, str]:
        """How it ended, and the same again: no more is known."""
        end = _end_of(self.native)
        return end, end

    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._log.end()

    def kill(self) -> None:
        """End the process and all that its environments started."""
        _kill_group(self.native.pid)
        self.native.join()
        self.native.close()
        self._log.close()


def _end_of(process: Any) -> str:
    """How a child has ended."""
    pid = process.pid
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        code = None if end is None else end.si_status
        if end is not None and end.si_code != os.CLD_EXITED:
            code = -end.si_status
    except ChildProcessError:  # multiprocessing takes note of all ends when it starts a process
        code = process.exitcode
    if code is None:
        return f"its process {pid} is gone"
    if code < 0:
        return f"its process {pid} was ended by {signal.Signals(-code).name}"
    return f"its process {pid} ended with exit code {code}"


def _kill_group(pid: int) -> None:
    """Kill a child and the group that it leads.

    Its number is nobody else's until its end was taken note of, and then as long as one of its
    group is left: that group has no leader.
    """
    ways = [os.killpg, os.kill]  # it may not lead one yet
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
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
