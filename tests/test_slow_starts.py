"""A worker that starts slowly on a busy machine is waited for; one that does nothing is late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from envs_for_tests import CountingEnv

from pycollect import MultiSyncDataCollector
from pycollect.engines.cpu_delay import seconds_without_cpu

needs_schedstat = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the system does not tell"
)
PATIENCE = 30.0


class NeverBuilt(CountingEnv):
    def __init__(self) -> None:
        threading.Event().wait()


def collecting(*envs: Any, limit: float) -> MultiSyncDataCollector:
    return MultiSyncDataCollector(
        list(envs), None, frames_per_batch=10 * len(envs), worker_init_timeout=limit
    )


@pytest.mark.processes
def test_a_worker_that_does_nothing_is_late() -> None:
    late = r"worker_init_timeout: workers \[(0, )?1\] did not start within 2 s"
    with pytest.raises(ValueError, match=late):
        collecting(CountingEnv, NeverBuilt, limit=2.0)


@pytest.mark.processes
def test_time_in_which_others_had_the_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(
        "pycollect.engines.processes.child.seconds_without_cpu",
        lambda pid: time.monotonic() - began,
    )
    with collecting(CountingEnv, limit=1e-6) as collector:
        assert next(iter(collector)).numel() == 10


@pytest.mark.slow
@pytest.mark.processes
def test_what_did_not_count_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.engines.processes.child.seconds_without_cpu", lambda pid: 1.4)
    said = r"within 0\.1 s \(beside 1 s for which other programs had the CPU\)"
    with pytest.raises(ValueError, match=said):
        collecting(NeverBuilt, limit=0.1)


@needs_schedstat
def test_a_process_that_shares_a_cpu_waits_for_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        deadline = time.monotonic() + PATIENCE
        while min(seconds_without_cpu(process.pid) for process in both) < 0.02:
            assert time.monotonic() < deadline
        longest = max(seconds_without_cpu(process.pid) for process in both)
        assert seconds_without_cpu(os.getpid()) >= longest  # of what it has started
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert seconds_without_cpu(both[0].pid) == 0.0
