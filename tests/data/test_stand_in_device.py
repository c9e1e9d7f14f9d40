"""In-process GPU tests, run on a fake device with memory separate from the CPU's.

They fail if a test or the package mixes devices, or if a part of the environment stays on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from new_process import run_code
from torch.utils import backend_registration

HERE = Path(__file__).parent

needs_devices_in_python = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no devices that are written in Python",
)


MIXING = """
import sys
import pytest, stand_in_device, torch

there = torch.ones(3, device="standin")
assert (there + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
for mix in (lambda: there + torch.ones(3), lambda: torch.ones(3).add_(there), there.numpy):
    try:
        mix()
    except RuntimeError:
        continue
    raise AssertionError
print("mixing is an error", flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@needs_devices_in_python
def test_no_test_for_gpus_mixes_devices() -> None:
    """First check that mixing the device with the CPU is an error."""
    options = ["-v", "-p", "stand_in_device", "-p", "no:cacheprovider", "--tb=short"]
    # Worker processes do not know the device, and it draws no random numbers.
    here = "not multi and not ranks and not ray and not elsewhere and not generator"
    choice = ["-m", "cuda and not slow", "-k", here]
    names = ("test_cuda.py", "test_cuda_gather.py")
    files = [str(HERE / name) for name in names]
    environment = {**os.environ}
    environment.pop("PYTEST_ADDOPTS", None)
    result = subprocess.run(
        [sys.executable, "-c", MIXING, *options, *choice, *files],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.stdout.startswith("mixing is an error\n"), result.stderr
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]
    assert "standin] PASSED" in result.stdout


COUNTING = """
from functools import partial

import stand_in_device
from stand_in_device import Tensor
from tensor_envs import ENVS, CountingTensors

import pycollect

counts = {}
plain = stand_in_device._called


def count(kind):
    counts[kind] = counts.get(kind, 0) + 1


def called(op, *args, **kwargs):
    name = op._schema.name
    if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
        count("values asked for")
    if name in ("aten::_copy_from", "aten::copy_"):
        *_, first, second = args[:2]
        target, source = (second, first) if name == "aten::_copy_from" else (first, second)
        if isinstance(source, Tensor) != isinstance(target, Tensor):
            count("to the host" if isinstance(source, Tensor) else "to the device")
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        if device is not None and isinstance(args[0], Tensor) != (device.type == "standin"):
            count("to the host" if isinstance(args[0], Tensor) else "to the device")
    return plain(op, *args, **kwargs)


stand_in_device._called = called
for mode, steps in (("SAME_STEP", 10), ("SAME_STEP", 40)):
    with pycollect.SyncDataCollector(
        partial(CountingTensors, mode, device="standin"),
        lambda observation: observation[:, 1:] % 3,
        frames_per_batch=steps * ENVS,
        total_frames=-1,
    ) as collector:
        next(collector)
        counts.clear()
        next(collector)
        print(sorted(counts.items()), flush=True)
"""


@needs_devices_in_python
def test_a_step_on_a_device_waits_for_nothing() -> None:
    """For any number of steps, one copy comes to the host, and none goes to the device."""
    assert run_code(COUNTING).splitlines() == ["[('to the host', 1)]"] * 2
