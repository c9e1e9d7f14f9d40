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
    RAY_CENTRAL_ASYNC,
    STACK,
    TEAM_STACK,
    Way,
    marks_of,
    of_ranks,
)
from fault_campaign import Campaign
from tensordict.nn import TensorDictModule
from test_kills import shared_files

T = 5
PREEMPTED = Way("multi sync preempted", 2, {"preemptive_threshold": 0.5})


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


def case(way: Way, faults: int, usual: bool = False) -> Any:
    marks = marks_of(way) if usual else [*marks_of(way), pytest.mark.slow]
    return pytest.param(way, faults, id=f"{way.name}, {faults} faults", marks=marks)


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("way", "faults"),
    [
        case(IN_PROCESS, 20, usual=True),
        case(CENTRAL_ASYNC, 3, usual=True),
        *[case(way, 20) for way in (MULTI_STACK, MULTI_AHEAD, MULTI_TIME, PREEMPTED)],
        *[case(way, 20) for way in (MULTI_ASYNC[0], MULTI_ASYNC[2])],
        *[case(way, 20) for way in (CENTRAL, CENTRAL_ASYNC, GROUPS, GROUPS_ASYNC)],
        *[case(way, 8) for own in (MULTI_AHEAD, MULTI_ASYNC[2]) for way in of_ranks(own)],
        *[case(way, 8) for way in (STACK, CAT_TIME, ASYNC[2], TEAM_STACK, RAY_CENTRAL_ASYNC)],
    ],
)
def test_no_frame_comes_twice_and_none_is_skipped(way: Way, faults: int, tmp_path: Path) -> None:
    campaign = Campaign(
        partial(make, way),
        way.workers,
        way.remote,
        tmp_path,
        seed=len(way.name),
        held=lambda: len(shared_files()),
    )
    campaign.run(faults)
    assert len(campaign.committed) == faults
