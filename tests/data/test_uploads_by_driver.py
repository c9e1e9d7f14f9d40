"""Copies of collectors' batches to a device by the core's Uploader, with the fake driver.

Each test runs in a new process, because the CUDA library is looked up once per process. No test
here needs a GPU or torch with CUDA; `test_cuda.py` has the same tests on a GPU.
"""

from __future__ import annotations

import pytest
from fake_cuda_support import fake_cuda_library, run

_PRELUDE = """
import warnings
import torch
from collect_support import parity_policy
from echo_envs import echo_fns
from fake_torch_cuda import DEVICE, driver, install
from pycollect import MultiSyncDataCollector, MultiaSyncDataCollector, SyncDataCollector
from pycollect._core import CudaError

fake = driver.fake
accelerator = install()

def stream(cls=SyncDataCollector, workers=1, **arguments):
    fns = echo_fns(0) if workers == 1 else [echo_fns(w) for w in range(workers)]
    return cls(fns, parity_policy(), frames_per_batch=18, **arguments)

def assert_equal(ours, theirs):
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    for key in keys:
        assert torch.equal(ours[key], theirs[key]), key

def assert_same_stream(batches, **arguments):
    with stream(**arguments) as collector:
        for ours in batches:
            assert_equal(ours, collector.next())
"""


def run_uploads(code: str) -> None:
    run(_PRELUDE + code, fake_cuda_library())


def test_the_core_copies_each_batch_from_pinned_memory_of_its_size() -> None:
    run_uploads(
        """
casts = {"observation_dtype": torch.float16, "observation_scale": 0.5}
for arguments in ({}, casts, {"split_trajs": True}):
    driver.forget()
    with stream(storing_device="cuda", **arguments) as collector:
        batches = [collector.next() for _ in range(5)]
        assert batches[0].device == DEVICE
    copies = driver.log("cuMemcpy")
    assert len(copies) == 5, copies
    assert all("pinned=1 stream=1" in copy for copy in copies), copies
    assert len(driver.log("cuStreamWaitEvent stream=0")) == 5
    if not arguments:
        sizes = {line.split()[1] for line in driver.log("cuMemHostAlloc")}
        copied = {line.split()[1] for line in driver.log("cuMemcpyHtoDAsync_v2")}
        assert sizes == copied, (sizes, copied)
        (size,) = (int(one.removeprefix("bytes=")) for one in sizes)
        assert size & (size - 1), size  # no power of two
    assert_same_stream(batches, **arguments)
"""
    )


@pytest.mark.slow
def test_memory_is_reused_only_after_the_host_saw_its_copy_complete() -> None:
    run_uploads(
        """
fake.fake_cuda_hold(1)
with stream(storing_device="cuda") as collector:
    batches = [collector.next(), collector.next()]
    assert not driver.log("cuEventSynchronize")  # the host has waited for nothing
    # The learner's stream, once it is past what it was given before, waits for the first copy.
    assert fake.fake_cuda_advance(0, 99) == 1
    batches += [collector.next() for _ in range(6)]
    assert driver.log("cuEventSynchronize")
assert_same_stream(batches)

fake.fake_cuda_hold(0)
with stream(storing_device="cuda") as collector:
    fake.fake_cuda_fail(b"cuMemcpyHtoDAsync_v2", 1, 700)
    collector.next()
    try:
        collector.next()
    except CudaError as error:
        assert str(error).startswith("cuMemcpyHtoDAsync_v2: CUDA_ERROR_ILLEGAL_ADDRESS"), error
    else:
        raise AssertionError
"""
    )


@pytest.mark.slow
def test_a_graph_that_another_thread_captures_is_not_ended() -> None:
    """In the default mode, a query of torch's events from another thread would end the capture."""
    run_uploads(
        """
with stream(storing_device="cuda") as collector:
    batches = [collector.next()]
    fake.fake_cuda_capture(1)
    batches += [collector.next() for _ in range(9)]
    assert driver.log("cuEventSynchronize")
    fake.fake_cuda_capture(0)
assert_same_stream(batches)
"""
    )


