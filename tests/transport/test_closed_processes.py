"""Processes closed to inspection, even by the same user, still receive shared memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from envs_for_tests import CountingEnv, EnvBrokeError

from pycollect import MultiSyncDataCollector
from pycollect._core import SharedMemoryError

T = 5
LONG = 100_000  # bytes; more than a page of replies holds
_PR_SET_DUMPABLE = 4

# Root may inspect all processes, unless it drops this right: prctl(PR_CAPBSET_DROP, ...PTRACE).
LIKE_OTHERS = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)
os.execv(sys.executable, [sys.executable, sys.argv[1]])
"""


def close_process() -> None:
    """Close this process to inspection, except by privileged processes."""
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def check_closed(pid: int) -> None:
    """Check that this process may not inspect that process."""
    with pytest.raises(PermissionError):
        os.open(f"/proc/{pid}/fd/0", os.O_RDONLY)


class ClosedEnv(CountingEnv):
    """An env in a closed process with a closed parent; it raises a long error after `at` steps."""

    def __init__(self, at: int) -> None:
        super().__init__(length=1000)
        self.at = at
        driver = multiprocessing.parent_process()
        assert driver is not None
        check_closed(driver.pid)
        close_process()

    def step(self, action: Any) -> Any:
        if self.steps == self.at:
            raise EnvBrokeError("x" * LONG)
        return super().step(action)


def action_0(observation: torch.Tensor) -> torch.Tensor:
    """Return action 0 for one env."""
    return observation[..., 0].long() * 0


def collect() -> None:
    """Run the driver."""
    close_process()
    entries = [partial(ClosedEnv, 3 * T)]
    with MultiSyncDataCollector(entries, action_0, frames_per_batch=T) as collector:
        for batch in range(3):
            td = collector.next()
            steps = torch.arange(T) + T * batch
            assert (td["observation"][..., 2] == steps).all()
        for worker in collector.stats()["workers"].values():
            assert worker["transport"] == "shared memory"
            check_closed(worker["pid"])
        with pytest.raises(EnvBrokeError) as caught:
            collector.next()
        assert len(str(caught.value)) == LONG


@pytest.mark.slow
@pytest.mark.processes
def test_processes_that_are_closed_to_each_other_share_memory() -> None:
    path = Path(__file__)
    command = [sys.executable, "-c", LIKE_OTHERS, path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=path.parent)
    assert result.returncode == 0, result.stderr


def test_without_shared_memory_no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = "shared memory: memfd_create: Function not implemented"
    engine = "pycollect.transport.processes.engine"
    monkeypatch.setattr(f"{engine}.shared_memory_why_not", lambda: why_not)
    monkeypatch.setattr(f"{engine}.ProcessEngine.start", lambda *_: pytest.fail("a process"))
    with pytest.raises(SharedMemoryError, match="memfd_create"):
        MultiSyncDataCollector([CountingEnv], frames_per_batch=T)


if __name__ == "__main__":
    collect()
