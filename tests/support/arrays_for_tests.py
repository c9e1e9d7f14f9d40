"""Arrays in every memory layout that numpy can express, for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

# Test machines are shared, so the duration of a single example is not meaningful.
settings.register_profile("pycollect", deadline=None)
settings.load_profile("pycollect")

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
batch_shapes = st.tuples(st.lists(st.integers(0, 4), max_size=2), st.integers(0, 12)).map(
    lambda case: (*case[0], case[1])
)
"""[T], [P, T] and [B, P, T]."""


def filled(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Random values of the dtype, including its extremes, infinities and NaN."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        small = rng.integers(0, 100, shape).astype(dtype)
        extremes = rng.choice(np.array([info.min, info.max, 0, 1], dtype), shape)
        return np.choose(rng.integers(0, 3, shape), [values, small, extremes]).astype(dtype)
    if kind == "c":
        part = "float32" if dtype == "complex64" else "float64"
        result = np.empty(shape, dtype)
        result.real, result.imag = filled(shape, part, rng), filled(shape, part, rng)
        return result
    with np.errstate(over="ignore"):
        scale = 10.0 ** rng.uniform(-12, 22, shape)
        values = (rng.standard_normal(shape) * scale).astype(dtype)
    specials = np.array([0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, 255.5, -1.0], dtype)
    return np.where(rng.random(shape) < 0.3, rng.choice(specials, shape), values)


@st.composite
def memory_orders(draw: st.DrawFn, rank: int) -> tuple[list[int], list[int]]:
    """A memory layout: a permutation of the dimensions and a step for each."""
    order = draw(st.permutations(range(rank)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1, -2])) for _ in range(rank)]
    return list(order), steps


def laid_out(
    shape: tuple[int, ...], dtype: str, how: tuple[list[int], list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """An uninitialized array [*shape] over larger memory, and that memory."""
    order, steps = how
    memory = np.zeros([shape[i] * abs(steps[i]) for i in order], dtype)
    view = memory.transpose(np.argsort(order)) if order else memory
    view = view[(..., *(slice(None, None, step) for step in steps))]
    assert view.shape == shape
    return view, memory


def laid_out_like(values: np.ndarray, how: tuple[list[int], list[int]]) -> np.ndarray:
    """Return the same values in another memory layout."""
    view, _ = laid_out(values.shape, values.dtype.name, how)
    view[...] = values
    return view
