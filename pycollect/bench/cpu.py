"""The measurements of `bench cpu`: collectors of one environment, and plain loops over it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.error import Error

from pycollect.bench.clock import median_seconds, seconds_of
from pycollect.bench.report import Row, missing
from pycollect.bench.sides import Stream, count, lacks, ours, torchrls
from pycollect.data.devices import CPU

LOOP = "plain loop"
_FRAMES = 2000  # of a round in this process
_STEPS = 400  # of each process in a round
_QUICK, _WHOLE = 0.1, 2.0  # seconds of each case
_Make = Callable[[], Any]


def measure(env_id: str, workers: Sequence[int], *, quick: bool) -> Iterator[list[Row]]:
    """Yield the rows of a plain loop, of collectors in this process, and of worker processes.

    Raises:
        ValueError: The environment cannot be made.
    """
    make = partial(gymnasium.make, env_id)
    seconds = _QUICK if quick else _WHOLE
    try:
        make().close()
    except Error as error:
        raise ValueError(f"--env: {error}") from error
    alone = _loop_seconds(make, _FRAMES, seconds)
    yield [Row(LOOP, seconds=alone, frames=_FRAMES, note="keeps nothing")]
    yield _compared(make, "SyncDataCollector", "in process", _FRAMES, LOOP, seconds)
    for number in workers:
        where = f"{number} process{'es' if number > 1 else ''}"
        limit, frames, envs = f"{LOOP}s, {where}", _STEPS * number, [make] * number
        together = _loops_seconds(make, number, seconds)
        rows = _compared(envs, "MultiSyncDataCollector", where, frames, limit, seconds)
        stream = partial(ours, "MultiaSyncDataCollector", envs)
        name = f"pycollect, async, {where}"
        yield [
            Row(limit, seconds=together, frames=frames, note="keep nothing"),
            *rows[:3],
            *_rows(stream, name, _STEPS, seconds, limit, f"TorchRL, {where}"),
            *rows[3:],
        ]


def _compared(
    env: Any, collector: str, where: str, frames: int, limit: str, seconds: float
) -> list[Row]:
    """Return the rows of our collector and of TorchRL's."""
    peer = f"TorchRL, {where}"
    rows = _rows(partial(ours, collector, env), f"pycollect, {where}", frames, seconds, limit, peer)
    if reason := lacks("torchrl"):
        return rows + [missing(name, reason) for name in _names(peer)]
    return rows + _rows(partial(torchrls, collector, env), peer, frames, seconds)


def _rows(
    stream: Callable[..., Stream],
    name: str,
    frames: int,
    seconds: float,
    limit: str | None = None,
    peer: str | None = None,
) -> list[Row]:
    """Return three rows: the rate, and the time to the first batch of two collectors in turn."""
    start = partial(stream, read=count, frames_per_batch=frames)
    first, _ = _run(start(), 0.0)
    again, rate = _run(start(), seconds)
    peers = _names(peer) if peer is not None else (None,) * 3
    rows = [
        Row(own, seconds=took, peer=other)
        for own, took, other in zip(_names(name), (rate, first, again), peers, strict=True)
    ]
    return [replace(rows[0], frames=frames, limit=limit), *rows[1:]]


def _names(name: str) -> tuple[str, str, str]:
    return name, f"{name}, first batch", f"{name}, first batch again"


def _run(stream: Stream, seconds: float) -> tuple[float, float]:
    """Return the seconds until a collector's first batch, and then of a batch."""
    with closing(stream):
        batch = partial(next, stream)
        return seconds_of(batch, CPU), median_seconds(batch, seconds, CPU)


def _loop(make: _Make, frames: int) -> Stream:
    """Step with random actions and reset; keep nothing."""
    with closing(make()) as env:
        env.reset(seed=0)
        while True:
            for _ in range(frames):
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if terminated or truncated:
                    env.reset()
            yield frames


def _loop_seconds(make: _Make, frames: int, seconds: float) -> float:
    with closing(_loop(make, frames)) as stream:
        return median_seconds(partial(next, stream), seconds, CPU)


def _loops_seconds(make: _Make, number: int, seconds: float) -> float:
    """Return the time in which simultaneous processes take the steps of one round."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(number)
    with context.Pool(number, _meet_at, (ready,)) as pool:
        took = pool.starmap(_loop_with_others, [(make, seconds)] * number, chunksize=1)
    return number / sum(1 / own for own in took)


_ready: Any = None


def _meet_at(ready: Any) -> None:
    global _ready
    _ready = ready


def _loop_with_others(make: _Make, seconds: float) -> float:
    _ready.wait()
    return _loop_seconds(make, _STEPS, seconds)
