"""The measurements of `bench cpu`: collectors of one environment, and plain loops over it."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
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
_QUICK, _WHOLE = 0.1, 2.0  # seconds of each row
_TURNS = 3
_Make = Callable[[], Any]
_Collector = tuple[Row, Callable[..., Stream]]
"""Row of a collector, without its duration, and a function that makes the collector's stream."""
_Side = Callable[[float], float]
"""Runs rounds for about that many seconds; returns the median duration of a round."""


def measure(env_id: str, workers: Sequence[int], *, quick: bool) -> Iterator[list[Row]]:
    """Yield the rows of a plain loop and of collectors, in this process and in worker processes.

    Raises:
        ValueError: The environment cannot be made.
    """
    make = partial(gymnasium.make, env_id)
    seconds = _QUICK if quick else _WHOLE
    try:
        make().close()
    except Error as error:
        raise ValueError(f"--env: {error}") from error
    loop = Row(LOOP, frames=_FRAMES, note="keeps nothing")
    collectors = _two("SyncDataCollector", make, loop, "in process")
    yield _raced(loop, _side(_loop(make, _FRAMES)), collectors, seconds)
    for number in workers:
        where = f"{number} process{'es' if number > 1 else ''}"
        envs = [make] * number
        loop = Row(f"{LOOP}s, {where}", frames=_STEPS * number, note="keep nothing")
        collectors = _two("MultiSyncDataCollector", envs, loop, where)
        row = replace(collectors[0][0], name=f"pycollect, async, {where}", frames=_STEPS)
        collectors.insert(1, (row, partial(ours, "MultiaSyncDataCollector", envs)))
        yield _raced(loop, _loops_side(make, number), collectors, seconds)


def _two(kind: str, env: Any, loop: Row, where: str) -> list[_Collector]:
    peer = Row(f"TorchRL, {where}", frames=loop.frames)
    own = Row(f"pycollect, {where}", frames=loop.frames, limit=loop.name, peer=peer.name)
    return [(own, partial(ours, kind, env)), (peer, partial(torchrls, kind, env))]


def _raced(
    loop: Row,
    loop_side: AbstractContextManager[tuple[float, _Side]],
    collectors: Sequence[_Collector],
    seconds: float,
) -> list[Row]:
    """Measure a loop and collectors, ours first, in turn, because the speed of a machine changes.

    The given rows have no durations yet. Return the row of the loop, then three rows for each
    collector: its rate, and the times to the first batch of two of them, one after the other.
    """
    reason = lacks("torchrl")
    present = collectors[:-1] if reason else collectors
    with ExitStack() as opened:
        sides, firsts = [opened.enter_context(loop_side)[1]], []
        for row, make in present:
            start = partial(make, read=count, frames_per_batch=row.frames)
            with _side(start()) as (first, _):
                pass
            again, side = opened.enter_context(_side(start()))
            firsts.append((first, again))
            sides.append(side)
        turns = [[side(seconds / _TURNS) for side in sides] for _ in range(_TURNS)]
    took, *each = (statistics.median(own) for own in zip(*turns, strict=True))
    rows = [replace(loop, seconds=took)]
    for (row, _), rate, both in zip(present, each, firsts, strict=True):
        rows.append(replace(row, seconds=rate))
        names, peers = _first_names(row.name), _first_names(row.peer) if row.peer else (None, None)
        rows += [
            Row(name, seconds=first, peer=peer)
            for name, first, peer in zip(names, both, peers, strict=True)
        ]
    absent = collectors[len(present) :]
    return rows + [
        missing(name, reason) for row, _ in absent for name in (row.name, *_first_names(row.name))
    ]


def _first_names(name: str) -> tuple[str, str]:
    return f"{name}, first batch", f"{name}, first batch again"


@contextmanager
def _side(stream: Stream) -> Iterator[tuple[float, _Side]]:
    """Start a collector or a loop; yield the seconds until its first batch, and its side."""
    with closing(stream):
        batch = partial(next, stream)
        yield seconds_of(batch, CPU), lambda seconds: median_seconds(batch, seconds, CPU)


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


@contextmanager
def _loops_side(make: _Make, number: int) -> Iterator[tuple[float, _Side]]:
    """Open loops in simultaneous processes, which together take the steps of one round."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(number, _open_loop, (make, context.Barrier(number))) as pool:

        def side(seconds: float) -> float:
            took = pool.map(_loop_with_others, [seconds] * number, chunksize=1)
            return number / sum(1 / own for own in took)

        yield 0.0, side  # the start is not measured


_round: Callable[[float], float]  # in a process of the pool


def _open_loop(make: _Make, ready: Any) -> None:
    global _round
    stream = _loop(make, _STEPS)

    def timed(seconds: float) -> float:
        ready.wait()
        return median_seconds(partial(next, stream), seconds, CPU)

    _round = timed


def _loop_with_others(seconds: float) -> float:
    return _round(seconds)
