"""The committed PTX of the gather kernel against its source, where there is a CUDA toolkit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).parent.parent / "scripts" / "make_gather_ptx.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gather_ptx", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_ptx_is_for_drivers_from_cuda_11_and_pascal_on(script: ModuleType) -> None:
    _, ptx = script.committed()
    assert ptx.startswith(".version 7.0\n.target sm_60\n")
    assert ".visible .entry pycollect_gather(" in ptx


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_the_committed_ptx_assembles(script: ModuleType) -> None:
    script.assemble(script.committed()[1])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_committed_ptx_is_what_the_source_compiles_to(script: ModuleType) -> None:
    release, ptx = script.committed()
    if script.nvcc_release() != release:
        pytest.skip(f"made by nvcc {release}: another one writes other text")
    assert script.compiled() == ptx
