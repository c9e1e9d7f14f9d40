"""Processes started by environments end with their worker, even if they are detached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collect_support import ON_REQUEST, Way, collecting, is_gone, parity_policy
from detaching_env import simulated
from echo_envs import wait_until
from test_restarts import kill

from pycollect import MultiSyncDataCollector
from pycollect.transport import worker_process

T = 5
LONG = 300.0


def started_by(folder: Path, worker: int) -> list[int]:
    """Return the pids of the programs that a worker's environments started."""
    return [int(path.name) for path in (folder / str(worker)).iterdir()]


def all_started(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*/*")]


def check_they_end(collector: Any, folder: Path) -> None:
    """Kill a worker, then shut down, and check that each worker's programs end with it."""
    with collector:
        collector.next()
        workers = collector.stats()["workers"]
        killed, other = (started_by(folder, workers[index]["pid"]) for index in (1, 0))
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        for pid in killed:
            wait_until(partial(is_gone, pid), LONG)
        assert not any(map(is_gone, other))
        collector.next()
    for pid in all_started(folder):
        wait_until(partial(is_gone, pid), LONG)


@pytest.mark.parametrize("way", ON_REQUEST)
def test_detached_programs_end_with_their_worker(way: Way, tmp_path: Path) -> None:
    with collecting(
        way, partial(simulated, tmp_path, way.children), parity_policy(), frames=T
    ) as collector:
        check_they_end(collector, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_detached_programs_end_with_a_spawned_worker(tmp_path: Path) -> None:
    entries = [simulated(tmp_path, False, worker) for worker in range(2)]
    collector = MultiSyncDataCollector(entries, None, frames_per_batch=2 * T, start_method="spawn")
    check_they_end(collector, tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_detached_programs_end_with_a_worker_that_hangs(tmp_path: Path) -> None:
    entries = [simulated(tmp_path, True, worker) for worker in range(2)]
    with MultiSyncDataCollector(entries, None, frames_per_batch=2 * T) as collector:
        collector.next()
        for worker in collector.stats()["workers"].values():
            os.kill(worker["pid"], signal.SIGSTOP)
        collector.shutdown(timeout=0.1)
    for pid in all_started(tmp_path):
        wait_until(partial(is_gone, pid), LONG)


DRIVER = """
import sys
from pathlib import Path
from pycollect import DistributedDataCollector, MultiSyncDataCollector
from detaching_env import simulated
if __name__ == "__main__":
    kind, folder, arguments = sys.argv[1], Path(sys.argv[2]), {}
    if kind == "spawn":
        arguments["start_method"] = "spawn"
    cls = DistributedDataCollector if kind == "ranks" else MultiSyncDataCollector
    if kind == "ranks":
        arguments["launcher"] = "mp"
    entries = [simulated(folder, True, worker) for worker in range(2)]
    with cls(entries, None, frames_per_batch=5, **arguments) as collector:
        collector.next()
        print("collecting", flush=True)
        sys.stdin.read()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind", ["forkserver", *(pytest.param(k, marks=pytest.mark.slow) for k in ("spawn", "ranks"))]
)
def test_detached_programs_end_with_a_driver_that_is_killed(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    folder = tmp_path / "notes"
    driver = subprocess.Popen(
        [sys.executable, str(script), kind, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "collecting\n"
    driver.kill()
    driver.communicate(timeout=LONG)
    pids = all_started(folder)
    assert len(pids) == 6
    for pid in pids:
        wait_until(partial(is_gone, pid), LONG)


def test_programs_of_another_driver_with_the_same_pid_are_not_ended() -> None:
    """In two containers, drivers can share a process id; their start times still differ."""
    mark = f"{os.getpid()}.1.{1 << 30}.1"
    program = subprocess.Popen(["sleep", "60"], env={**os.environ, "PYCOLLECT_WORKER": mark})
    try:
        wait_until(lambda: mark.encode() in Path(f"/proc/{program.pid}/environ").read_bytes())
        worker_process.kill_orphans()
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()


def test_a_process_ends_although_a_child_of_another_user_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    own = os.kill

    def refused(pid: int, number: int) -> None:
        if pid == child:
            raise PermissionError(1, "Operation not permitted")
        own(pid, number)

    with monkeypatch.context() as patch:
        patch.setattr(worker_process.os, "kill", refused)
        worker_process.kill_tree(parent.pid)
    assert parent.wait() == -signal.SIGKILL
    own(child, signal.SIGKILL)
    parent.stdout.close()
