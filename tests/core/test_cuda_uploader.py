"""`pycollect.cuda`: its errors without a GPU, and its Uploader compared with torch on one."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_support import needs_gpu
from raising import refused

from pycollect import cuda
from pycollect._core import Layout, Leaf, Memory, Placement, SlabPool, host_memory


def test_a_reason_is_given_exactly_if_cuda_is_not_available() -> None:
    assert cuda.available() == (cuda.why_not() == "")


def test_devices_of_other_kinds_are_refused() -> None:
    with refused(ValueError, "device"):
        cuda.Uploader("cpu")


@pytest.mark.skipif(cuda.available(), reason="for machines without a GPU")
def test_without_a_gpu_the_uploader_raises_the_reason() -> None:
    with pytest.raises(cuda.CudaError, match="CUDA") as info:
        cuda.Uploader("cuda")
    assert cuda.why_not() in str(info.value)


@pytest.mark.cuda
@needs_gpu
class TestOnAGPU:
    def test_equal_to_torch(self) -> None:
        uploader = cuda.Uploader("cuda")
        for pinned in (True, False):
            source = torch.randn(1 << 20, pin_memory=pinned)
            target = uploader.empty(source.shape, source.dtype)
            upload = uploader.upload(source, target)
            assert torch.equal(target, source.to("cuda"))
            upload.wait()
            assert upload.done()

    def test_pinned_memory_is_reused_only_after_its_copy(self) -> None:
        uploader = cuda.Uploader("cuda")
        source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        results = []
        for value in range(8):
            source.fill_(value)
            target = uploader.empty(source.shape, source.dtype)
            upload = uploader.upload(source, target)
            results.append((target == value).all())
            upload.wait()
        assert all(result.item() for result in results)

    def test_slabs_return_to_their_pool(self) -> None:
        layout = Layout([Leaf(("a",), "float32", (1024,))])
        pool = SlabPool(Placement(layout, 1, 1, 64), 2)
        uploader = cuda.Uploader("cuda")
        slab = pool.acquire()
        target = uploader.empty((slab.bytes,), torch.uint8)
        upload = uploader.upload(slab, target)
        expected = torch.from_numpy(slab.array()).clone()
        del slab
        upload.wait()
        assert pool.stats().lent == 0
        assert torch.equal(target.cpu(), expected)

    def test_shared_memory_is_uploaded_without_a_host_copy(self) -> None:
        uploader = cuda.Uploader("cuda")  # initializes CUDA for torch; `is_pinned` does not
        memory = Memory.share(1 << 20)
        array = torch.from_numpy(memory.array())
        registration = cuda.Registration(memory, 0)
        array.fill_(7)
        assert array.is_pinned()
        target = uploader.empty(array.shape, array.dtype)
        uploader.upload(array, target).wait()
        assert bool((target == 7).all())
        del registration

    def test_uploads_and_captures_of_graphs_can_overlap(self) -> None:
        source = torch.ones(1 << 16, pin_memory=True)
        uploader = cuda.Uploader("cuda")
        target = uploader.empty(source.shape, source.dtype)
        ended, failures = threading.Event(), []

        def upload() -> None:
            while not ended.is_set():
                try:
                    uploader.upload(source, target).wait()
                    cuda.Registration(Memory.share(1 << 16), 0)
                except Exception as error:  # the main thread reports it
                    failures.append(error)
                    return

        thread = threading.Thread(target=upload)
        thread.start()
        try:
            value = torch.ones(64, device="cuda")
            for k in range(200):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    result = value + k
                graph.replay()
                assert result[0].item() == k + 1
        finally:
            ended.set()
            thread.join()
        assert not failures

    def test_pinned_memory_has_the_requested_size(self) -> None:
        torch.cuda.init()  # `is_pinned` does not initialize CUDA
        memory = host_memory(0, (1 << 20) + 4096)
        assert memory.bytes == (1 << 20) + 4096
        assert torch.from_numpy(memory.array()).is_pinned()

    def test_copies_during_learning_do_not_change_its_results(self) -> None:
        uploader = cuda.Uploader("cuda")
        weights = torch.eye(2048, device="cuda")
        results = []
        for k in range(10):
            batch = torch.full((2048, 2048), float(k), pin_memory=True)
            target = uploader.empty(batch.shape, batch.dtype)
            uploader.upload(batch, target)
            results.append((target @ weights == k).all())  # exact in any order, also with TF32
            del target
        assert all(result.item() for result in results)
        uploader.wait()
        assert uploader.release_finished() == 0
