"""A process of this machine that is nobody's child here, watched through a descriptor."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from pathlib import Path


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

    def kill_group(self) -> None:
        """Kill it and all of its group, also those that it left behind.

        Its number is no other process's as long as one of its group is there.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process of this machine and all that descend from it, with the groups that they lead.

    Each is stopped before, so that it starts no more. Its number is to be its own.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        for child in children_of(pid):
            kill_tree(child)
        kill = os.killpg if os.getpgid(pid) == pid else os.kill
        kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and that are there; none where it is gone itself."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):  # by each of its threads
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def has_pidfd() -> bool:
    """Whether there are such descriptors: not before Linux 5.3, and not where it is forbidden."""
    try:
        OtherProcess(os.getpid())
    except (OSError, AttributeError):
        return False
    return True
