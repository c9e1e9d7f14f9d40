"""An environment that starts detached programs. No torch: workers import this file by name."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from echo_envs import EchoEnv, wait_until


def daemon(note: Path, program: bool) -> None:
    """Start a daemon like a C program: two forks and a new session. Record its pid."""
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            (note / str(os.getpid())).touch()
            if program:
                os.execvp("sleep", ["sleep", "1000"])
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)


class Simulated(EchoEnv):
    """Start detached programs and record their pids in a folder.

    Args:
        forks: also start a daemon that is a fork of the worker.
    """

    def __init__(self, folder: Path, forks: bool, number: int) -> None:
        super().__init__(number, (4,))
        note = folder / str(os.getpid())
        note.mkdir(parents=True)
        program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (note / str(program.pid)).touch()
        kinds = [True, False] if forks else [True]
        for kind in kinds:
            daemon(note, kind)
        wait_until(lambda: len(list(note.iterdir())) == 1 + len(kinds))


def simulated(folder: Path, forks: bool, worker: int) -> Any:
    return partial(Simulated, folder, forks, 10 * worker)
