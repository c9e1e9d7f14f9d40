"""Workers' standard error: shown in this process, with its last part kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pycollect.transport.processes.child import WorkerLog


def write(log: WorkerLog, text: bytes) -> None:
    """Write to the log as a worker does."""
    while text:
        text = text[os.write(log.fileno(), text) :]


def test_a_log_is_shown_once_and_its_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog()
    log.show()
    assert log.end() == ""
    write(log, b"one\n")
    log.show()
    log.show()
    write(log, b"t\xc3\xbc\xff\n")
    assert log.end() == "one\nt\u00fc\ufffd\n"
    assert capfd.readouterr().err == "one\nt\u00fc\ufffd\n"
    write(log, b"x" * 5000)
    log.close()
    log.close()
    assert log.end() == "x" * 2000
    assert capfd.readouterr().err == "x" * 5000


def test_shown_output_takes_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog()
    for _ in range(10):
        write(log, b"y" * 1_000_000)
        log.show()
    held = os.fstat(log.fileno())
    assert held.st_size == 10_000_000
    assert held.st_blocks * 512 < 3_000_000
    write(log, b"z\n")
    assert log.end().endswith("yz\n")
    log.close()
    assert len(capfd.readouterr().err) == 10_000_002


FAULT = """
import faulthandler, sys
from pycollect.transport.host import log_to

def deep():
    faulthandler._sigsegv()

log_to(int(sys.argv[1]))
print("before", file=sys.stderr)
deep()
"""


def test_a_crash_logs_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog()
    file = log.fileno()
    command = [sys.executable, "-c", FAULT, str(file)]
    done = subprocess.run(command, pass_fds=[file], timeout=60, check=False)
    assert done.returncode < 0
    words = log.end()
    assert words.startswith("before\n")
    assert "Segmentation fault" in words
    assert "in deep" in words
    log.close()


def test_output_appended_through_another_descriptor_is_kept() -> None:
    log = WorkerLog()
    write(log, b"one ")
    with open(f"/proc/self/fd/{log.fileno()}", "ab", buffering=0) as file:
        file.write(b"two ")
    write(log, b"three")
    assert log.end() == "one two three"
    log.close()
