"""Shared parts of the environment batch tests: counting environments and a collection loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from envs_for_tests import CountingEnv

from pycollect.envs.base import EnvBatch

LENGTHS = (3, 1, 4)


def fns(kind: type[CountingEnv] = CountingEnv, count: int = 3, **kwargs: Any) -> list[Callable]:
    """Return env callables 0, 1, ... with different episode lengths."""
    kwargs.setdefault("length", LENGTHS)
    return [partial(kind, number=i, **kwargs) for i in range(count)]


def envs(kind: type[CountingEnv] = CountingEnv, count: int = 3, **kwargs: Any) -> list[CountingEnv]:
    return [fn() for fn in fns(kind, count, **kwargs)]


def actions(batch: EnvBatch, steps: int) -> list[Any]:
    drawn = batch.action_sampler()(steps, np.random.default_rng(0))
    rows = [tuple(leaf[t, ...].copy() for leaf in drawn) for t in range(steps)]
    return [row[0] if len(row) == 1 else row for row in rows]


def take(arrays: Any) -> Any:
    """Return a copy, because the arrays may be reused buffers."""
    return tuple(map(np.array, arrays)) if isinstance(arrays, tuple) else np.array(arrays)


def frames(batch: EnvBatch, steps: int = 12) -> list[list[tuple[Any, ...]]]:
    """Collect like the Recorder: (root, next, reward, done) for each env, without dummies."""
    assert batch.spec.batch_size
    root = take(batch.reset())
    rows: list[list[tuple[Any, ...]]] = [[] for _ in range(batch.spec.num_envs)]
    done = np.zeros(batch.spec.num_envs, bool)
    for action in actions(batch, steps):
        skipped = done if batch.spec.skips_after_done else np.zeros_like(done)
        after, reward, terminated, truncated = batch.step(action)
        after = take(after)
        done = terminated | truncated
        for i in np.flatnonzero(~skipped):
            rows[i].append((root[i].tolist(), after[i].tolist(), float(reward[i]), bool(done[i])))
        root = after.copy()
        if done.any() and not batch.spec.skips_after_done:
            root[done] = take(batch.reset_done(done.copy()))[done]
    return rows


def run(batch: EnvBatch, steps: int) -> None:
    for _ in range(steps):
        _, _, terminated, truncated = batch.step(np.zeros(batch.spec.num_envs, int))
        if (terminated | truncated).any():
            batch.reset_done(terminated | truncated)


def expect_counting(rows: list[tuple[Any, ...]], number: int, lengths: Any = LENGTHS) -> None:
    """Check that no frame is lost, repeated or shifted, starting at any episode."""
    episode = int(rows[0][0][1])
    step = 0
    for root, after, reward, done in rows:
        assert root == [number, episode, step]
        step += 1
        assert after == [number, episode, step]
        assert reward == step
        assert done == (step == lengths[episode % len(lengths)])
        if done:
            episode, step = episode + 1, 0


def expect_dense(batch: EnvBatch, steps: int = 12) -> None:
    assert not batch.spec.skips_after_done
    rows = frames(batch, steps)
    for i, row in enumerate(rows):
        assert len(row) == steps
        expect_counting(row, i)
    batch.close()


MODES = ["NEXT_STEP", "SAME_STEP", "DISABLED"]
