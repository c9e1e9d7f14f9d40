"""Batches on their way to a device: order, reuse, errors; with a device that copies late."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collect_support import parity_policy
from echo_envs import EchoEnv, echo_fns
from fake_device import DEVICE, FakeDevice
from raising import refused

from pycollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
)
from pycollect._core import Layout, Leaf, Placement
from pycollect.data.devices import CPU, Accelerator
from pycollect.data.slabs import make_pool, slab_tensors
from pycollect.data.upload import MAX_AHEAD, DeviceUploader


def uploading(**arguments: Any) -> SyncDataCollector:
    arguments = {"storing_device": "cuda", "frames_per_batch": 21, **arguments}
    return SyncDataCollector(echo_fns(0), parity_policy(), **arguments)


def plain(batches: int, **arguments: Any) -> list[Any]:
    with SyncDataCollector(
        echo_fns(0), parity_policy(), frames_per_batch=21, **arguments
    ) as collector:
        return [collector.next() for _ in range(batches)]


def assert_equal(ours: Any, theirs: Any) -> None:
    keys = set(theirs.keys(True, True))
    assert set(ours.keys(True, True)) == keys
    for key in keys:
        assert torch.equal(ours[key], theirs[key]), key


def test_a_batch_is_one_copy_from_pinned_memory(fake: FakeDevice) -> None:
    with uploading() as collector:
        td = collector.next()
        assert [entry for entry in fake.log if not entry.startswith("pinned")] == [
            "copy",
            "stream waits",
        ]
        assert fake.log[0].startswith("pinned")
        assert td.device == DEVICE
        assert td["next"].device == DEVICE
        fake.run()
        (expected,) = plain(1)
        assert_equal(td, expected)


def test_the_host_does_not_wait_while_memory_is_free(fake: FakeDevice) -> None:
    with uploading() as collector:
        batches = [collector.next(), collector.next()]
        assert "host waits" not in fake.log
        batches.append(collector.next())  # a third copy requires that the first has ended
        assert fake.log.count("host waits") == 1
        batches += [collector.next() for _ in range(4)]
    assert sum(entry.startswith("pinned") for entry in fake.log) <= 3
    for ours, theirs in zip(batches, plain(7), strict=True):
        assert_equal(ours, theirs)


def test_uploaded_parts_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.data.upload.MIN_PART_BYTES", 8)
    layout = Layout([Leaf(("seen",), "float32", (2,)), Leaf(("flag",), "bool", ())])
    placement = Placement(layout, 2, 1, 3)  # two workers' rows of three steps
    device = FakeDevice()
    uploader = DeviceUploader(device)
    slab = make_pool(placement, 1, uploader.allocate).acquire()
    tensors = slab_tensors(slab, [2, 1, 3])
    seen, flag = tensors["seen",], tensors["flag",]
    seen.copy_(torch.arange(12.0).view_as(seen))
    uploader.send(slab, [seen[0], flag[0]])  # flags are too small to go alone
    device.run()
    expected = seen.clone()
    seen[0] = -1
    flag[:] = True
    result = uploader.upload(slab, tensors)
    device.run()
    assert device.log[1:] == ["part", "copy", "stream waits"]
    assert torch.equal(result["seen",], expected)
    assert bool(result["flag",].all())

    # Dropping a slab discards its partial copy.
    other = make_pool(placement, 1, uploader.allocate).acquire()
    uploader.send(other, [slab_tensors(other, [2, 1, 3])["seen",][1]])
    assert len(uploader._partial) == 1
    device.run()
    device._events.clear()
    del other
    gc.collect()
    assert not uploader._partial


def test_a_device_without_streams_is_never_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.data.upload.MIN_PART_BYTES", 8)
    monkeypatch.setattr(Accelerator, "mark", lambda _: pytest.fail("the host waits"))
    uploader = DeviceUploader(Accelerator(CPU))
    placement = Placement(Layout([Leaf(("seen",), "float32", (2,))]), 2, 1, 3)
    pool = make_pool(placement, 1, uploader.allocate)
    for step in range(2 * MAX_AHEAD):
        slab = pool.acquire()
        tensors = slab_tensors(slab, [2, 1, 3])
        tensors["seen",].fill_(step)
        uploader.send(slab, [tensors["seen",][0]])
        assert bool((uploader.upload(slab, tensors)["seen",] == step).all())
    uploader.close()


class Lagging(FakeDevice):
    """Complete copies at once, but never advance the learner's stream.

    Attributes:
        waited: Numbers of the marks that the host has waited for.
    """

    def __init__(self) -> None:
        super().__init__(lazy=False)
        self.waited: list[int] = []
        self._marks = 0

    def mark(self, soon: bool = False) -> Any:
        number, self._marks = self._marks, self._marks + 1
        return SimpleNamespace(synchronize=lambda: self.waited.append(number))


def test_a_learner_that_lags_behind_is_waited_for() -> None:
    """Pending work keeps memory on the device, which would grow without a bound."""
    device = Lagging()
    uploader = DeviceUploader(device)
    for _ in range(MAX_AHEAD):
        uploader.gather({("observation",): torch.zeros(5)})
    assert device.waited == []
    for _ in range(3):
        uploader.gather({("observation",): torch.zeros(5)})
    assert device.waited == [0, 1, 2]


def test_memory_is_reused_only_after_its_copy(fake: FakeDevice) -> None:
    """If a slab were reused earlier, a later rollout would overwrite an earlier batch."""
    with uploading(frames_per_batch=9) as collector:
        batches = [collector.next() for _ in range(12)]
    fake.run()
    with SyncDataCollector(echo_fns(0), parity_policy(), frames_per_batch=9) as collector:
        for ours in batches:
            assert_equal(ours, collector.next())


def test_casts_read_the_uploaded_copy(fake: FakeDevice) -> None:
    arguments = {"observation_dtype": torch.float16, "observation_scale": 0.5}
    with uploading(**arguments) as collector:
        td = collector.next()
        fake.run()
    (expected,) = plain(1, **arguments)
    assert td["observation"].dtype == torch.float16
    assert_equal(td, expected)


def test_split_looks_for_trajectories_on_the_host(fake: FakeDevice) -> None:
    fake.lazy = False
    with uploading(split_trajs=True) as collector:
        td = collector.next()
    (expected,) = plain(1, split_trajs=True)
    assert_equal(td, expected)


@pytest.mark.parametrize("form", ["padded", "cat"])
def test_complete_trajectories_are_one_copy(fake: FakeDevice, form: str) -> None:
    arguments = {"trajs_per_batch": 2, "max_frames_per_traj": 5, "traj_format": form}
    with uploading(**arguments) as collector:
        batches = [collector.next() for _ in range(4)]
        assert fake.log.count("copy") == 4
        assert fake.log.count("host waits") == 2  # as for slabs, two may be pending
        fake.run()
    for td, expected in zip(batches, plain(4, **arguments), strict=True):
        assert_equal(td, expected)
        assert td.device == td["next"].device == DEVICE
        assert (td.batch_size, td.names) == (expected.batch_size, expected.names)


def test_an_error_of_the_device_is_raised_and_leaks_no_memory(fake: FakeDevice) -> None:
    with uploading() as collector:
        collector.next()
        fake.fails = RuntimeError("out of memory on the device")
        with pytest.raises(RuntimeError, match="out of memory on the device"):
            collector.next()
        with pytest.raises(RuntimeError, match="out of memory on the device"):
            collector.next()
        collector.shutdown()


def test_a_shutdown_waits_for_pending_copies(fake: FakeDevice) -> None:
    with uploading() as collector:
        td = collector.next()
        collector.shutdown()
        assert fake.log[-1] == "host waits"
    (expected,) = plain(1)
    assert_equal(td, expected)


def test_environments_are_closed_even_if_the_device_is_lost(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[EchoEnv] = []
    monkeypatch.setattr(EchoEnv, "close", lambda env: closed.append(env))
    collector = uploading()
    collector.next()
    fake.is_lost = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        collector.shutdown()
    assert len(closed) == len(echo_fns(0))
    collector.shutdown()


def test_a_missing_device_is_refused_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    for name in ("device", "storing_device", "env_device", "policy_device"):
        with refused(ValueError, name):
            uploading(**{"storing_device": None, name: "cuda"})
        with refused(ValueError, name) as caught:
            uploading(**{"storing_device": None, name: "meta"})
        assert "meta" in str(caught.value)


@pytest.mark.parametrize("engine", ["multi.ProcessEngine", "ray.RayEngine"])
def test_a_missing_device_is_refused_before_workers_start(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    if engine == "ray.RayEngine":
        pytest.importorskip("ray")
    monkeypatch.setattr(f"pycollect.api.{engine}", lambda *_: pytest.fail("it has started"))
    classes: list[Any] = [MultiSyncDataCollector, MultiaSyncDataCollector]
    for make in [RayCollector] if engine == "ray.RayEngine" else classes:
        for name in ("device", "storing_device"):
            with refused(ValueError, name):
                make(
                    [echo_fns(0), echo_fns(1)],
                    parity_policy(),
                    frames_per_batch=10,
                    **{name: ["cpu", "cuda"] if make is MultiaSyncDataCollector else "cuda"},
                )


def test_leaving_the_context_waits_for_pending_copies(fake: FakeDevice) -> None:
    with uploading() as collector:
        td = collector.next()
        assert "host waits" not in fake.log
    assert fake.log.count("host waits") == 1
    (expected,) = plain(1)
    assert_equal(td, expected)
