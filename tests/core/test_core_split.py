"""`SplitPlan` compared with a numpy model."""

from __future__ import annotations

import numpy as np
import pytest
from arrays_for_tests import DTYPES, filled, laid_out, laid_out_like, memory_orders
from hypothesis import given
from hypothesis import strategies as st
from raising import refused

from pycollect._core import SplitPlan


def model(
    done: np.ndarray | None, ids: np.ndarray | None, mask: np.ndarray | None
) -> list[list[tuple[int, ...]]]:
    """Return the trajectories as lists of cells, each an index into the batch dimensions."""
    shape = next(signal.shape for signal in (done, ids) if signal is not None)
    result: list[list[tuple[int, ...]]] = []
    for row in np.ndindex(shape[:-1]):
        current: list[tuple[int, ...]] = []
        for t in range(shape[-1]):
            cell = (*row, t)
            here = (ids is None or ids[cell] != -1) and (mask is None or mask[cell])
            changed = current and ids is not None and ids[current[-1]] != ids[cell]
            if current and (not here or changed):
                result.append(current)
                current = []
            if here:
                current.append(cell)
                if done is not None and done[cell]:
                    result.append(current)
                    current = []
        if current:
            result.append(current)
    return result


@st.composite
def signals(draw: st.DrawFn) -> tuple:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)))
    shape = (*shape[:-1], draw(st.integers(0, 12))) if draw(st.booleans()) else (*shape, 4)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rate = draw(st.sampled_from([0, 0.1, 0.5, 1]))
    done = rng.random(shape) < rate
    ids = np.cumsum(rng.random(shape) < 0.3, axis=-1)
    if draw(st.booleans()):
        ids = rng.integers(-1, 3, shape)  # repeated and uncollected ids
    mask = rng.random(shape) < 0.8
    which = draw(st.sampled_from(["d", "i", "di", "dm", "im", "dim"]))

    def lying(values: np.ndarray, letter: str) -> np.ndarray | None:
        if letter not in which:
            return None
        values = laid_out_like(values, draw(memory_orders(values.ndim)))
        return values[..., None] if draw(st.booleans()) else values

    return lying(done, "d"), lying(ids, "i"), lying(mask, "m"), shape, rng


def flat_signal(signal: np.ndarray | None, ndim: int) -> np.ndarray | None:
    return signal if signal is None or signal.ndim == ndim else signal[..., 0]


@given(signals(), st.data())
def test_trajectories_equal_the_model(case: tuple, data: st.DataObject) -> None:
    done, ids, mask, shape, rng = case
    plan = SplitPlan(done, ids, mask, batch_dims=len(shape))
    expected = model(*(flat_signal(signal, len(shape)) for signal in (done, ids, mask)))
    lengths = [len(cells) for cells in expected]
    assert plan.count == len(expected)
    assert plan.lengths.tolist() == lengths
    assert plan.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert plan.frames == sum(lengths)
    assert plan.longest == max(lengths, default=0)
    rows = [np.ravel_multi_index(cells[0][:-1], shape[:-1]) for cells in expected]
    assert plan.rows.tolist() == (rows if len(shape) > 1 else [0] * len(expected))

    frames = [tuple(data.draw(st.lists(st.integers(0, 4), max_size=2))) for _ in range(3)]
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in frames]
    sources = []
    for frame, dtype in zip(frames, dtypes, strict=True):
        values = filled((*shape, *frame), dtype, rng)
        sources.append(laid_out_like(values, data.draw(memory_orders(values.ndim))))
    if expected:
        check_padded(plan, expected, sources, data)
        check_flat(plan, expected, sources, data)


def check_padded(plan: SplitPlan, expected: list, sources: list, data: st.DataObject) -> None:
    batch_dims = len(expected[0][0])
    targets, memories, copies = [], [], []
    for source in sources:
        shape = (plan.count, plan.longest, *source.shape[batch_dims:])
        how = data.draw(memory_orders(len(shape)))
        target, memory = laid_out(shape, source.dtype.name, how)
        memory[...] = 1
        copy, copy_memory = laid_out(shape, source.dtype.name, how)
        copy_memory[...] = 1
        copy[...] = 0
        for i, cells in enumerate(expected):
            for t, cell in enumerate(cells):
                copy[i, t] = source[cell]
        targets.append(target)
        memories.append(memory)
        copies.append(copy_memory)
    plan.padded(sources, targets)
    for memory, copy in zip(memories, copies, strict=True):
        np.testing.assert_array_equal(memory, copy)
    mask = np.ones((plan.count, plan.longest), bool)
    plan.mask(mask)
    assert mask.sum(axis=1).tolist() == plan.lengths.tolist()
    ids = np.zeros((plan.count, plan.longest, 2), np.int32)
    plan.pad(ids, -1)
    assert (ids == np.where(mask, 0, -1)[..., None]).all()


def check_flat(plan: SplitPlan, expected: list, sources: list, data: st.DataObject) -> None:
    targets, wanted = [], []
    cells = [cell for trajectory in expected for cell in trajectory]
    for source in sources:
        values = np.array([source[cell] for cell in cells], source.dtype)
        how = data.draw(memory_orders(values.ndim))
        targets.append(laid_out(values.shape, source.dtype.name, how)[0])
        wanted.append(values)
    plan.flat(sources, targets)
    for target, values in zip(targets, wanted, strict=True):
        np.testing.assert_array_equal(target, values)


def test_targets_of_another_dtype_are_cast_to() -> None:
    plan = SplitPlan(np.array([False, True, False]), batch_dims=1)
    target = np.empty((2, 2), np.float16)
    plan.padded([np.array([1, 2, 3])], [target])
    assert target.tolist() == [[1, 2], [3, 0]]


def test_nothing_to_split() -> None:
    plan = SplitPlan(np.zeros((3, 0), bool), batch_dims=2)
    assert (plan.count, plan.longest, plan.frames) == (0, 0, 0)
    plan.padded([np.zeros((3, 0, 2))], [np.zeros((0, 0, 2))])
    plan.flat([np.zeros((3, 0, 2))], [np.zeros((0, 2))])
    plan.mask(np.zeros((0, 0), bool))


def test_bad_arguments_are_named() -> None:
    done = np.zeros((2, 3), bool)
    with refused(ValueError, "split"):
        SplitPlan(None, batch_dims=1)
    with refused(ValueError, "done"):
        SplitPlan(done.astype(np.int8), batch_dims=2)
    with refused(ValueError, "ids") as caught:
        SplitPlan(done, np.zeros((3, 2), np.int64), batch_dims=2)
    assert "[3, 2]" in str(caught.value)
    with refused(ValueError, "mask"):
        SplitPlan(done, None, np.zeros((2, 3)), batch_dims=2)
    with refused(ValueError, "batch_dims"):
        SplitPlan(done, batch_dims=3)
    with refused(TypeError, "done"):
        SplitPlan("done", batch_dims=1)
    plan = SplitPlan(done, batch_dims=2)
    source = np.zeros((2, 3))
    with refused(ValueError, "targets"):
        plan.flat([source], [])
    with pytest.raises(ValueError, match="target 0"):
        plan.padded([source], [np.zeros(6)])
    with pytest.raises(ValueError, match="source 0"):
        plan.flat([np.zeros((3, 2))], [np.zeros(6)])
    with refused(ValueError, "target"):
        plan.mask(np.zeros((2, 3)))
    read_only = np.zeros(6)
    read_only.flags.writeable = False
    with refused(ValueError, "targets"):
        plan.flat([source], [read_only])
