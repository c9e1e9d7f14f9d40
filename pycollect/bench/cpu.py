"""What `bench cpu` measures: collectors of one environment, beside a plain loop over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
from gymnasium.error import Error

from pycollect import MultiSyncDataCollector, SyncDataCollector
from pycollect.bench.clock import median_seconds, seconds_of
from pycollect.bench.rows import Row, missing
from pycollect.bench.wholes import lacks, torchrls_multi, torchrls_single, wrapped
from pycollect.devices import CPU

LOOP = "plain loop"
_FRAMES = 2000  # of a round
_QUICK, _WHOLE = 0.1, 2.0  # seconds of each case
_Make = Callable[[], Any]


def measure(env_id: str, workers: int, *, quick: bool) -> Iterator[list[Row]]:
    """The rows of the loop, of this process, and of that many processes.

    Raises:
        ValueError: no such environment can be made, or there is to be no worker.
    """
    make = partial(gymnasium.make, env_id)
    seconds = _QUICK if quick else _WHOLE
    try:
        make().close()
    except Error as error:
        raise ValueError(f"--env: {error}") from error
    if workers < 1:
        raise ValueError(f"--workers: expected a number of at least 1, got {workers}")
    yield [Row(LOOP, seconds=_loop(make, seconds), frames=_FRAMES, note="keeps nothing")]

    def ours() -> Any:
        return SyncDataCollector(make, frames_per_batch=_FRAMES)

    def ours_beside() -> Any:
        return MultiSyncDataCollector([make] * workers, frames_per_batch=_FRAMES)

    theirs = {"frames_per_batch": _FRAMES, "total_frames": 10**12}
    wrap = partial(wrapped, make)
    yield _rows("in process", ours, lambda: torchrls_single()(wrap, **theirs), seconds)
    beside = f"{workers} process{'es' if workers > 1 else ''}"
    yield _rows(beside, ours_beside, lambda: torchrls_multi()([wrap] * workers, **theirs), seconds)


def _loop(make: _Make, seconds: float) -> float:
    """Seconds of so many steps with random actions, and the resets between them."""
    env = make()
    env.reset(seed=0)

    def steps() -> None:
        for _ in range(_FRAMES):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()

    try:
        return median_seconds(steps, seconds, CPU)
    finally:
        env.close()


def _rows(where: str, ours: _Make, theirs: _Make, seconds: float) -> list[Row]:
    """Of both sides: the rate; from the constructor to the first batch, at first and again."""
    rows = []
    for side, make, lacking in (
        ("pycollect", ours, ""),
        ("TorchRL", theirs, lacks("torchrl")),
    ):
        name, peer = f"{side}, {where}", f"TorchRL, {where}"
        names = [name, f"{name}, first batch", f"{name}, first batch again"]
        if lacking:
            rows += [missing(own, lacking) for own in names]
            continue
        first, _ = _run(make, 0.0)
        again, rate = _run(make, seconds)
        rows.append(Row(names[0], seconds=rate, frames=_FRAMES, limit=LOOP, peer=peer))
        for own, took in zip(names[1:], (first, again), strict=True):
            rows.append(Row(own, seconds=took, peer=own.replace(side, "TorchRL")))
    return rows


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
