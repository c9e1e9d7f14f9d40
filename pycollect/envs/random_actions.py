"""Random actions for a whole rollout at once, drawn from numpy generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium import spaces

from pycollect.envs.spaces import Array, Space, leaf_spaces

Draw: TypeAlias = Callable[[tuple[int, ...], np.random.Generator], Array]

Rng: TypeAlias = np.random.Generator | Sequence[np.random.Generator]
"""One generator for all environments, or one per environment."""

Sampler: TypeAlias = Callable[[int, Rng], tuple[Array, ...]]
"""Draws the random actions of a number of steps: new arrays [T, P, *action], one per leaf."""


def make_sampler(action_space: Space, num_envs: int, batched: bool) -> Sampler:
    """Return a sampler, of arrays with the dimension P if `batched`, distributed as `sample()`.

    It draws many actions at a time, because `Box.sample()` draws one action and takes longer than a
    small policy. All randomness comes from the passed generators; the space's generator is not
    used. With P generators, the actions of an environment depend only on its own generator.
    """
    pairs = leaf_spaces(action_space, ("action",), "action_space")
    draws = [_make_draw(space) for _, space in pairs]

    def sample(steps: int, rng: Rng) -> tuple[Array, ...]:
        if isinstance(rng, np.random.Generator):
            lead = (steps, num_envs) if batched else (steps,)
            return tuple(draw(lead, rng) for draw in draws)
        if len(rng) != num_envs:
            raise ValueError(f"rng: expected one per environment ({num_envs}), got {len(rng)}")
        columns = [[draw((steps,), generator) for draw in draws] for generator in rng]
        if not batched:
            return tuple(columns[0])
        return tuple(np.stack(leaf, axis=1) for leaf in zip(*columns, strict=True))

    return sample


def _make_draw(space: Space) -> Draw:
    if isinstance(space, spaces.Box):
        return _draw_box(space)
    if isinstance(space, spaces.Discrete):
        return _draw_integers(space.start, space.start + space.n - 1, (), _dtype(space))
    if isinstance(space, spaces.MultiDiscrete):
        high = space.start + (space.nvec - 1)
        return _draw_integers(space.start, high, space.nvec.shape, _dtype(space))
    return _draw_integers(0, 1, cast("tuple[int, ...]", space.shape), _dtype(space))


def _dtype(space: Space) -> np.dtype[Any]:
    return np.dtype(space.dtype)


def _draw_integers(low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Draw:
    """Draw uniformly from the integers from `low` to `high`, both included."""
    wide = np.uint64 if dtype.kind == "u" else np.int64

    def draw(lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        values = rng.integers(low, high, size=lead + shape, dtype=wide, endpoint=True)
        return np.asarray(values).astype(dtype, copy=False)

    return draw


def _draw_box(space: spaces.Box) -> Draw:
    dtype = _dtype(space)
    below = np.asarray(space.bounded_below)
    above = np.asarray(space.bounded_above)
    if (below & above).all():
        if dtype.kind == "f":
            return _draw_uniform(space.low, space.high, dtype)
        wide = np.uint64 if dtype.kind == "u" else np.int64
        return _draw_integers(space.low.astype(wide), space.high.astype(wide), space.shape, dtype)
    return _draw_mixed(space, below, above, dtype)


def _draw_uniform(low: Array, high: Array, dtype: np.dtype[Any]) -> Draw:
    wide_low, wide_high = low.astype(np.float64), high.astype(np.float64)

    def draw(lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        u = rng.random(lead + low.shape)
        # Not low + (high - low) * u, because the difference can overflow.
        values = np.asarray(wide_low * (1.0 - u) + wide_high * u)
        return np.clip(values, wide_low, wide_high).astype(dtype)

    return draw


def _draw_mixed(space: spaces.Box, below: Array, above: Array, dtype: np.dtype[Any]) -> Draw:
    """Draw from a Box with unbounded coordinates, according to the bounds of each coordinate."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if dtype.kind != "f":
        high = high + 1.0  # so that `floor` can return the upper bound
    only_low, only_high, both = below & ~above, ~below & above, below & above

    def draw(lead: tuple[int, ...], rng: np.random.Generator) -> Array:
        values = rng.standard_normal((*lead, *space.shape))
        values[..., only_low] = low[only_low] + rng.exponential(size=(*lead, int(only_low.sum())))
        size = (*lead, int(only_high.sum()))
        values[..., only_high] = high[only_high] - rng.exponential(size=size)
        u = rng.random((*lead, int(both.sum())))
        values[..., both] = low[both] * (1.0 - u) + high[both] * u
        if dtype.kind != "f":
            values = np.floor(values)
        return _clip_and_cast(values, space, dtype)

    return draw


def _clip_and_cast(values: Array, space: spaces.Box, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        return values.astype(dtype)
    # float64 cannot hold the limits of 64-bit integers, so clip to the bounds as integers.
    limit = np.iinfo(dtype)
    low, high = max(float(limit.min), -(2.0**62)), min(float(limit.max), 2.0**62)
    inside: Array = np.clip(values, low, high).astype(dtype)
    return inside.clip(space.low, space.high)
