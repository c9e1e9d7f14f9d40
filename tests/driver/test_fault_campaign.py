"""Random faults in every kind of collection, with the garbage collector disabled."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_TIME,
    CENTRAL,
    CENTRAL_ASYNC,
    GROUPS,
    GROUPS_ASYNC,
    IN_PROCESS,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    NEST_STACK,
    RAY_CENTRAL_ASYNC,
    STACK,
    Way,
    marks_of,
    of_ranks,
)
from fault_campaign import BY_ENVIRONMENT, Campaign, FaultyEnv, Frames
from interrupt_points import InterruptPoints
from tensordict.nn import TensorDictModule
from test_kills import shared_files
from test_restarts import check_ledger

T = 5
PREEMPTED = Way("multi sync preempted", 2, {"preemptive_threshold": 0.5})
SPAWNED = Way("multi sync spawned", 2, {"start_method": "spawn"})
SPAWNED_ASYNC = Way("multi async spawned", 2, {"start_method": "spawn", "prefetch": 1})
SHORT = (IN_PROCESS, CENTRAL_ASYNC, of_ranks(MULTI_AHEAD)[0])  # in the usual run
SOAKED = (IN_PROCESS, MULTI_STACK, MULTI_ASYNC[1], CENTRAL, CENTRAL_ASYNC, STACK, ASYNC[1])
GROWTH = {"MB": 8.0, "descriptors": 2, "threads": 1}  # limits for the driver and one worker


def follow(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., 1] % 2


def make(way: Way, entries: list[Any], **arguments: Any) -> Any:
    if not way.remote:
        del arguments["max_worker_restarts"]
        return way.collector(entries[0], policy(), frames_per_batch=T, **arguments)
    frames = T * way.workers if way.sync else T
    if "env_groups" in way.arguments:
        entries, frames = [[entry] * 2 for entry in entries], 2 * frames
    return way.collector(entries, policy(), frames_per_batch=frames, **arguments)


def policy() -> TensorDictModule:
    return TensorDictModule(follow, ["observation"], ["action"])


def kinds(way: Way) -> list[str]:
    """Return the kinds of faults that are possible in a way to collect."""
    if not way.remote:
        return ["interrupt", "raise"]
    found = ["interrupt", *BY_ENVIRONMENT, "kill", "stop", "pause"]
    found += ["fork server"] if way.children and "start_method" not in way.arguments else []
    found += ["policy process"] if way.name in (CENTRAL_ASYNC.name, GROUPS_ASYNC.name) else []
    return found + (["policy process"] if way is RAY_CENTRAL_ASYNC else [])


def case(way: Way) -> Any:
    marks = marks_of(way) if way in SHORT else [*marks_of(way), pytest.mark.slow]
    return pytest.param(way, id=way.name, marks=marks)


@pytest.mark.chaos
@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "way",
    [
        *map(case, (IN_PROCESS, MULTI_STACK, MULTI_AHEAD, MULTI_TIME, PREEMPTED)),
        *map(case, (MULTI_ASYNC[0], MULTI_ASYNC[2], SPAWNED, SPAWNED_ASYNC)),
        *map(case, (CENTRAL, CENTRAL_ASYNC, GROUPS, GROUPS_ASYNC)),
        *[case(way) for own in (MULTI_AHEAD, MULTI_ASYNC[2]) for way in of_ranks(own)],
        *map(case, (STACK, CAT_TIME, ASYNC[2], NEST_STACK, RAY_CENTRAL_ASYNC)),
    ],
)
def test_no_frame_comes_twice_and_none_is_skipped(
    way: Way, tmp_path: Path, pytestconfig: pytest.Config, record_property: Any
) -> None:
    faults, seed = pytestconfig.getoption("faults"), pytestconfig.getoption("seed")
    campaign = Campaign(
        partial(make, way),
        way.workers,
        kinds(way),
        tmp_path,
        seed=f"{seed} {way.name}",
        held=lambda: len(shared_files()),
    )
    try:
        campaign.run(faults)
    finally:
        record_property("chaos", f"{way.name}: {campaign.report()}")
    assert len(campaign.committed) == faults


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "way",
    [MULTI_AHEAD, CENTRAL, CENTRAL_ASYNC, *of_ranks(MULTI_ASYNC[2])],
    ids=lambda way: way.name,
)
def test_an_interrupt_at_any_point_of_a_replacement(
    way: Way, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The replacement delivers, and no frame comes twice or is missing without a reason."""
    faults, seed = pytestconfig.getoption("faults"), pytestconfig.getoption("seed")
    points, frames = InterruptPoints(), Frames()
    entries = [partial(FaultyEnv, tmp_path / str(worker)) for worker in range(way.workers)]

    def replace() -> None:
        """Kill a worker, and collect until its replacement has delivered twice."""
        before, deadline = of_victim(), time.monotonic() + 60
        os.kill(before["pid"], signal.SIGKILL)
        while of_victim()["frames"] < before["frames"] + 4 * T:
            assert time.monotonic() < deadline, f"nothing was delivered: {collector.stats()}"
            with suppress(KeyboardInterrupt), points.traced():
                frames.follow(collector.next())

    def of_victim() -> dict[str, Any]:
        own: dict[str, Any] = collector.stats()["workers"][1]
        return own

    with make(way, entries, max_worker_restarts=1000) as collector:
        replace()
        passed = sorted(points.passed.items(), key=str)
        for point, times in Random(seed).sample(passed, min(10 * faults, len(passed))):
            points.interrupt(point, min(times, 2))
            replace()
            total = collector.ledger()["total"]
            assert total["delivered"] == frames.seen, point
            assert frames.skipped <= total["reasons"].get("incomplete", 0), point
            check_ledger(collector)


