"""The table of programs: each gives the batches of TorchRL's collector, frame by frame."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import TensorDict

import pycollect

pytest.importorskip("torchrl")

from programs import BATCHES, FRAMES, ON_RAY, PROGRAMS, Program
from torchrl.collectors import Collector
from torchrl_support import assert_alike

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*frames_per_batch:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to Collector:FutureWarning"),
    pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning"),
    pytest.mark.filterwarnings("ignore:A policy device was provided:UserWarning"),
]


def assert_same_batches(program: Program, ours: list[Any], theirs: list[Any]) -> None:
    skipped = program.skipped
    if not program.acts_alike:
        assert len(ours) == len(theirs)
        skipped = tuple(key for batch in theirs for key in batch.keys(True, True))
    theirs = [batch.exclude(*program.extra) for batch in theirs]
    if "split_trajs" in program.arguments:  # in TorchRL, only some ways of splitting name "time"
        theirs = [batch.refine_names(..., "time") for batch in theirs]
    if not program.acts_alike and "split_trajs" not in program.arguments:
        assert all(batch.shape == other.shape for batch, other in zip(ours, theirs, strict=True))
    assert_alike(ours, theirs, skipped)


def test_the_number_of_programs() -> None:
    assert len({str(program) for program in PROGRAMS}) == len(PROGRAMS) >= 100
    assert len(ON_RAY) >= 12


@pytest.mark.sample(usual=60)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_in_process(program: Program) -> None:
    theirs, ours = (program.collected_by(kind) for kind in (Collector, pycollect.SyncDataCollector))
    assert ours.following == theirs.following
    assert_same_batches(program, ours.batches, theirs.batches)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("program", "arguments"), ON_RAY, ids=[f"{program}; {how}" for program, how in ON_RAY]
)
def test_on_ray(program: Program, arguments: dict[str, Any], ray_cluster: Any) -> None:
    """Each actor's rows equal TorchRL's collector with that actor's seed."""
    actors = arguments["num_collectors"]
    counts = {
        name: actors * program.arguments.get(name, default)
        for name, default in (("frames_per_batch", FRAMES), ("total_frames", BATCHES * FRAMES))
    }
    remote = {"num_cpus": 1, "memory": 1024**3}
    ours = program.collected_by(
        pycollect.RayCollector, remote_configs=remote, **counts, **arguments
    )
    seed = 5
    for actor in range(actors):
        theirs = program.collected_by(Collector, seed)
        rows = [_rows(batch, actor, actors, arguments) for batch in ours.batches]
        assert_same_batches(program, rows, theirs.batches)
        seed = theirs.following
    assert ours.following == seed


def _rows(batch: TensorDict, actor: int, actors: int, arguments: dict[str, Any]) -> TensorDict:
    """Return one actor's rows of a batch."""
    if "sync" not in arguments:
        return batch
    if "cat_results" not in arguments:
        return batch[actor]
    steps = batch.shape[0] // actors
    return batch[actor * steps : (actor + 1) * steps]
