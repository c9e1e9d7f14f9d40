"""Shared memory between real processes: access, refusals and leaks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pycollect._core import (
    Layout,
    Leaf,
    Memory,
    Placement,
    SharedMemoryError,
    SharedSlabPool,
    available_memory,
    shared_memory_why_not,
)

FORKING = multiprocessing.get_context("forkserver")


def placement() -> Placement:
    return Placement(Layout([Leaf(("a",), "float32", (3,))]), 2, 1, 5)


def run_in_process(target: Any, *arguments: Any) -> Any:
    """Return the value that `target` sends from another process."""
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        process.join(60)
        assert process.exitcode is not None


def fill_slab(pipe: Connection, address: Any, generation: int) -> None:
    slab = Memory.attach(address).slab(placement(), generation)
    slab.array()[:] = 7
    pipe.send(slab.generation)


def share_and_wait(pipe: Connection) -> None:
    memory = Memory.share(1000)
    memory.array()[:] = 3
    pipe.send(memory.address)
    pipe.recv()


def test_a_worker_writes_into_the_drivers_slab() -> None:
    assert shared_memory_why_not() == ""
    pool = SharedSlabPool(placement(), 1, 1)
    slab = pool.acquire()
    assert run_in_process(fill_slab, slab.memory.address, slab.generation) == slab.generation
    assert (slab.array() == 7).all()
    pool_bytes = slab.memory.bytes
    assert pool_bytes == placement().bytes


def test_a_killed_creator_leaves_only_memory_that_others_hold() -> None:
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=share_and_wait, args=(theirs,))
    process.start()
    address = ours.recv()
    memory = Memory.attach(address)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert (memory.array() == 3).all()
    with pytest.raises(SharedMemoryError):
        Memory.attach(address)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_open_it() -> None:
    memory = Memory.share(1000)
    assert memory.address is not None
    pid, fd, *_ = memory.address
    path = f"/proc/{pid}/fd/{fd}"
    assert subprocess.run(["head", "-c1", path], capture_output=True).stdout == b"\0"
    nobody = subprocess.run(["head", "-c1", path], user=65534, group=65534, capture_output=True)
    assert nobody.returncode != 0
    assert nobody.stdout == b""


def lent_to(user: int, address: tuple[int, int, int, int, int]) -> bool:
    """Return whether the socket of this process lends the memory to this user."""
    pid, fd, inode, *_ = address
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setresuid(user, user, user)
            space = os.stat("/proc/self/ns/pid").st_ino
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(f"\0pycollect-{space}-{pid}")
                client.settimeout(10)
                client.send(struct.pack("qQ", fd, inode))
                os._exit(len(socket.recv_fds(client, 1, 1)[1]))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_socket_lends_nothing_to_another_user() -> None:
    memory = Memory.share(1000)
    assert memory.address is not None
    assert lent_to(0, memory.address)
    assert not lent_to(65534, memory.address)


def test_too_large_sizes_are_refused_with_both_numbers() -> None:
    limit, source = available_memory()
    assert limit > 0
    assert source
    wanted = 1 << 60
    with pytest.raises(ValueError, match=str(wanted)):
        Memory.share(wanted)
    with pytest.raises(ValueError, match="shared memory"):
        SharedSlabPool(placement(), 1 << 50, 0)


@pytest.mark.parametrize(
    ("limit", "most", "wanted"), [("RLIMIT_AS", 2**32, 2**33), ("RLIMIT_FSIZE", 2**12, 2**13)]
)
def test_the_limit_of_the_process_is_respected(limit: str, most: int, wanted: int) -> None:
    code = (
        "import resource; from pycollect._core import Memory\n"
        f"resource.setrlimit(resource.{limit}, ({most}, {most})); Memory.share({wanted})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"({limit}), got {wanted}" in result.stderr


def test_without_free_descriptors_the_error_has_the_reason() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        why_not = shared_memory_why_not()
        with pytest.raises(SharedMemoryError, match="memfd_create"):
            Memory.share(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "memfd_create" in why_not