def test_a_seed_repeats_the_faults(tmp_path: Path) -> None:
    committed = []
    for seed in ("0", "0", "1"):
        held = partial(len, [])
        campaign = Campaign(
            partial(make, IN_PROCESS), 1, kinds(IN_PROCESS), tmp_path, seed, held=held
        )
        campaign.run(12)
        committed.append(campaign.committed)
    assert committed[0] == committed[1] != committed[2]


def held_by(pid: int) -> dict[str, float]:
    """Return the memory, open descriptors and threads of a process."""
    process = psutil.Process(pid)
    with process.oneshot():
        megabytes = process.memory_info().rss / 1e6
        return {"MB": megabytes, "descriptors": process.num_fds(), "threads": process.num_threads()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.name, marks=marks_of(way))
        for way in (*SOAKED, *of_ranks(MULTI_STACK)[:2])
    ],
)
def test_nothing_grows(way: Way, tmp_path: Path, record_property: Any) -> None:
    """Collect 5,000 batches and kill one worker after every 250; the other one lives on."""
    entries = [partial(FaultyEnv, tmp_path / str(worker)) for worker in range(way.workers)]
    lives: set[int] = set()
    samples, batches = [], 0
    with make(way, entries, max_worker_restarts=1000) as collector:
        for _ in range(20):
            if way.remote and lives:
                os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
            before, until = len(lives), batches + 250
            while batches < until or (way.remote and len(lives) == before):
                lives.update(collector.next()["observation"][..., 0].flatten().tolist())
                batches += 1
            pids = [os.getpid(), *([collector.stats()["workers"][1]["pid"]] if way.remote else [])]
            samples.append([held_by(pid) for pid in pids])
    report = [f"{way.name}: {batches} batches, {max(len(lives) - way.workers, 0)} restarts"]
    growth = []
    for name, first, last in zip(("driver", "worker"), samples[3], samples[-1], strict=False):
        growth.append({kind: last[kind] - first[kind] for kind in first})
        changes = ", ".join(f"{number:+.3g} {kind}" for kind, number in growth[-1].items())
        report.append(f"{name} {last['MB']:.0f} MB: {changes}")
    record_property("chaos", "; ".join(report))
    assert all(own[kind] <= most for own in growth for kind, most in GROWTH.items()), samples
