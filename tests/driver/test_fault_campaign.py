"""Random faults in every kind of collection, with the garbage collector disabled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

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
from fault_campaign import BY_ENVIRONMENT, Campaign
from tensordict.nn import TensorDictModule
from test_kills import shared_files

T = 5
PREEMPTED = Way("multi sync preempted", 2, {"preemptive_threshold": 0.5})
SPAWNED = Way("multi sync spawned", 2, {"start_method": "spawn"})
SPAWNED_ASYNC = Way("multi async spawned", 2, {"start_method": "spawn", "prefetch": 1})
SHORT = (IN_PROCESS, CENTRAL_ASYNC, of_ranks(MULTI_AHEAD)[0])  # in the usual run


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
