"""A rank that was asked to serve a mailbox: whether it does, how it ended, its end."""

from __future__ import annotations

import time
from typing import Any, Protocol

from pycollect.engines.distributed.meeting import REFUSAL, Meeting
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.processes.handle import ProcessMonitor
from pycollect.engines.waiting import LOOK_SECONDS


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
        if now - self._looked < LOOK_SECONDS:
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

    def last_words(self) -> str:
        """The last lines that it logged."""
        return self._process.last_words()

    def kill(self) -> None:
        """End it, and all that its environments started; it is gone then. Idempotent."""
        if self._end is None:
            is_over = self._process.is_over
            self._end = self._process.end() if is_over else ProcessEnd("it was ended", "")
            self._process.kill()
            self._meeting.close()