def test_a_thread_that_waits_for_the_device_sleeps() -> None:
    """Workers need the cores. The wait of a step is short, and polls first."""
    run_uploads(
        """
driver.forget()
with stream(storing_device="cuda") as collector:
    for _ in range(9):
        collector.next()
events = driver.log("cuEventCreate")
assert events and set(events) == {"cuEventCreate flags=3"}, events
driver.forget()
accelerator.mark(soon=True).synchronize()
assert not driver.log("cuEventSynchronize")
accelerator.mark().synchronize()
assert driver.log("cuEventSynchronize")
"""
    )


_PROCESSES = """
if __name__ == "__main__":
    arguments = {"cls": CLS, "workers": 2, "prefetch": 1}
    fake.fake_cuda_fail(b"cuMemHostRegister_v2", 0, FAIL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stream(storing_device="cuda", **arguments) as collector:
            registered = driver.log("cuMemHostRegister_v2")
            batches = [collector.next() for _ in range(8)]
            copies = driver.log("cuMemcpy")
    texts = [str(own.message) for own in caught if "pinned" in str(own.message)]
    left = len(driver.log("cuMemHostRegister_v2 bytes")) - len(driver.log("cuMemHostUnregister"))
"""


@pytest.mark.slow
def test_memory_of_worker_processes_is_uploaded_without_a_host_copy() -> None:
    run_uploads(
        _PROCESSES.replace("CLS", "MultiSyncDataCollector").replace("FAIL", "0")
        + """
    assert len(registered) == 1, registered
    assert driver.log("cuMemHostRegister_v2") == registered  # no other memory is needed
    assert len(copies) == 8 and all("pinned=1" in copy for copy in copies), copies
    assert not texts and left == 0
    assert_same_stream(batches, **arguments)

    # Workers that were stopped leave gaps, which are taken out on the host.
    stopped = {**arguments, "cat_results": -1, "preemptive_threshold": 0.0}
    driver.forget()
    with stream(storing_device="cuda", **stopped) as collector:
        batches = [collector.next() for _ in range(4)]
        assert collector.ledger()["total"]["delivered"] == sum(td.numel() for td in batches)
    copies = driver.log("cuMemcpy")
    assert len(copies) == 4 and all("pinned=1" in copy for copy in copies), copies
"""
    )


@pytest.mark.parametrize(
    ("joined", "copies"),
    [
        ("stack", "> 2"),
        pytest.param(0, "> 2", marks=pytest.mark.slow),
        pytest.param(-1, "== 2", marks=pytest.mark.slow),
    ],
)
def test_rollouts_are_uploaded_as_workers_finish(joined: str | int, copies: str) -> None:
    """With cat along time, the frames of a worker's two environments are not adjacent."""
    run_uploads(
        f"""
from pycollect.data import upload
if __name__ == "__main__":
    arguments = {{"cls": MultiSyncDataCollector, "workers": 2, "cat_results": {joined!r}}}
    upload.MIN_PART_BYTES = 8
    with stream(storing_device="cuda", **arguments) as collector:
        fake.fake_cuda_hold(1)
        driver.forget()
        batches = [collector.next() for _ in range(2)]
        copies = driver.log("cuMemcpy")
        assert len(copies) {copies} and all("pinned=1 stream=1" in copy for copy in copies), copies
        fake.fake_cuda_hold(0)
        batches += [collector.next() for _ in range(5)]
        fake.fake_cuda_hold(1)
        batches.append(collector.next())  # its parts are under way at the end
    assert len(driver.log("cuMemHostUnregister")) == 1  # nothing holds the slabs any more
    assert_same_stream(batches, **arguments)
"""
    )


@pytest.mark.slow
def test_memory_that_cannot_be_pinned_costs_a_copy_and_one_warning() -> None:
    run_uploads(
        _PROCESSES.replace("CLS", "MultiaSyncDataCollector").replace("FAIL", "2")
        + """
    assert len(texts) == 1, texts
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in texts[0], texts
    assert len(copies) == 8 and all("pinned=1" in copy for copy in copies), copies
"""
    )
