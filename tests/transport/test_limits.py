"""Limits of the operating system: the error names the limit, and collection can continue later."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collect_support import (
    CENTRAL_ASYNC,
    MULTI_ASYNC,
    MULTI_STACK,
    ON_REQUEST,
    Way,
    bias_policy,
    collecting,
    parity_policy,
)
from test_process_engine import LONG
from test_restarts import check_ledger, endless, kill

from pycollect.transport.processes.child import unnamed_file

T = 5
NAMES = {errno.EMFILE: "RLIMIT_NOFILE", errno.EAGAIN: "RLIMIT_NPROC", errno.ENOMEM: "memory"}


@contextmanager
def no_process_starts(number: int) -> Iterator[None]:
    """Make every start of a process fail with this error number."""
    error = OSError(number, os.strerror(number))
    with (
        mock.patch("pycollect.transport.processes.engine.start_child", side_effect=error),
        mock.patch("pycollect.transport.distributed.launchers.start_child", side_effect=error),
        mock.patch("pycollect.transport.ray.engine.WorkerHandle", side_effect=error),
    ):
        yield


def exhaust(collector: Any) -> None:
    """Collect batches until a call fails; other workers deliver until the death is noticed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        collector.next()


@pytest.mark.parametrize(
    "number", [errno.EMFILE, *(pytest.param(n, marks=pytest.mark.slow) for n in list(NAMES)[1:])]
)
@pytest.mark.parametrize("way", ON_REQUEST)
def test_a_replacement_is_started_once_the_limit_permits_it(way: Way, number: int) -> None:
    with collecting(way, endless, parity_policy(), frames=T) as collector:
        collector.next()
        kill(collector, 1)
        with no_process_starts(number), pytest.raises(OSError, match=NAMES[number]) as caught:
            exhaust(collector)
        assert caught.value.errno == number
        check_ledger(collector)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        for _ in range(3):
            assert collector.next() is not None
        ledger = check_ledger(collector)
        assert collector.stats()["workers"][1]["restarts"] == 1
    assert set(ledger["total"]["reasons"]) <= {"worker_died"}


@pytest.mark.slow
@pytest.mark.processes
def test_a_policy_server_is_started_once_the_limit_permits_it() -> None:
    with collecting(CENTRAL_ASYNC, endless, parity_policy(), frames=T) as collector:
        collector.next()
        os.kill(collector.stats()["server"]["pid"], 9)
        with no_process_starts(errno.EAGAIN), pytest.raises(OSError, match="RLIMIT_NPROC"):
            exhaust(collector)
        for _ in range(5):
            assert collector.next() is not None
        assert collector.stats()["server"]["restarts"] == 1
        check_ledger(collector)


@pytest.mark.processes
def test_workers_that_are_added_may_be_added_later() -> None:
    with collecting(MULTI_ASYNC[0], endless, frames=T) as collector:
        collector.next()
        with no_process_starts(errno.EMFILE), pytest.raises(OSError, match="RLIMIT_NOFILE"):
            collector.add_collectors([endless(2)])
        collector.add_collectors([endless(2)])
        assert len(collector.stats()["workers"]) == 3
        assert collector.next() is not None


@pytest.mark.processes
def test_a_constructor_that_reaches_a_limit_names_it() -> None:
    with no_process_starts(errno.EMFILE), pytest.raises(OSError, match="RLIMIT_NOFILE"):
        MULTI_STACK.collector([endless(0)] * 2, frames_per_batch=2 * T)


@pytest.mark.processes
def test_an_update_that_reaches_a_limit_can_be_repeated() -> None:
    policy = bias_policy()
    with collecting(MULTI_STACK, endless, policy, frames=T) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.bias += 3.0
        wire = "pycollect.transport.pickling.Memory"
        with mock.patch(wire) as memory:
            memory.share_copy.side_effect = MemoryError
            with pytest.raises(OSError, match="memory"):
                collector.update_policy_weights_()
        collector.update_policy_weights_()
        assert (collector.next()["bias"] == 3.0).all()


DRIVER = """
import os, resource
from pycollect import MultiSyncDataCollector
from test_restarts import endless

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def main():
    collector = MultiSyncDataCollector([endless(0), endless(1)], None, frames_per_batch=10)
    collector.next()
    before, files = descriptors(), []
    limit = 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        while True:
            files.append(open(os.devnull))
    except OSError:
        pass
    os.kill(collector.stats()["workers"][0]["pid"], 9)
    for _ in range(5):
        try:
            for _ in range(100):
                collector.next()
        except OSError as error:
            print(f"RLIMIT_NOFILE: all {limit}" in str(error))
    for file in files:
        file.close()
    for _ in range(3):
        collector.next()
    print(collector.stats()["workers"][0]["restarts"], descriptors() <= before + 5)
    collector.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_descriptors_that_run_out(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert ended.stdout == "True\n" * 5 + "1 True\n", ended.stderr


WITHOUT_MEMFD = """
import ctypes, platform
from pycollect import DistributedDataCollector
from test_restarts import endless

CALL = {"x86_64": 319, "aarch64": 279}[platform.machine()]

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

def forbid():
    # Load the call's number; if it is memfd_create, fail with EPERM, else allow.
    allow, forbid = 0x7FFF0000, 0x00050001
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, CALL), (0x06, 0, 0, forbid), (0x06, 0, 0, allow)]
    program = Program(len(steps), (Filter * len(steps))(*[Filter(*step) for step in steps]))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP

def main():
    forbid()
    with DistributedDataCollector(
        [endless(0), endless(1)], None, frames_per_batch=10, launcher="mp"
    ) as collector:
        print(collector.next().numel())
        print({worker["transport"] for worker in collector.stats()["workers"].values()})

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.ranks
def test_ranks_start_if_memfd_create_is_forbidden(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(WITHOUT_MEMFD)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert ended.stdout == "10\n{'messages'}\n", ended.stderr


def test_an_unnamed_file_is_on_disk_if_memfd_create_is_forbidden() -> None:
    error = OSError(errno.EPERM, "forbidden")
    with mock.patch("os.memfd_create", side_effect=error):
        descriptor = unnamed_file("test")
    with open(descriptor, "w+b") as file:
        file.write(b"kept")
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("(deleted)")
