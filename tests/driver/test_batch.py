"""Delivered batches are the user's: they never change, are writable, and views keep them alive."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_TIME,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    Way,
    collecting,
    marked,
)
from echo_envs import ENTRIES
from tensordict import TensorDict

from pycollect._core import Layout, Leaf, Placement, Recorder, Slab
from pycollect.data.frame import BatchLeaves
from pycollect.data.slabs import check_lease, make_pool, slab_tensors, to_tensordict

T = 5
BATCHES = 12
WAYS = [IN_PROCESS, *marked(CAT_TIME, ASYNC[1], MULTI_STACK, MULTI_TIME, MULTI_ASYNC[1], many=True)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_users_may_write_into_batches(way: Way) -> None:
    """Kept batches never change; writes to one affect no other batch, not even the newest."""
    with collecting(way, ENTRIES["list"], frames=3 * T) as collector:
        kept, copies = [], []
        for number in range(BATCHES):
            td = collector.next()
            copy = td.clone()
            if number % 3 == 1:
                td["next", "observation"].zero_()
                td["observation"] += 1000
                td["new"] = torch.ones(td.shape)
                copy = td.clone()
            kept.append(td)
            copies.append(copy)
            if number % 4 == 3:
                del kept[0], copies[0]  # its memory is reused
    for td, copy in zip(kept, copies, strict=True):
        assert (td == copy).all()
        assert all(tensor.is_contiguous() for tensor in td.values(True, True))


def test_kept_parts_of_a_batch_never_change() -> None:
    """A tensor, a view of a view, a numpy array or a slice keeps the whole batch alive."""
    takers = [
        lambda td: td["observation"],
        lambda td: td["observation"][1][2:],
        lambda td: td["next", "observation"].numpy(),
        lambda td: td["observation"].numpy()[0, 1:],
        lambda td: td[1, 2]["observation"],
        lambda td: td["observation"].transpose(0, 1).flatten()[3:].view(-1, 3)[:, 1],
        lambda td: torch.from_numpy(td["observation"].numpy()),
        lambda td: memoryview(td["observation"].numpy()),
        lambda td: td["observation"].detach(),
        lambda td: td["observation"].unbind(0)[2],
        lambda td: td.select("action"),
        lambda td: list(td["collector", "traj_ids"].unbind(0))[1:],
    ]
    with collecting(IN_PROCESS, ENTRIES["list"], frames=3 * T) as collector:
        kept, copies = [], []
        for take in takers * 2:
            part = take(collector.next())
            kept.append(part)
            copies.append(as_lists(part))
            gc.collect()
        assert [as_lists(part) for part in kept] == copies
    del collector
    gc.collect()
    assert [as_lists(part) for part in kept] == copies


def as_lists(part: Any) -> Any:
    if isinstance(part, TensorDict):
        return {key: value.tolist() for key, value in part.items(True, True)}
    if isinstance(part, list):
        return [as_lists(item) for item in part]
    return part.tolist()


def test_a_batch_that_autograd_holds() -> None:
    weight = torch.ones(3, requires_grad=True)
    with collecting(IN_PROCESS, ENTRIES["list"], frames=3 * T) as collector:
        observation = collector.next()["observation"]
        expected = observation.sum((0, 1)).tolist()
        loss = (observation * weight).sum()
        del observation
        for _ in range(8):
            collector.next()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == expected


def test_batches_released_by_other_threads() -> None:
    with collecting(IN_PROCESS, ENTRIES["list"], frames=3 * T) as collector:
        numbers: list[float] = []

        def read(td: TensorDict) -> None:
            numbers.append(float(td["observation"][..., 0].sum()))

        threads = []
        for _ in range(20):
            threads.append(threading.Thread(target=read, args=(collector.next(),)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert numbers == [3.0 * T] * 20


def test_gradients_flow_through_a_batch() -> None:
    with collecting(IN_PROCESS, ENTRIES["list"], frames=3 * T) as collector:
        td = collector.next()
    net = torch.nn.Linear(3, 1)
    net(td["observation"]).sum().backward()
    assert net.weight.grad is not None
    assert not td["observation"].requires_grad
    td["observation"].requires_grad_()
    assert td["observation"].is_leaf


# Slabs


def placement(envs: int = 2) -> Placement:
    return Placement(Layout([Leaf(("observation",), "float32", (3,))]), 1, envs, T)


HOLDERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "tensor": lambda tensor, slab: tensor,
    "view": lambda tensor, slab: tensor[1][2:].view(-1)[1:],
    "array": lambda tensor, slab: tensor.numpy(),
    "view of an array": lambda tensor, slab: tensor.numpy()[0][::2],
    "bytes": lambda tensor, slab: slab.array()[3:9],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_slab_returns_after_its_last_view(holder: str) -> None:
    pool = make_pool(placement(), 2)
    slab = pool.acquire()
    first = slab.generation
    tensor = slab_tensors(slab, [2, T])["observation",]
    held = HOLDERS[holder](tensor, slab)
    del tensor, slab
    assert (pool.stats().lent, pool.stats().free) == (1, 0)
    other = pool.acquire()
    assert (pool.stats().created, pool.stats().lent) == (2, 2)
    del held
    assert (pool.stats().lent, pool.stats().free) == (1, 1)
    assert pool.acquire().generation == first + 1
    assert pool.stats().created == 2
    assert other.generation == first


def test_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recycled slab is filled with 0xA5; a slab in use is not."""
    monkeypatch.setenv("PYCOLLECT_POISON", "1")
    pool = make_pool(placement(), 2)
    held, given_back = pool.acquire(), pool.acquire()
    for slab in (held, given_back):
        slab.array()[:] = 7
    del given_back, slab
    assert (held.array() == 7).all()
    again = pool.acquire()
    assert pool.stats().created == 2
    leaf = slab_tensors(again, [2, T])["observation",].numpy().view(np.uint8)
    assert (leaf == 0xA5).all()
    assert (held.array() == 7).all()


