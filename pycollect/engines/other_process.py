"""A process of this machine that is nobody's child here, watched through a descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref

from pycollect.engines.descendants import kill_orphans, kill_tree


class OtherProcess:
    """A process of this machine, which leads a group of its own.

    Raises:
        OSError: the system does not permit it, or has not the call.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll: select.poll | None = None  # None: it was gone already
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            weakref.finalize(self, os.close, descriptor)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    @property
    def is_gone(self) -> bool:
        """Whether none of its threads runs any more. Does not wait."""
        return self.wait_gone(0.0)

    def wait_gone(self, seconds: float | None) -> bool:
        """Wait until it is gone, for that time at most; return whether it is."""
        if self._poll is None:
            return True
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def kill_all(self) -> None:
        """Kill the process, its group and all its descendants, and wait for the process.

        Its number is no other process's as long as one of its group is there.
        """
        if not self.is_gone:
            kill_tree(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_gone(None)
        kill_orphans()


def has_pidfd() -> bool:
    """Whether there are such descriptors: not before Linux 5.3, and not where it is forbidden."""
    try:
        OtherProcess(os.getpid())
    except (OSError, AttributeError):
        return False
    return True
