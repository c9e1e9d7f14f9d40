"""Workers and drivers killed at random moments: batches are whole, and no process is left behind.

Fifty kills in all, most of them in slow cases. test_process_engine.py kills drivers that start
processes. The clock only chooses the moment of a kill; no test waits for a fixed time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    MULTI_AHEAD,
    MULTI_ASYNC,
    STACK,
    Way,
    collecting,
    of_ranks,
    worker_processes,
)
from echo_envs import wait_until
from test_restarts import check_ledger, endless

T = 5
LONG = 300.0
ACTOR = "ray::RayWorker"  # in the command line of an actor


def workers(of: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process that run workers, including those still starting."""
    found = worker_processes(of.pid)
    for process in of.children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found += [process] if ACTOR in " ".join(process.cmdline()) else []
    return found


def kill_some(count: int, moments: random.Random, done: threading.Event) -> None:
    """Kill this number of this process's workers, one by one."""
    killed: set[psutil.Process] = set()
    while len(killed) < count:
        time.sleep(moments.random() / 2)
        living = [process for process in workers(psutil.Process()) if process not in killed]
        if living:
            victim = moments.choice(living)
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                killed.add(victim)
    done.set()


@contextmanager
def killing(count: int) -> Iterator[threading.Event]:
    """Kill workers in the background, and set the event after the last kill."""
    done = threading.Event()
    thread = threading.Thread(target=kill_some, args=(count, random.Random(count), done))
    thread.start()
    yield done
    thread.join()


def shared_files() -> list[str]:
    """Return the shared memory of this process, found through its file descriptors."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in targets if "memfd:pycollect" in target]


def case(way: Way, kills: int, *marks: Any) -> Any:
    place = pytest.mark.processes if way.children else pytest.mark.ray
    return pytest.param(way, kills, id=f"{way.name}, {kills} times", marks=[place, *marks])


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("way", "kills"),
    [
        case(MULTI_AHEAD, 2),
        case(MULTI_AHEAD, 6, pytest.mark.slow),
        case(MULTI_ASYNC[2], 6, pytest.mark.slow),
        case(STACK, 6, pytest.mark.slow),
        case(ASYNC[2], 6, pytest.mark.slow),
        *[case(way, 6, pytest.mark.slow) for way in of_ranks(MULTI_AHEAD)],
        *[case(way, 6, pytest.mark.slow) for way in of_ranks(MULTI_ASYNC[2])],
    ],
)
def test_workers_that_are_killed(way: Way, kills: int) -> None:
    before = shared_files()
    with collecting(way, endless, frames=T, max_worker_restarts=kills) as collector:
        ids: list[torch.Tensor] = []
        with killing(kills) as done:
            while not done.is_set() or restarts(collector) < kills:
                td = collector.next()
                assert td.shape == way.shape(1, False, T)
                steps = td["observation"][..., 2]
                assert ((td["next", "observation"][..., 2] - steps) == 1).all()
                ids.append(td["collector", "traj_ids"].flatten().clone())
        assert restarts(collector) == kills
        ledger = check_ledger(collector)
        assert ledger["total"]["delivered"] == collector.stats()["frames"]
        assert ledger["total"]["reasons"].keys() <= {"worker_died"}
    every = torch.cat(ids).unique()
    assert every.tolist() == list(range(int(every.max()) + 1))
    del collector, td, steps
    assert shared_files() == before


def restarts(collector: Any) -> int:
    return sum(worker["restarts"] for worker in collector.stats()["workers"].values())


DRIVER = """
import sys
import ray
from collect_support import ASYNC, STACK, collecting
from test_restarts import endless
ray.init(address=sys.argv[1], log_to_driver=False)
print("joined", flush=True)
with collecting([STACK, ASYNC[2]][int(sys.argv[2]) % 2], endless, frames=5) as collector:
    print("built", flush=True)
    for _ in collector:
        pass
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("moment", range(12))
def test_drivers_of_actors_that_are_killed(ray_cluster: Any, moment: int, tmp_path: Path) -> None:
    """Kill every third driver while its actors start, and the others during collection."""
    free = ray_cluster.available_resources()["CPU"]
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    address = ray_cluster.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, str(script), address, str(moment)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "joined\n"
    if moment % 3:
        assert driver.stdout.readline() == "built\n"
    time.sleep(random.Random(moment).random() * (0.5 if moment % 3 else 3.0))
    driver.kill()
    driver.wait(LONG)
    wait_until(lambda: not workers(psutil.Process()), LONG)
    wait_until(lambda: ray_cluster.available_resources().get("CPU") == free, LONG)
