"""Contents of the installed package, and the optional dependencies of each part."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata, resources

import pytest

import pycollect


def python(code: str, without: tuple[str, ...]) -> str:
    """Return the output of a new interpreter that cannot import these modules."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({without!r}))\n"
    done = subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names() -> None:
    for name in pycollect.__all__:
        assert getattr(pycollect, name).__module__.startswith("pycollect.")
        assert name in dir(pycollect)
    for name in ("", "MultiSync", "Distributed", "DistributedSync", "RPC"):
        older = getattr(pycollect, f"{name or 'Sync'}DataCollector")
        assert getattr(pycollect, f"{name}Collector") is older
    with pytest.raises(AttributeError, match="RayCollektor"):
        _ = pycollect.RayCollektor


def test_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pycollect.__version__)


def test_the_distribution_has_that_version_and_a_name_of_its_own() -> None:
    try:
        found = metadata.version("pycollect-rl")
    except metadata.PackageNotFoundError:
        pytest.skip("not installed: imported from a folder")
    assert found == pycollect.__version__


def test_cuda_is_available_without_an_import() -> None:
    assert python("import pycollect\nprint(pycollect.cuda.available())", ()) in ("True", "False")


@pytest.mark.parametrize("name", ["py.typed", "__init__.pyi", "_core.pyi"])
def test_types_are_shipped(name: str) -> None:
    assert (resources.files("pycollect") / name).is_file()


def test_importing_imports_nothing() -> None:
    code = "import pycollect\nprint([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert python(code, ()) == "[]"


def test_the_core_needs_only_numpy() -> None:
    code = """
import numpy as np
from pycollect._core import Layout, Leaf, Placement, SlabPool, copy

pool = SlabPool(Placement(Layout([Leaf(("a",), "float32", (3,))]), 1, 2, 5), 1)
slab = pool.acquire()
target = np.zeros((5, 2), np.float32)
copy(target, np.arange(10).reshape(2, 5).T)
print(slab.array().nbytes == slab.bytes, int(target.sum()))
"""
    without = ("torch", "tensordict", "gymnasium", "ray", "tqdm", "cloudpickle", "torchrl")
    assert python(code, without) == "True 45"


@pytest.mark.slow
def test_splitting_needs_neither_gymnasium_nor_ray() -> None:
    code = """
import torch
from tensordict import TensorDict
from pycollect import WorkerError, split_trajectories

td = TensorDict({"next": {"done": torch.tensor([0, 1, 0]).bool()}}, [3])
print(list(split_trajectories(td).batch_size))
"""
    assert python(code, ("gymnasium", "ray", "torchrl")) == "[2, 2]"


def test_a_missing_name_of_a_dependency_is_not_reported_as_ours() -> None:
    code = """
import torch
del torch.dtype
try:
    from pycollect import SyncDataCollector
except ImportError as error:
    print(error)
"""
    assert python(code, ()).startswith("SyncDataCollector cannot be imported: module 'torch' has")


def test_a_missing_package_is_named_and_in_process_collection_needs_no_ray() -> None:
    code = """
try:
    from pycollect import SyncDataCollector
except ImportError as error:
    print(error)
del sys.modules["gymnasium"]
import gymnasium
from pycollect import RayCollector, SyncDataCollector

make = lambda: gymnasium.make("CartPole-v1")
print(len(SyncDataCollector(make, frames_per_batch=7, total_frames=7).next()))
try:
    RayCollector([make], frames_per_batch=7)
except ImportError as error:
    print(error)
"""
    needs, frames, ray = python(code, ("gymnasium", "ray", "torchrl")).splitlines()
    assert needs == "SyncDataCollector needs Gymnasium: pip install gymnasium"
    assert frames == "7"
    assert "pip install ray" in ray
