"""The core's CUDA code, with a fake driver in a separate process."""

from __future__ import annotations

from fake_cuda_support import run, run_with_fake

_WHY_NOT = "from pycollect import _core; print(_core.cuda_why_not())"


def test_without_a_driver_there_is_a_reason(tmp_path: object) -> None:
    reason = run(_WHY_NOT, f"{tmp_path}/libcuda.so.1")
    assert "libcuda.so.1" in reason
    assert "PYCOLLECT_CUDA_LIBRARY" in reason


def test_a_library_that_is_not_a_driver_is_refused() -> None:
    reason = run(_WHY_NOT, "libm.so.6")
    assert "libm.so.6" in reason
    assert "cuInit" in reason


def test_with_the_fake_driver_it_is_available() -> None:
    assert run_with_fake("print(repr(_core.cuda_why_not()))") == "''"


def test_a_driver_that_fails_or_shows_no_device_has_a_reason() -> None:
    code = "fake.fake_cuda_fail(b'cuInit', 0, 100); print(_core.cuda_why_not())"
    assert run_with_fake(code).startswith("cuInit: CUDA_ERROR_NO_DEVICE (100): ")
    assert "device" in run_with_fake("print(_core.cuda_why_not())", FAKE_CUDA_DEVICES="0")


def test_errors_of_cuda_classes_explain_why_cuda_is_missing(tmp_path: object) -> None:
    code = """
from pycollect import _core
try:
    _core.Uploader(0)
except _core.CudaError as error:
    print(isinstance(error, RuntimeError), error)
"""
    printed = run(code, f"{tmp_path}/nothing.so")
    assert printed.startswith("True ")
    assert "nothing.so" in printed


_UPLOAD = """
uploader = _core.Uploader(0)
source = np.arange(6, dtype=np.float32).reshape(2, 3)
target = np.zeros_like(source)
"""


def test_an_array_is_uploaded_and_held_until_its_copy_is_complete() -> None:
    run_with_fake(
        _UPLOAD
        + """
import sys
pinned = _core.Memory.share(4096)
registration = _core.Registration(pinned, 0)
source = pinned.array()[:24].view(np.float32).reshape(2, 3)
source[:] = 7
before = sys.getrefcount(source)
fake.fake_cuda_hold(1)
upload = uploader.upload(source, target.ctypes.data, 0)
assert sys.getrefcount(source) == before + 1
assert not upload.done() and uploader.release_finished() == 1
assert fake.fake_cuda_advance(0, 9) == 0
fake.fake_cuda_advance(uploader.stream, 9)
assert upload.done() and uploader.release_finished() == 0
assert sys.getrefcount(source) == before
assert (target == source).all()
assert "cuMemcpyHtoDAsync_v2 bytes=24 pinned=1 stream=1" in log()
upload = uploader.upload(source, target.ctypes.data, 0, after=0)
upload.hold_back(0)
upload.wait()
uploader.wait()
del upload, uploader, registration
assert fake.fake_cuda_live() == 0
"""
    )


def test_a_slab_returns_to_its_pool_when_its_copy_is_complete() -> None:
    run_with_fake(
        _UPLOAD
        + """
layout = _core.Layout([_core.Leaf(("a",), "float32", (3,))])
pool = _core.SlabPool(_core.Placement(layout, 1, 1, 4), 2)
slab = pool.acquire()
target = np.zeros(slab.bytes, np.uint8)
fake.fake_cuda_hold(1)
upload = uploader.upload(slab.array(), target.ctypes.data, 0)
del slab
assert pool.stats().lent == 1
upload.wait()
assert pool.stats().lent == 0 and pool.stats().free == 1
"""
    )


def test_errors_name_call_and_reason_and_hold_nothing() -> None:
    run_with_fake(
        _UPLOAD
        + """
import sys
before = sys.getrefcount(source)
fake.fake_cuda_fail(b"cuMemcpyHtoDAsync_v2", 0, 700)
try:
    uploader.upload(source, target.ctypes.data, 0)
except _core.CudaError as error:
    assert str(error).startswith("cuMemcpyHtoDAsync_v2: CUDA_ERROR_ILLEGAL_ADDRESS (700): "), error
else:
    raise AssertionError
for bad in (source.T, OnDevice(source)):
    try:
        uploader.upload(bad, target.ctypes.data, 0)
    except ValueError as error:
        assert str(error).startswith("source: "), error
    else:
        raise AssertionError
try:
    _core.Uploader(3)
except ValueError as error:
    assert str(error).startswith("device: "), error
del bad
assert sys.getrefcount(source) == before
"""
    )
