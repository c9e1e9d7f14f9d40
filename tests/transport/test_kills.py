"""Drivers of actors killed at random moments: no process is left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from collect_support import worker_processes
from echo_envs import wait_until

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


def shared_files() -> list[str]:
    """Return the shared memory of this process, found through its file descriptors."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in targets if "memfd:pycollect" in target]


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
