"""`place_rollout` and `TrajectoryIds` compared with a numpy model."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from arrays_for_tests import DTYPES, filled, laid_out_like, memory_orders
from hypothesis import given
from hypothesis import strategies as st
from raising import refused

from pycollect import _core
from pycollect._core import Layout, Leaf, Placement, SlabPool, TrajectoryIds

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
MAGIC = 0x31306C6F63795000
HEADER = struct.Struct("<QQQqqqqqqqQQ")


def align64(n: int) -> int:
    return (n + 63) // 64 * 64


def header_bytes(envs: int) -> int:
    return align64(HEADER.size + 8 * envs)


def checksum(words: list[int]) -> int:
    value = 0xCBF29CE484222325
    for word in words:
        value = ((value ^ (word % 2**64)) * 0x100000001B3) % 2**64
    return value


def header_of(placement: Placement, worker: int, lengths: list[int]) -> bytes:
    fields = [
        MAGIC,
        placement.layout.fingerprint,
        placement.bytes,
        worker,
        0,
        0,
        0,
        placement.envs,
        placement.steps,
        sum(lengths),
        0,
        0,
    ]
    fields[-1] = checksum(fields + lengths)
    return HEADER.pack(*fields) + struct.pack(f"<{len(lengths)}q", *lengths)


def rollout_of(placement: Placement, worker: int, values: dict[Any, np.ndarray]) -> np.ndarray:
    """Return the bytes of a worker's slab with these leaves, each [P, T, *frame]."""
    result = np.full(placement.bytes, 0x5A, np.uint8)
    header = header_of(placement, worker, [placement.steps] * placement.envs)
    result[: len(header)] = np.frombuffer(header, np.uint8)
    at = header_bytes(placement.envs)
    for leaf in placement.layout.leaves:
        raw = np.frombuffer(values[leaf.key].tobytes(), np.uint8)
        result[at : at + raw.size] = raw
        at = align64(at + raw.size)
    assert at == placement.bytes
    return result


