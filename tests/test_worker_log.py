"""What workers write to their standard error: seen here, and its end kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pycollect.collectors.worker_log import WorkerLog


def write(log: WorkerLog, text: bytes) -> None:
    """As a worker does: it appends."""
    with open(log.path, "ab", buffering=0) as file:
        file.write(text)


def test_it_is_shown_once_and_the_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_what_was_shown_takes_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog()
    for _ in range(10):
        write(log, b"y" * 1_000_000)
        log.show()
    held = os.stat(log.path)
    assert held.st_size == 10_000_000
    assert held.st_blocks * 512 < 3_000_000
    write(log, b"z\n")
    assert log.end().endswith("yz\n")
    log.close()
    assert len(capfd.readouterr().err) == 10_000_002


FAULT = """
import faulthandler, sys
from pycollect.collectors.worker_log import log_to

def deep():
    faulthandler._sigsegv()

log_to(sys.argv[1])
print("before", file=sys.stderr)
deep()
"""


def test_a_fault_says_where_it_happened(capfd: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog()
    done = subprocess.run([sys.executable, "-c", FAULT, log.path], timeout=60, check=False)
    assert done.returncode < 0
    words = log.end()
    assert words.startswith("before\n")
    assert "Segmentation fault" in words
    assert "in deep" in words
    log.close()


def test_where_it_cannot_be_opened_nothing_changes() -> None:
    code = (
        "import sys\nfrom pycollect.collectors.worker_log import log_to\nlog_to('/proc/1/fd/x')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "print('here', file=sys.stderr)"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == b"here\n"