def test_no_poison_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCOLLECT_POISON", raising=False)
    pool = make_pool(placement(), 1)
    pool.acquire().array()[:] = 7
    assert (slab_tensors(pool.acquire(), [2, T])["observation",].numpy().view(np.uint8) == 7).all()


def test_a_rollout_of_an_earlier_lease_is_refused() -> None:
    """A late writer may leave such a rollout in memory that has been lent again."""
    leaves = BatchLeaves((Leaf(("observation",), "float32", (1,)),), ())
    current = torch.zeros(1)
    recorder = Recorder(leaves.layout(), [(("observation",), current, True)], [], 1, False)
    recorder.restart(np.zeros(1, np.float32))
    pool = make_pool(Placement(leaves.layout(), 1, 1, 1), 1)

    def record(slab: Slab) -> None:
        recorder.begin(slab, 0, 0)
        recorder.step(np.ones(1, np.float32), 1.0, False, False, ())
        recorder.finish(3, 0, 5)

    slab = pool.acquire()
    record(slab)
    check_lease(slab, slab.header())
    late = slab.array().copy()
    del slab
    again = pool.acquire()
    again.array()[:] = late
    with pytest.raises(RuntimeError, match="worker 3"):
        check_lease(again, again.header())


def test_a_collector_recycles_its_slabs() -> None:
    """A loop that keeps no batch reuses the same few slabs."""
    with collecting(IN_PROCESS, ENTRIES["list"], frames=3 * T) as collector:
        places = {td["observation"].data_ptr() for td, _ in zip(collector, range(30))}  # noqa: B905
    assert len(places) <= 3


# TensorDicts


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_to_tensordict_is_the_public_constructors(device: Any) -> None:
    """`to_tensordict` skips tensordict's checks, but must equal the public constructor."""
    leaves = BatchLeaves(
        observation=(Leaf(("pair", "0"), "float32", (3,)), Leaf(("pair", "1"), "uint8", ())),
        outputs=(Leaf(("action",), "int64", ()),),
        step_count=True,
        policy_version=True,
        mask=True,
    )
    pool = make_pool(Placement(leaves.layout(), 1, 2, T), 1)
    tensors = slab_tensors(pool.acquire(), [2, T])
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    td = to_tensordict(tensors, [2, T], device)
    expected = TensorDict(
        {key if len(key) > 1 else key[0]: tensor for key, tensor in tensors.items()},
        batch_size=[2, T],
        device=device,
        names=[None, "time"],
    )
    assert td.names == expected.names
    assert td.device == expected.device
    assert td.batch_size == expected.batch_size
    assert set(td.keys(True)) == set(expected.keys(True))
    assert (td == expected).all()
    for key in ("pair", "next", ("next", "pair"), "collector"):
        assert td[key].names == expected[key].names
        assert td[key].batch_size == expected[key].batch_size
        assert td[key].device == expected[key].device
    check_operations(td, expected)


def check_operations(td: TensorDict, expected: TensorDict) -> None:
    for operation in (
        lambda t: t.reshape(-1),
        lambda t: t[:, 1:3],
        lambda t: torch.cat([t, t], 1),
        lambda t: torch.stack([t, t], 0),
        lambda t: t.clone().set("more", torch.zeros(2, T)),
        lambda t: t.permute(1, 0),
        lambda t: t.to_tensordict(),
    ):
        a, b = operation(td), operation(expected)
        assert a.batch_size == b.batch_size
        assert a.names == b.names
        assert (a == b).all()
    with pytest.raises(RuntimeError):
        td["wrong"] = torch.zeros(3, T)
