"""The notebook for free hosted services runs, cell by cell, and learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "cartpole.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def code_of(cells: list[dict[str, Any]]) -> list[str]:
    """Return the sources of the code cells."""
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_learns(tmp_path: Path) -> None:
    """Run every cell after the installation; the plot opens no window."""
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    install, *cells = code_of(CELLS)
    assert install.startswith("%pip install ")
    ran = subprocess.run(
        [sys.executable, "-c", "\n\n".join(cells)],
        env={**os.environ, "MPLBACKEND": "Agg"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    mean = re.search(r"mean return (\d+) after", ran.stdout)
    assert mean is not None
    assert int(mean[1]) >= 195


def test_the_notebook_is_committed_without_outputs() -> None:
    """Outputs become outdated and make diffs long."""
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}


def test_every_code_cell_is_explained() -> None:
    kinds = [cell["cell_type"] for cell in CELLS]
    assert kinds[0] == "markdown"
    assert ("code", "code") not in pairwise(kinds)
