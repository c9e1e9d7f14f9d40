"""What a process has from the one that starts it, and can hardly be given later."""

from __future__ import annotations

import os
from collections.abc import Hashable
from multiprocessing import spawn
from pathlib import Path

# pytest tells there which test runs; nothing reads it while it is imported.
_CHANGES_ALWAYS = {"PYTEST_CURRENT_TEST"}

_OF_STATUS = (  # of proc(5): the rest of that file says what the process has done so far
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)


def circumstances() -> Hashable:
    """What a process that this thread starts would have from it; equal where nothing has changed.

    Environment variables, which libraries read while they are imported; credentials and
    capabilities, limits, the CPUs that it may use, its priority and control group; the
    interpreter.

    Raises:
        OSError: this system does not tell.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _CHANGES_ALWAYS}
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        frozenset(environment.items()),
        tuple(line for line in status if line.partition(":")[0] in _OF_STATUS),
        *(Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        spawn.get_executable(),
    )
