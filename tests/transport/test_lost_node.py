"""When a node is lost, its actors are replaced on the remaining nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["", "central"])
def test_a_lost_node(inference: str) -> None:
    pytest.importorskip("ray")
    program = Path(__file__).parents[1] / "support" / "lost_node_program.py"
    result = subprocess.run(
        [sys.executable, program, inference], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
