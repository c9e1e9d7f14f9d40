"""The measurements of `bench cpu`: collectors of one environment, and plain loops over it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.error import Error

from pycollect import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from pycollect.bench.clock import median_seconds, seconds_of
from pycollect.bench.rows import Row, missing
from pycollect.bench.sides import lacks, torchrls_multi, torchrls_single, wrapped
from pycollect.devices import CPU

LOOP = "plain loop"
_FRAMES = 2000  # of a round in this process
_STEPS = 400  # of each process in a round
_QUICK, _WHOLE = 0.1, 2.0  # seconds of each case
_Make = Callable[[], Any]


def measure(env_id: str, workers: Sequence[int], *, quick: bool) -> Iterator[list[Row]]:
    """Yield the rows of a plain loop, of collectors in this process, and of worker processes.

    Raises:
        ValueError: The environment cannot be made, or a number of workers is below 1.
    """
    make = partial(gymnasium.make, env_id)
    seconds = _QUICK if quick else _WHOLE
    try:
        make().close()
    except Error as error:
        raise ValueError(f"--env: {error}") from error
    if min(workers) < 1:
        raise ValueError(f"--workers: expected numbers of at least 1, got {min(workers)}")
    yield [Row(LOOP, seconds=_loop(make, _FRAMES, seconds), frames=_FRAMES, note="keeps nothing")]

    def ours() -> Any:
        return SyncDataCollector(make, frames_per_batch=_FRAMES)

    theirs = {"frames_per_batch": _FRAMES, "total_frames": 10**12}
    wrap = partial(wrapped, make)
    where = "in process"
    yield [
        *_rows(f"pycollect, {where}", ours, _FRAMES, LOOP, f"TorchRL, {where}", seconds),
        *_peer(f"TorchRL, {where}", lambda: torchrls_single()(wrap, **theirs), _FRAMES, seconds),
    ]
    for count in workers:
        yield _beside(make, count, seconds)


def _beside(make: _Make, count: int, seconds: float) -> list[Row]:
    """Return the rows of `count` worker processes, and of `count` simultaneous plain loops."""
    where = f"{count} process{'es' if count > 1 else ''}"
    frames = _STEPS * count
    limit, peer = f"{LOOP}s, {where}", f"TorchRL, {where}"
    rows = [Row(limit, seconds=_loops(make, count, seconds), frames=frames, note="keep nothing")]
    for name, kind, per_batch in (
        (f"pycollect, {where}", MultiSyncDataCollector, frames),
        (f"pycollect, async, {where}", MultiaSyncDataCollector, _STEPS),
    ):
        own = partial(kind, [make] * count, frames_per_batch=per_batch)
        rows += _rows(name, own, per_batch, limit, peer, seconds)
    theirs = {"frames_per_batch": frames, "total_frames": 10**12}
    wrap = [partial(wrapped, make)] * count
    return rows + _peer(peer, lambda: torchrls_multi()(wrap, **theirs), frames, seconds)


def _loops(make: _Make, count: int, seconds: float) -> float:
    """Return the time in which `count` simultaneous processes take the steps of one round."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(count)
    with context.Pool(count, _meet_at, (ready,)) as pool:
        took = pool.starmap(_loop_with_others, [(make, seconds)] * count, chunksize=1)
    return count / sum(1 / own for own in took)


_ready: Any = None


def _meet_at(ready: Any) -> None:
    global _ready
    _ready = ready


def _loop_with_others(make: _Make, seconds: float) -> float:
    _ready.wait()
    return _loop(make, _STEPS, seconds)


def _loop(make: _Make, frames: int, seconds: float) -> float:
    """Return the time of `frames` steps with random actions, including resets."""
    env = make()
    env.reset(seed=0)

    def steps() -> None:
        for _ in range(frames):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()

    try:
        return median_seconds(steps, seconds, CPU)
    finally:
        env.close()


def _peer(name: str, make: _Make, frames: int, seconds: float) -> list[Row]:
    if reason := lacks("torchrl"):
        return [missing(own, reason) for own in _names(name)]
    return _rows(name, make, frames, None, None, seconds)


def _rows(
    name: str, make: _Make, frames: int, limit: str | None, peer: str | None, seconds: float
) -> list[Row]:
    """Return three rows: the rate, and the time to the first batch of two collectors in turn."""
    first, _ = _run(make, 0.0)
    again, rate = _run(make, seconds)
    times = (rate, first, again)
    peers = _names(peer) if peer is not None else (None,) * len(times)
    rows = [
        Row(own, seconds=took, peer=other)
        for own, took, other in zip(_names(name), times, peers, strict=True)
    ]
    return [replace(rows[0], frames=frames, limit=limit), *rows[1:]]


def _names(name: str) -> tuple[str, str, str]:
    return name, f"{name}, first batch", f"{name}, first batch again"


def _run(make: _Make, seconds: float) -> tuple[float, float]:
    """Seconds until a collector's first batch, and then of a batch."""
    running: list[Any] = []

    def first() -> None:
        running.append(make())
        running.append(iter(running[0]))
        next(running[1])

    try:
        until_first = seconds_of(first, CPU)
        return until_first, median_seconds(lambda: next(running[1]), seconds, CPU)
    finally:
        for collector in running[:1]:
            collector.shutdown()
