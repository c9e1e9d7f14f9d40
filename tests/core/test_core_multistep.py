"""`MultiStepPlan` compared with a naive numpy model."""

from __future__ import annotations

import numpy as np
import pytest
from arrays_for_tests import DTYPES, batch_shapes, filled, laid_out, laid_out_like, memory_orders
from hypothesis import given
from hypothesis import strategies as st
from raising import refused

from pycollect._core import MultiStepPlan, SplitPlan


def naive_ends(done: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return, for each cell, the last cell of its segment; -1 for an uncollected cell."""
    here = (ids != -1) & mask
    ends = np.full(done.shape, -1)
    for cell in np.ndindex(done.shape):
        if not here[cell]:
            continue
        *row, t = cell
        while not done[(*row, t)] and t + 1 < done.shape[-1]:
            after = (*row, t + 1)
            if not here[after] or ids[after] != ids[cell]:
                break
            t += 1
        ends[cell] = t
    return ends


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:
    shape = draw(batch_shapes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    done = rng.random(shape) < draw(st.sampled_from([0, 0.1, 0.5]))
    ids = np.cumsum(rng.random(shape) < 0.1, axis=-1)
    if draw(st.booleans()):
        ids = np.where(rng.random(shape) < 0.2, -1, ids)
    mask = rng.random(shape) < draw(st.sampled_from([0.8, 1]))
    return done, ids, mask, rng


@given(cases(), st.sampled_from([1, 2, 3, 5, 20, 2**62]), st.data())
def test_frames_and_sums_equal_the_model(case: tuple, n: int, data: st.DataObject) -> None:
    done, ids, mask, rng = case
    shape = done.shape
    plan = MultiStepPlan(SplitPlan(done, ids, mask, batch_dims=len(shape)), n)
    ends = naive_ends(done, ids, mask)
    now = np.broadcast_to(np.arange(shape[-1]), shape)
    wanted_steps = np.where(ends == -1, 0, np.minimum(n, ends - now + 1))
    leads_to = np.where(ends == -1, now, np.minimum(now + min(n, 100) - 1, ends))

    steps = laid_out(shape, "int64", data.draw(memory_orders(len(shape))))[0]
    plan.steps(steps)
    np.testing.assert_array_equal(steps, wanted_steps)
    discounts = laid_out(shape, "float32", data.draw(memory_orders(len(shape))))[0]
    plan.discounts(0.5, discounts)
    np.testing.assert_array_equal(discounts, 0.5**wanted_steps)
    nonterminal = np.empty(shape, bool)
    plan.nonterminal(nonterminal)
    np.testing.assert_array_equal(nonterminal, (ends != -1) & (ends > now))

    frame = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    dtype = data.draw(st.sampled_from(DTYPES))
    values = filled((*shape, *frame), dtype, rng)
    rewards = rng.standard_normal((*shape, *frame))

    def lying(array: np.ndarray) -> np.ndarray:
        return laid_out_like(array, data.draw(memory_orders(array.ndim)))

    moved = laid_out(values.shape, dtype, data.draw(memory_orders(values.ndim)))[0]
    plan.shift([lying(values)], [moved])
    sums = laid_out(rewards.shape, "float64", data.draw(memory_orders(rewards.ndim)))[0]
    plan.sum(0.9, [lying(rewards)], [sums])
    for cell in np.ndindex(shape):
        *row, t = cell
        np.testing.assert_array_equal(moved[cell], values[(*row, leads_to[cell])])
        total = sum(
            (0.9**k * rewards[(*row, t + k)] for k in range(wanted_steps[cell])),
            start=np.zeros(frame),
        )
        np.testing.assert_allclose(sums[cell], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_are_rounded_once(dtype: str) -> None:
    plan = MultiStepPlan(SplitPlan(np.zeros(50, bool), batch_dims=1), 50)
    rewards = np.random.default_rng(0).standard_normal(50).astype(dtype)
    sums = np.empty(50, dtype)
    plan.sum(1.0, [rewards], [sums])
    exact = np.cumsum(rewards[::-1].astype(np.float64))[::-1]
    np.testing.assert_array_equal(sums, exact.astype(dtype))


def test_bad_arguments_are_named() -> None:
    split = SplitPlan(np.zeros((2, 3), bool), batch_dims=2)
    with refused(ValueError, "n_steps"):
        MultiStepPlan(split, 0)
    plan = MultiStepPlan(split, 2)
    source = np.zeros((2, 3, 4))
    with refused(ValueError, "targets"):
        plan.shift([source], [])
    with pytest.raises(ValueError, match="target 0"):
        plan.sum(0.9, [source], [np.zeros((2, 3))])
    with pytest.raises(ValueError, match="source 0"):
        plan.shift([np.zeros((3, 2))], [np.zeros((3, 2))])
    with refused(ValueError, "target"):
        plan.steps(np.zeros((2, 3)))
    with refused(ValueError, "target"):
        plan.discounts(0.9, np.zeros(6, np.float32))
    with refused(ValueError, "target"):
        plan.nonterminal(np.zeros((2, 3)))
