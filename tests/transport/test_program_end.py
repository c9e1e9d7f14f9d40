"""A program that ends while a daemon thread collects exits at once, without output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LONG = 300.0

PROGRAM = """
import sys, threading
import gymnasium, torch
import pycollect

class Policy(torch.nn.Module):
    def forward(self, observation):
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

def make():
    return gymnasium.make("CartPole-v1")

def loop(step, begun):
    while True:
        step()
        begun.set()

def main():
    kind = sys.argv[1]
    if kind == "in process":
        collector = pycollect.SyncDataCollector(make, Policy(), frames_per_batch=int(sys.argv[2]))
    elif kind == "evaluator":
        collector = pycollect.Evaluator(make, Policy(), num_trajectories=20)
    else:
        cls = getattr(pycollect, kind)
        own = {"inference": "central"} if "central" in sys.argv else {}
        own |= {"launcher": "mp"} if kind == "DistributedDataCollector" else {}
        collector = cls([make] * 2, Policy(), frames_per_batch=400, **own)
    begun = threading.Event()
    step = collector.evaluate if kind == "evaluator" else collector.next
    for _ in range(2):
        threading.Thread(target=loop, args=(step, begun), daemon=True).start()
    begun.wait() if "endless" not in sys.argv else begun.wait(1.0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("in process", "1000"),
        ("in process", "10000000", "endless"),
        ("evaluator",),
        ("MultiSyncDataCollector",),
        ("MultiSyncDataCollector", "central"),
        ("MultiaSyncDataCollector",),
        ("MultiaSyncDataCollector", "central"),
        ("DistributedDataCollector",),
    ],
    ids=" ".join,
)
def test_a_program_with_a_collecting_daemon_thread_ends(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """A rollout in this process stops at its next step, so a long one does not delay the exit."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert (result.returncode, result.stderr) == (0, "")
