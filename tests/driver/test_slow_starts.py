"""A worker that starts slowly on a busy machine gets more time; one that does nothing times out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from collect_support import ON_REQUEST, Way, parity_policy
from collect_support import collecting as collecting_by
from envs_for_tests import CountingEnv
from raising import raised, refused
from test_restarts import check_ledger, kill

from pycollect import MultiSyncDataCollector, WorkerError
from pycollect.transport.process import seconds_without_cpu

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
def test_a_worker_that_does_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.transport.engine._RESPOND_SECONDS", 0.5)
    with refused(ValueError, "worker_init_timeout") as caught:
        collecting(CountingEnv, NeverBuilt, limit=2.0)
    assert "1]" in str(caught.value)


@pytest.mark.processes
def test_time_without_the_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(
        "pycollect.transport.processes.child.seconds_without_cpu",
        lambda pid: time.monotonic() - began,
    )
    with collecting(CountingEnv, limit=1e-6) as collector:
        assert next(iter(collector)).numel() == 10


@pytest.mark.slow
@pytest.mark.processes
def test_the_error_names_the_time_that_did_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.transport.processes.child.seconds_without_cpu", lambda pid: 1.4)
    with refused(ValueError, "worker_init_timeout") as caught:
        collecting(NeverBuilt, limit=0.1)
    assert " 1 s" in str(caught.value)


class HangsWhenRebuilt(CountingEnv):
    """Hang in the constructor of the given builds, and of all builds from `last` on."""

    def __init__(self, folder: Path, hangs: tuple[int, ...], last: int, **kwargs: Any) -> None:
        build = len(list(folder.iterdir())) + 1
        (folder / str(build)).touch()
        if build in hangs or build >= last:
            threading.Event().wait()
        super().__init__(**kwargs)


class Unhurried(CountingEnv):
    """A slow environment, which leaves CPU time to the other worker while it hangs."""

    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)


def hangs_when_rebuilt(folder: Path, worker: int) -> Any:
    kwargs = {"number": 10 * worker, "length": (4,)}
    if worker == 0:
        return partial(Unhurried, **kwargs)
    return partial(HangsWhenRebuilt, folder, (2,), 4, **kwargs)


@pytest.mark.parametrize("way", ON_REQUEST)
def test_a_replacement_that_hangs_counts_as_a_death(way: Way, tmp_path: Path) -> None:
    """The replacement is restarted; past the limit the error names the timeout and the worker."""
    with collecting_by(
        way,
        partial(hangs_when_rebuilt, tmp_path),
        parity_policy(),
        frames=5,
        worker_init_timeout=2.0 if way.children else 60.0,
    ) as collector:
        collector.next()
        kill(collector, 1)
        while collector.stats()["workers"][1]["restarts"] < 2:
            collector.next()
        before = collector.stats()["workers"][1]["frames"]
        while collector.stats()["workers"][1]["frames"] == before:  # until it is built and collects
            collector.next()
        kill(collector, 1)
        with raised(WorkerError, worker=1) as caught:
            list(islice(collector, 1_000_000))
        assert "worker_init_timeout" in str(caught.value)
        ledger = check_ledger(collector)
    assert set(ledger["workers"][1]["reasons"]) == {"worker_died"}
    assert ledger["workers"][0]["reasons"] == {}


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
        assert seconds_without_cpu(os.getpid()) >= longest  # the value includes child processes
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert seconds_without_cpu(both[0].pid) == 0.0
