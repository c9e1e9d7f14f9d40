"""`_core.copy` compared with numpy, over shapes, dtypes and strides."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest
from arrays_for_tests import DTYPES, filled, laid_out, laid_out_like, memory_orders, shapes
from hypothesis import given
from hypothesis import strategies as st
from raising import refused

from pycollect import _core


def model(values: np.ndarray, dtype: str) -> np.ndarray:
    """Apply the casting rules of copy.h in numpy."""
    target = np.dtype(dtype)
    if target.kind == "b":
        return values != 0
    if values.dtype.kind == "c" and target.kind != "c":
        values = values.real
    if values.dtype.kind == "f" and target.kind in "iu":
        info = np.iinfo(dtype)
        exact = np.trunc(np.where(np.isnan(values), 0, values).astype(np.float64))
        result = np.empty(values.shape, dtype)
        for index in np.ndindex(values.shape):
            clipped = min(max(exact[index], -(2.0**64)), 2.0**65)
            result[index] = min(max(int(clipped), info.min), info.max)
        return result
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    shape = draw(shapes)
    return (
        shape,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(DTYPES)),
        draw(memory_orders(len(shape))),
        draw(memory_orders(len(shape))),
        draw(st.integers(0, 2**32)),
    )


@given(cases())
def test_copies_and_casts_like_numpy(case: tuple) -> None:
    shape, source_dtype, target_dtype, source_order, target_order, seed = case
    values = filled(shape, source_dtype, np.random.default_rng(seed))
    source = laid_out_like(values, source_order)
    target, memory = laid_out(shape, target_dtype, target_order)
    expected, expected_memory = laid_out(shape, target_dtype, target_order)
    expected[...] = model(values, target_dtype)
    _core.copy(target, source)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(memory, expected_memory)  # nor anything around it


@given(shapes, st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_sources_may_be_broadcast(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    values = filled(shape[1:], dtype, np.random.default_rng(seed))
    target = np.zeros(shape or (), dtype)
    _core.copy(target, np.broadcast_to(values, target.shape))
    np.testing.assert_array_equal(target, np.broadcast_to(values, target.shape))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_large_arrays_are_copied_by_several_threads(order: str, dtype: str) -> None:
    source = np.random.default_rng(0).random((300, 200, 40)) * 200
    target = np.zeros(source.shape, dtype, order=order)
    _core.copy(target, source)
    np.testing.assert_array_equal(target, source.astype(dtype))


def test_several_threads_copy_at_once() -> None:
    source = np.arange(500_000, dtype=np.float64)
    targets = [np.zeros(source.shape, np.float32) for _ in range(6)]

    def work(target: np.ndarray) -> None:
        for _ in range(5):
            _core.copy(target, source)

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        np.testing.assert_array_equal(target, source)


_FORKS = """
import os
import numpy as np
from pycollect import _core

source = np.arange(500_000, dtype=np.float64)
target = np.zeros(source.shape, np.float32)
_core.copy(target, source)  # the threads are running now
child = os.fork()
if child == 0:
    target[:] = 0
    _core.copy(target, source)
    os._exit(0 if (target == source).all() else 1)
_, status = os.waitpid(child, 0)
raise SystemExit(status != 0)
"""


def test_a_forked_child_can_copy() -> None:
    """Fork in a separate program, because other libraries' threads may not survive a fork here."""
    subprocess.run([sys.executable, "-c", _FORKS], check=True, timeout=60)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = torch.cat([torch.randn(100_000), torch.tensor([float("inf"), float("nan"), 3.4e38])])
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    _core.copy(target, values)
    torch.testing.assert_close(target, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    wide = torch.empty(values.shape, dtype=torch.float64)
    _core.copy(wide, target)
    torch.testing.assert_close(wide, target.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [ctypes.c_void_p, ctypes.c_wchar, ctypes.c_longdouble])
def test_buffers_of_formats_without_a_dtype_are_refused(kind: type) -> None:
    with refused(TypeError, "src"):
        _core.copy(np.zeros(3), (kind * 3)())


def test_tensors_without_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    values = torch.ones(3)
    _core.copy(np.zeros(3, np.float32), values)
    values.untyped_storage().resize_(0)
    with refused(ValueError, "src"):
        _core.copy(np.zeros(3, np.float32), values)


def test_bad_arguments_are_named() -> None:
    with refused(ValueError, "copy"):
        _core.copy(np.zeros((2, 3)), np.zeros((3, 2)))
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with refused(ValueError, "dst"):
        _core.copy(read_only, np.zeros(3))
    with refused(TypeError, "src"):
        _core.copy(np.zeros(3), ["a", "b", "c"])
    with refused(TypeError, "dst"):
        _core.copy(np.zeros(3, "M8[s]"), np.zeros(3))
