"""Rollouts of any lengths become batches: nothing is stale, lost or reordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from envs_for_tests import TextEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollect._core import RolloutControl, SharedNumber, Slab, TrajectoryIds
from pycollect.data.slabs import SlabRows
from pycollect.driver.assembly import Assembly
from pycollect.driver.delivery import Batch, assemble, rollouts_of
from pycollect.driver.options import StreamOptions
from pycollect.transport.messages import (
    Rollout,
    RolloutRequest,
    WorkerInfo,
    plain_report,
    unpacked_report,
)
from pycollect.worker.options import WorkerOptions
from pycollect.worker.report import RolloutReport
from pycollect.worker.worker import Worker

MASK = ("collector", "mask")
IDS = ("collector", "traj_ids")
LENGTH = 3
OPTIONS = StreamOptions(frames_per_batch=1)


class StopAt(TextEnv):
    """A TextEnv that stops its rollout in step `at` (from 1, over its life)."""

    def __init__(self, stop: SharedNumber, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stop, self.left = stop, at

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.stop.value = 1
        return super().step(action)


@dataclass
class Stoppable:
    """A worker that stops at step `at` of `steps`, with `envs` envs (0: one without a batch)."""

    worker: Worker
    control: RolloutControl
    ends: int  # number of steps in the rollout

    @classmethod
    def made(cls, number: int, envs: int, steps: int, at: int, mask: bool) -> Stoppable:
        stop = SharedNumber()
        entry: Any = partial(StopAt, stop, at, number=10 * number, length=LENGTH)
        if envs:
            others = [partial(TextEnv, 10 * number + p, length=LENGTH) for p in range(1, envs)]
            entry = [entry, *others]
        options = WorkerOptions(frames=max(envs, 1) * steps, mask=mask)
        worker = Worker(number, entry, None, None, options)
        return cls(worker, RolloutControl(stop, 1), min(steps, at))

    def collect(self, rows: SlabRows) -> RolloutReport:
        """Collect one rollout into dirty memory; return its report after serialization."""
        report = self.worker.collect(rows.slab, rows.row, 0, control=self.control)
        return unpacked_report(plain_report(report))

    @property
    def info(self) -> WorkerInfo:
        own = self.worker
        sizes = own.num_envs, own.num_seeds, own.batch_size
        return WorkerInfo(own.leaves, *sizes, own.steps, 0, "", True)


@contextmanager
def assembly_of(cat: Any) -> Iterator[Assembly]:
    assembly = Assembly(cat, 1, uneven=True)
    yield assembly
    assembly.close()


def batch_of(assembly: Assembly, cat: Any, in_place: bool, workers: list[Stoppable]) -> Batch:
    infos = {w: own.info for w, own in enumerate(workers)}
    assembly.prepare(infos, infos if in_place else (), dict.fromkeys(infos))
    rows = assembly.rows(infos, in_place)
    pending = assembly.pending(RolloutRequest(False, rows[0]), list(infos.values()))
    pending.slab.array()[:] = 0xA5
    reports = {}
    for row, own in enumerate(workers):
        if rows[row] is not None:
            reports[row] = own.collect(rows[row])
            rollout = Rollout(reports[row], None)
        else:
            alone = stale(assembly.pending(RolloutRequest(False), [own.info]).slab)
            reports[row] = own.collect(SlabRows(alone))
            rollout = Rollout(reports[row], alone.array())
        assert assembly.place(pending, row, rollout).frames == reports[row].frames
    return assembly.join(pending, reports, TrajectoryIds())


def stale(slab: Slab) -> Slab:
    slab.array()[:] = 0xA5
    return slab


def check_rollout(td: Any, worker: int, ends: int, first_id: int) -> int:
    """Check a worker's part of a batch, [T] or [P, T]; return the next trajectory's id."""
    ids: dict[tuple[int, int], int] = {}
    for place in np.ndindex(*td.shape):
        frame = td[place]
        *envs, t = place
        if t >= ends:
            check_empty(frame)
            continue
        number, (episode, step) = 10 * worker + sum(envs), divmod(t, LENGTH)
        assert frame["hint"] == f"{number} {episode} {step}"
        assert frame["next", "hint"] == f"{number} {episode} {step + 1}"
        assert frame["next", "deep", "rows"].shape[0] == step + 2
        assert frame["count"].tolist() == [number, episode, step]
        assert frame["next", "done"] == (step + 1 == LENGTH)
        assert frame[IDS] == ids.setdefault((number, episode), first_id + len(ids))
        assert frame.get(MASK, True)
    return first_id + len(ids)


def check_empty(frame: Any) -> None:
    assert frame[IDS] == -1
    assert frame["hint"] is frame["next", "hint"] is None
    assert frame["deep", "rows"].shape[0] == 0
    assert not frame[MASK]
    assert not frame["next", "done"]
    assert not frame["next", "count"].any()


WORKERS = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 8)), min_size=1, max_size=3)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("cat", "envs"), [("stack", 0), ("stack", 2), (-1, 0), (-1, 2), (0, 0)])
@settings(max_examples=12, deadline=None)
@given(lengths=WORKERS)
def test_rollouts_of_any_length(
    cat: Any, envs: int, in_place: bool, lengths: list[tuple[int, int]]
) -> None:
    workers = [
        Stoppable.made(number, envs, steps, at, cat == "stack")
        for number, (steps, at) in enumerate(lengths)
    ]
    with assembly_of(cat) as assembly:
        batch = batch_of(assembly, cat, in_place, workers)
    ends = [own.ends for own in workers]
    assert list(batch.frames_of.values()) == [max(envs, 1) * end for end in ends]
    td = assemble(batch, OPTIONS, None)
    assert td.names[-1] == "time"
    lead = [envs] if envs else []
    if cat == "stack":
        assert td.shape == (len(ends), *lead, max(steps for steps, _ in lengths))
    else:
        assert td.shape == (*lead, sum(ends))
    assert (MASK in td.keys(True)) == (cat == "stack")
    following = 0
    for worker, _, part in rollouts_of(td, batch):
        if cat != "stack":
            assert part.shape[-1] == ends[worker]
        following = check_rollout(part, worker, ends[worker], following)
