"""Check the committed PTX of the gather kernel against its source, given a CUDA toolkit."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from fake_cuda_support import run_with_fake
from ptx_on_host import to_cpp

_SCRIPT = Path(__file__).parents[2] / "scripts" / "make_gather_ptx.py"


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


def test_the_committed_ptx_has_no_division_and_moves_sixteen_bytes(script: ModuleType) -> None:
    _, ptx = script.committed()
    accesses = set(re.findall(r"\b(?:ld|st)\.[a-z0-9.]+", ptx))
    assert {"ld.global.nc.v2.u64", "st.global.wb.v2.u64"} <= accesses
    assert all(own.startswith(("ld.global", "st.global", "ld.param")) for own in accesses)
    assert not re.findall(r"\b(?:div|rem)\.", ptx)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize(("arch", "most"), [("80", 40), ("90", 40)])
def test_its_registers_let_six_blocks_run_on_each_multiprocessor(
    script: ModuleType, arch: str, most: int, tmp_path: Path
) -> None:
    path = tmp_path / "gather.ptx"
    path.write_text(script.committed()[1])
    command = ["ptxas", "-v", f"-arch=sm_{arch}", "-o", str(tmp_path / "gather.cubin"), str(path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    assert registers is not None, told
    assert int(registers[1]) <= most
    assert "0 bytes spill stores, 0 bytes spill loads" in told


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_the_committed_ptx_assembles(script: ModuleType) -> None:
    script.assemble(script.committed()[1])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_committed_ptx_equals_the_compiled_source(script: ModuleType) -> None:
    release, ptx = script.committed()
    if script.nvcc_release() != release:
        pytest.skip(f"made by nvcc {release}: another one writes other text")
    assert script.compiled() == ptx


_RANDOM_PLANS = """
rng = np.random.default_rng(SEED)
gather = _core.DeviceGather(0)
DTYPES = ["bool", "uint8", "int16", "float32", "int64", "float64", "complex128"]

def there(arrays):
    return [OnDevice(array) for array in arrays]

def workspace(plan, targets):
    size = _core.DeviceGather.workspace_bytes(plan, len(targets), sum(t.nbytes for t in targets))
    room = np.zeros(size + 64, np.uint8)
    return OnDevice(room[-room.ctypes.data % 64:])

def leaf(shape, dtype, frame):
    # With gaps between steps, and from an odd place on, sometimes.
    gap, skip = (int(rng.integers(0, 3)) for _ in range(2))
    rows, items = shape[:-1], int(np.prod(frame))
    step = items + gap
    most = 2 if dtype == "bool" else 120
    memory = rng.integers(0, most, int(np.prod(shape)) * step + skip).astype(dtype)
    whole = memory[skip:].reshape(*rows, shape[-1], step)[..., :items]
    return whole.reshape(*shape, *frame) if gap == 0 else np.lib.stride_tricks.as_strided(
        whole, (*shape, *frame), (*whole.strides[:-1],
        *np.zeros(frame, dtype).strides))

GUARD = 0xA5

class Target:
    # Anywhere that its items may lie, between bytes that nobody writes.
    def __init__(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.memory = np.full(size + 256, GUARD, np.uint8)
        first = 64 + np.dtype(dtype).itemsize * int(rng.integers(0, 8))
        self.edges = self.memory[:first], self.memory[first + size:]
        self.array = self.memory[first:first + size].view(dtype).reshape(shape)

    def is_kept(self):
        return all((edge == GUARD).all() for edge in self.edges)

def check(got, want, shape):
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a.array, b, err_msg=str((shape, b.dtype, b.shape)))
        assert a.is_kept(), (shape, b.dtype, b.shape)

def arrays(targets):
    return [target.array for target in targets]

for number in range(PLANS):
    is_large = number == 0  # a frame is more than a block of threads moves
    shape = tuple(int(rng.integers(1, 4)) for _ in range(rng.integers(0, 3)))
    shape = (2, 12) if is_large else (*shape, int(rng.integers(1, 150)))
    done = rng.random(shape) < rng.choice([0.02, 0.3])
    ids = np.where(rng.random(shape) < 0.05, -1, 5)
    mask = None if rng.random() < 0.5 else rng.random(shape) < 0.9
    split = _core.SplitPlan(done, ids, mask, batch_dims=len(shape))
    frames = [((int(rng.integers(1, 70)),) if rng.random() < 0.8 else (20, 30)) for _ in range(4)]
    frames = [*frames, (5003,)] if is_large else frames
    dtypes = [str(rng.choice(DTYPES)) for _ in frames]
    dtypes = [*dtypes[:-1], "float64"] if is_large else dtypes
    leaves = [leaf(shape, *own) for own in zip(dtypes, frames)]
    for form, lead in [("padded", (split.count, split.longest)), ("flat", (split.frames,))]:
        want = [np.full((*lead, *f), 1, d) for d, f in zip(dtypes, frames)]
        got = [Target((*lead, *f), d) for d, f in zip(dtypes, frames)]
        getattr(split, form)(leaves, want)
        room = workspace(split, arrays(got))
        getattr(gather, form)(split, there(leaves), there(arrays(got)), room, 0)
        check(got, want, shape)
    plan = _core.MultiStepPlan(split, int(rng.choice([1, 2, 5, 1000])))
    kinds = [(1, "float32"), (3, "float64")]
    rewards = [rng.integers(0, 9, (*shape, n)).astype(d) for n, d in kinds]
    shifted = [np.full((*shape, *f), 1, d) for d, f in zip(dtypes, frames)]
    moved = [Target((*shape, *f), d) for d, f in zip(dtypes, frames)]
    sums, totals = ([np.empty_like(own) for own in rewards] for _ in range(2))
    plan.shift(leaves, shifted)
    plan.sum(0.5, rewards, totals)
    gather.ahead(plan, 0.5, there(leaves), there(arrays(moved)), there(rewards), there(sums),
                 workspace(plan, arrays(moved) + sums), 0)
    check(moved, shifted, shape)
    for a, b in zip(sums, totals):
        np.testing.assert_allclose(a, b, rtol=1e-5)
"""


@pytest.mark.parametrize("kernel", ["twin", "PTX"])
def test_the_kernel_on_the_host(script: ModuleType, kernel: str) -> None:
    """Run the kernel's C++ twin, and the committed PTX instruction by instruction."""
    text = "" if kernel == "twin" else to_cpp(script.committed()[1], "pycollect_gather")
    plans = "5" if kernel == "twin" else "60"
    run_with_fake(_RANDOM_PLANS.replace("SEED", "4").replace("PLANS", plans), text)


def test_instructions_unknown_to_the_host_are_refused() -> None:
    entry = ".visible .entry own(\n)\n{{\n\t.reg .b32 %r<3>;\n\t{}\n\tret;\n}}\n"
    with pytest.raises(ValueError, match=r"sin\.approx\.f32"):
        to_cpp(entry.format("sin.approx.f32 %r1, %r2;"), "own")
    with pytest.raises(ValueError, match="%r1 = 3"):
        to_cpp(entry.format("%r1 = 3"), "own")