def leaf_arrays(slab: Any, order: str) -> dict[Any, np.ndarray]:
    """Return the leaves of a batch's slab as [B, P, T, *frame]."""
    placement, memory = slab.placement, slab.array()
    batch = (placement.workers, placement.envs, placement.steps)
    at = header_bytes(placement.envs) * placement.workers
    result = {}
    for leaf in placement.layout.leaves:
        lead = batch if order == "stack" else (batch[1], batch[0], batch[2])
        count = int(np.prod((*lead, *leaf.shape)))
        size = count * np.dtype(leaf.dtype).itemsize
        array = memory[at : at + size].view(leaf.dtype).reshape(*lead, *leaf.shape)
        result[leaf.key] = array if order == "stack" else array.swapaxes(0, 1)
        at = align64(at + size)
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple:
    leaves = [
        Leaf(
            (f"leaf{i}",),
            draw(st.sampled_from(DTYPES)),
            draw(st.lists(st.integers(0, 4), max_size=3)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    leaves += [Leaf(TRAJ_IDS, "int64", ()), Leaf(MASK, "bool", ())]
    workers, envs, steps = (draw(st.integers(1, 4)) for _ in range(3))
    lengths = [draw(st.integers(1, steps)) for _ in range(workers)]
    return (
        Layout(draw(st.permutations(leaves))),
        envs,
        steps,
        lengths,
        draw(st.sampled_from(["stack", "time"])),
        draw(st.integers(0, 15)),
        draw(st.integers(0, 2**32)),
    )


@given(batches())
def test_rollouts_become_rows(case: tuple) -> None:
    layout, envs, steps, lengths, order, shift, seed = case
    rng = np.random.default_rng(seed)
    slab = SlabPool(Placement(layout, len(lengths), envs, steps, order), 0).acquire()
    slab.array()[:] = 0xA5
    rollouts = []
    for worker in rng.permutation(len(lengths)):
        placement = Placement(layout, 1, envs, lengths[worker])
        values = {
            leaf.key: filled((envs, lengths[worker], *leaf.shape), leaf.dtype, rng)
            for leaf in layout.leaves
        }
        values[MASK][:] = True
        whole = np.zeros(placement.bytes + shift, np.uint8)  # shifted, so unaligned
        whole[shift:] = rollout_of(placement, int(worker), values)
        whole.flags.writeable = False
        header = _core.place_rollout(slab, int(worker), whole[shift:], placement)
        assert (header.worker, header.steps) == (worker, steps)
        assert header.frames == envs * lengths[worker]
        rollouts.append((worker, values))
    batch = leaf_arrays(slab, order)
    for worker, values in rollouts:
        assert slab.header(int(worker)).worker == worker
        for key, array in values.items():
            valid = lengths[worker]
            np.testing.assert_array_equal(batch[key][worker, :, :valid], array)
            padding = batch[key][worker, :, valid:]
            assert (padding == (-1 if key == TRAJ_IDS else 0)).all()


@given(st.data())
def test_any_changed_byte_of_a_header_is_refused(data: st.DataObject) -> None:
    layout = Layout([Leaf(("a",), "float32", (3,))])
    placement = Placement(layout, 1, 2, 4)
    rollout = rollout_of(placement, 0, {("a",): np.ones((2, 4, 3), np.float32)})
    index = data.draw(st.integers(0, HEADER.size + 2 * 8 - 1))
    rollout[index] ^= data.draw(st.integers(1, 255))
    slab = SlabPool(Placement(layout, 1, 2, 4), 0).acquire()
    slab.array()[:] = 7
    with pytest.raises(ValueError, match="rollout header"):
        _core.place_rollout(slab, 0, rollout, placement)
    assert (slab.array() == 7).all()


def test_bad_rollouts_are_refused() -> None:
    layout = Layout([Leaf(("a",), "float32", (3,))])
    slab = SlabPool(Placement(layout, 2, 2, 4), 0).acquire()
    placement = Placement(layout, 1, 2, 4)
    good = rollout_of(placement, 0, {("a",): np.ones((2, 4, 3), np.float32)})
    with refused(IndexError, "row"):
        _core.place_rollout(slab, 2, good, placement)
    with refused(ValueError, "rollout"):
        _core.place_rollout(slab, 0, good.view(np.int8), placement)
    with refused(ValueError, "rollout"):
        _core.place_rollout(slab, 0, np.repeat(good, 2)[::2], placement)
    with pytest.raises(ValueError, match="rollout header"):
        _core.place_rollout(slab, 0, good[:-1], placement)
    other = Placement(Layout([Leaf(("b",), "float32", (3,))]), 1, 2, 4)
    with refused(ValueError, "rollout"):
        _core.place_rollout(slab, 0, good, other)
    with refused(ValueError, "rollout"):
        _core.place_rollout(slab, 0, good, Placement(layout, 1, 2, 5))


def test_numbers_of_a_header_must_fit() -> None:
    slab = SlabPool(Placement(Layout([Leaf(("a",), "int8", ())]), 1, 2, 4), 0).acquire()
    for frames, steps in ((9, 4), (8, 5), (8, -1)):
        with pytest.raises(ValueError, match="rollout header"):
            slab.write_header(0, 0, 0, 0, 0, frames, steps)


@pytest.mark.parametrize("call", ["place_rollout", "join_rollouts", "compact"])
def test_none_is_not_a_slab(call: str) -> None:
    layout = Layout([Leaf(("a",), "int8", ())])
    slab = SlabPool(Placement(layout, 1, 2, 4), 0).acquire()
    calls = {
        "place_rollout": lambda: _core.place_rollout(None, 0, slab.array(), slab.placement),
        "join_rollouts": lambda: _core.join_rollouts(None, 0, slab, 0, 0, 0),
        "compact": lambda: _core.compact(slab, None),
    }
    with pytest.raises(TypeError, match=call):
        calls[call]()


@pytest.mark.parametrize("key", ["a", ["a"], (b"a",), (1,), ((),)])
def test_a_key_is_a_tuple_of_strings(key: Any) -> None:
    with refused(TypeError, "key"):
        Leaf(key, "int8", ())


class Ids:
    """A dictionary model of TrajectoryIds."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, int, int], int] = {}
        self.incarnation: dict[int, int] = {}

    def renumber(self, worker: int, ids: np.ndarray) -> np.ndarray:
        result = ids.copy()
        for env, t in np.ndindex(ids.shape):
            if ids[env, t] != -1:
                key = (worker, self.incarnation.get(worker, 0), env, int(ids[env, t]))
                result[env, t] = self.known.setdefault(key, len(self.known))
        return result


@st.composite
def local_ids(draw: st.DrawFn, start: np.ndarray) -> np.ndarray:
    """Draw the ids of one rollout, which continue from `start` [P]; advance `start`."""
    steps = draw(st.integers(0, 6))
    ids = np.empty((len(start), steps), np.int64)
    for env, t in np.ndindex(ids.shape):
        start[env] += draw(st.sampled_from([0, 0, 0, 1, 1, 3]))
        ids[env, t] = -1 if draw(st.integers(0, 5)) == 0 else start[env]
    return ids


@given(st.data())
def test_ids_are_global_without_gaps_and_stable(data: st.DataObject) -> None:
    envs = data.draw(st.integers(1, 3))
    ours, theirs = TrajectoryIds(), Ids()
    open_ids: dict[int, np.ndarray] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        worker = data.draw(st.integers(0, 2))
        event = data.draw(st.sampled_from(["rollout", "rollout", "rollout", "forget", "resume"]))
        if event == "forget":
            ours.forget(worker)
            theirs.incarnation[worker] = theirs.incarnation.get(worker, 0) + 1
            open_ids.pop(worker, None)
        elif event == "resume":
            ours = TrajectoryIds.from_state(ours.state())
        else:
            start = open_ids.setdefault(worker, np.zeros(envs, np.int64))
            ids = data.draw(local_ids(start))
            view = laid_out_like(ids, data.draw(memory_orders(2)))
            ours.renumber(worker, view)
            np.testing.assert_array_equal(view, theirs.renumber(worker, ids))
            assert ours.next == len(theirs.known)


def test_decreasing_ids_are_refused_and_change_nothing() -> None:
    ids = TrajectoryIds()
    ids.renumber(4, np.array([[2, 3]]))
    state = ids.state()
    bad = np.array([[4, 5, 4]])
    with refused(ValueError, "ids") as caught:
        ids.renumber(4, bad)
    assert "worker 4, env 0, step 2" in str(caught.value)
    assert bad.tolist() == [[4, 5, 4]]
    assert ids.state() == state
    with refused(ValueError, "ids"):
        ids.renumber(4, np.zeros((2, 3), np.int64))
    with refused(ValueError, "ids"):
        ids.renumber(4, np.zeros((1, 3), np.int32))
    with refused(ValueError, "state"):
        TrajectoryIds.from_state((1, [(0, [0], [1])]))
