"""Rollouts of different lengths in one batch: stopped stragglers and unequal shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import STEPS, FrameOracle, collected_frames, parity_policy
from echo_envs import LENGTHS, EchoEnv, wait_until
from envs_for_tests import CountingEnv
from raising import warned
from test_env_groups import LateSync, counting_groups
from test_ledger import check as check_ledger

from pycollect import MultiSyncDataCollector, RayCollector
from pycollect.transport.handle import WorkerHandle

MASK = ("collector", "mask")
IDS = ("collector", "traj_ids")
END = 3  # step in which the straggler is stopped


class MeetingEnv(EchoEnv):
    """An EchoEnv that touches one file and waits for another in step `at` of its life."""

    def __init__(self, said: Path, awaited: Path, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.said, self.awaited, self.at = said, awaited, at

    def step(self, action: Any) -> Any:
        if len(self.actions) + 1 == self.at:
            self.said.touch()
            wait_until(self.awaited.exists)
        return super().step(action)


@contextmanager
def one_straggler(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    cls: Any,
    envs: int,
    vector: Any = None,
    **arguments: Any,
) -> Iterator[Any]:
    """Hold worker 1 in step END until it is stopped; worker 0 waits for it in its last step.

    Args:
        vector: Makes one group of the first environment, and one of the others.
    """
    stopped, first, second = (folder / name for name in ("stopped", "first", "second"))
    fast = partial(MeetingEnv, first, second, STEPS, number=0, length=LENGTHS)
    slow = partial(MeetingEnv, second, stopped, END, number=10, length=LENGTHS)
    entries: list[Any] = [fast, slow]
    if envs > 1:
        entries = [
            [meets, *(partial(EchoEnv, 10 * w + p, LENGTHS) for p in range(1, envs))]
            for w, meets in enumerate(entries)
        ]
    if vector is not None:
        entries = [[partial(vector, own[:1]), partial(vector, own[1:])] for own in entries]
    open_once_stopped(monkeypatch, stopped)
    with cls(
        entries,
        parity_policy(),
        frames_per_batch=2 * envs * STEPS,
        preemptive_threshold=0.5,
        **arguments,
    ) as collector:
        yield collector


def open_once_stopped(monkeypatch: pytest.MonkeyPatch, stopped: Path) -> None:
    """Touch the file `stopped` after a worker has received its stop request."""
    stop = WorkerHandle.stop

    def stop_and_open(self: WorkerHandle) -> None:
        assert self.spec.index == 1 or stopped.exists()
        stop(self)
        if not self.in_place:  # the request is handled between two steps
            wait_until(lambda: self.steps() is not None)
        stopped.touch()

    monkeypatch.setattr(WorkerHandle, "stop", stop_and_open)


def rows(td: Any, envs: int, cat: Any) -> list[tuple[int, int, Any]]:
    """Return (worker, env, frames), ordered by trajectory id; check the padding."""
    if cat == "stack":
        td = td.reshape(2, envs, -1)
        result = []
        for w in range(2):
            for p in range(envs):
                mask = td[w, p][MASK]
                length = int(mask.sum())
                assert mask[:length].all()
                assert_empty(td[w, p, length:])
                result.append((w, p, td[w, p, :length].exclude(MASK)))
        return result
    assert MASK not in td.keys(True)
    td = td.reshape(envs, -1)
    numbers = td["observation"][..., 0]
    parts = [(w, p, td[p][numbers[p] == 10 * w + p]) for w in range(2) for p in range(envs)]
    assert sum(len(frames) for _, _, frames in parts) == td.numel()
    first = [len(frames) for _, p, frames in parts if p == 0]
    assert (numbers[0, : first[0]] == 0).all()  # worker 0 comes first
    return parts


def assert_empty(cells: Any) -> None:
    assert (cells[IDS] == -1).all()
    for key, value in cells.exclude(IDS).items(True, True):
        assert not value.any(), key


def check_batches(collector: Any, envs: int, cat: Any, least: int, end: int = END) -> None:
    """Check that the first straggler has max(`end`, `least`) steps; later ones may differ."""
    oracle = FrameOracle()
    frames = 0
    for batch in range(5):
        td = collector.next()
        parts = rows(td, envs, cat)
        lengths = [len(part) for _, _, part in parts[::envs]]
        assert [len(part) for _, _, part in parts] == [own for own in lengths for _ in range(envs)]
        if batch == 0:
            assert lengths == [STEPS, max(end, least)]
        assert max(lengths) == STEPS
        assert min(lengths) >= max(least, 1)
        if cat == "stack":
            assert td.shape == ((2, envs, STEPS) if envs > 1 else (2, STEPS))
        else:
            assert td.shape == ((envs, sum(lengths)) if envs > 1 else (sum(lengths),))
        oracle.check(parts)
        frames += sum(lengths) * envs
        ledger = collector.ledger()
        assert check_ledger(ledger)["delivered"] == frames == collector.stats()["frames"]
        assert ledger["total"]["issued"] == frames
    assert oracle.frames == frames


@pytest.mark.processes
@pytest.mark.parametrize(
    ("envs", "cat", "arguments", "least"),
    [
        (3, "stack", {}, 0),
        (1, "stack", {"min_fraction": 0.6}, 5),
        (3, -1, {}, 0),
        (1, -1, {"min_fraction": 0.1}, 1),
        (1, 0, {}, 0),
    ],
)
def test_a_straggler_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    envs: int,
    cat: Any,
    arguments: dict[str, Any],
    least: int,
) -> None:
    with one_straggler(
        monkeypatch, tmp_path, MultiSyncDataCollector, envs, cat_results=cat, **arguments
    ) as collector:
        check_batches(collector, envs, cat, least)


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize("cat", ["stack", -1])
@pytest.mark.parametrize(
    "arguments", [{"inference": "central"}, {"vector": LateSync}], ids=["central", "here"]
)
def test_groups_of_a_straggler_end_with_the_same_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: dict[str, Any], cat: Any
) -> None:
    """Each group has a pending step when its worker notices the stop request."""
    with one_straggler(
        monkeypatch, tmp_path, MultiSyncDataCollector, 3, cat_results=cat, env_groups=2, **arguments
    ) as collector:
        check_batches(collector, 3, cat, 0, end=END + 1)


@pytest.mark.processes
def test_groups_whose_rows_fall_behind_end_with_the_same_step() -> None:
    """All groups stop at once, even if some rows have reset and fall behind."""
    oracle, lengths = FrameOracle(), set()
    with MultiSyncDataCollector(
        [counting_groups("falls behind", worker) for worker in range(2)],
        parity_policy(),
        frames_per_batch=2 * 5 * 50,
        preemptive_threshold=0,
        min_fraction=0.1,
        env_groups=2,
    ) as collector:
        for _ in range(10):
            parts = rows(collector.next(), 5, "stack")
            oracle.check(parts)
            each = [len(part) for _, _, part in parts]
            assert each == [own for own in each[::5] for _ in range(5)]
            lengths.update(each)
        check_ledger(collector.ledger())
    assert min(lengths) >= 5
    assert min(lengths) < 50


@pytest.mark.ray
@pytest.mark.parametrize(("envs", "cat"), [(3, "stack"), (1, 0), (3, -1)])
def test_a_straggling_actor_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, envs: int, cat: Any
) -> None:
    with one_straggler(
        monkeypatch,
        tmp_path,
        RayCollector,
        envs,
        sync=True,
        cat_results=cat,
        remote_configs={"num_cpus": 1, "memory": 1024**3},
    ) as collector:
        check_batches(collector, envs, cat, 0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("cat", ["stack", -1])
def test_stopping_a_rollout_does_not_stop_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cat: Any
) -> None:
    with one_straggler(
        monkeypatch,
        tmp_path,
        MultiSyncDataCollector,
        1,
        cat_results=cat,
        prefetch=2,
        total_frames=8 * STEPS,
    ) as collector:
        oracle = FrameOracle()
        lengths = []
        for td in collector:
            parts = rows(td, 1, cat)
            oracle.check(parts)
            lengths.append([len(part) for _, _, part in parts])
        assert lengths[0] == [STEPS, END]
        assert all(max(both) == STEPS for both in lengths)
        assert oracle.frames >= 8 * STEPS
        assert check_ledger(collector.ledger())["in_flight"] == 0


class Frames:
    """A replay buffer that keeps its batches."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def extend(self, td: Any) -> None:
        self.given.append(td)


@pytest.mark.processes
@pytest.mark.parametrize("cat", ["stack", -1])
def test_preemption_works_with_other_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cat: Any
) -> None:
    """Preemption works with whole trajectories if stacked, and with single frames in a buffer."""
    whole = cat == "stack"
    buffer = None if whole else Frames()
    with one_straggler(
        monkeypatch,
        tmp_path,
        MultiSyncDataCollector,
        3,
        cat_results=cat,
        trajs_per_batch=4 if whole else None,
        traj_format="cat" if whole else None,
        replay_buffer=buffer,
        extend_buffer=False,
        track_policy_version=True,
        compact_obs=True,
        max_frames_per_traj=3,
    ) as collector:
        collector.set_seed(3)
        seen = set()
        for _ in range(4):
            td = collector.next()
            if buffer is not None:
                # one row per environment
                assert {steps.shape[1:] for steps in buffer.given} == {(3,)}
                td = torch.cat([steps.reshape(-1) for steps in buffer.given])
                buffer.given.clear()
            assert td.ndim == 1
            assert (td["collector", "policy_version"] == 0).all()
            assert ("next", "observation") not in td.keys(True)
            frames = {tuple(frame.tolist()) for frame in td["observation"]}
            assert len(frames) == len(td)
            assert not frames & seen
            seen |= frames
            ends = td["step_count"] == 2  # of 3; its "next" is omitted from compact batches
            assert (td["next", "truncated"] == ends).all()
            delivered = check_ledger(collector.ledger())["delivered"]
            assert delivered == len(seen) == collector.stats()["frames"]
        state = collector.state_dict()
        collector.load_state_dict(state)
        td = collector.next()
        assert collector.stats()["frames"] > len(seen)


@pytest.mark.slow
@pytest.mark.processes
def test_all_are_stopped_at_once_at_zero_and_none_at_one() -> None:
    """At 0 each worker has its minimum number of steps; at 1 no worker is stopped."""
    entries = [partial(CountingEnv, w, 1000) for w in range(2)]
    with MultiSyncDataCollector(
        entries, frames_per_batch=2000, preemptive_threshold=0, min_fraction=0.3
    ) as collector:
        for _ in range(3):
            td = collector.next()
            assert td.shape == (2, 1000)
            assert (td[MASK].sum(1) >= 300).all()
            assert collected_frames(td) == td[MASK].sum()
    with MultiSyncDataCollector(
        entries, frames_per_batch=20, preemptive_threshold=1.0
    ) as collector:
        assert collector.next()[MASK].all()


@pytest.mark.processes
@pytest.mark.parametrize(("envs", "cat"), [(3, "stack"), (1, 0), (1, "stack"), (3, -1), (1, -1)])
def test_shares_that_differ(envs: int, cat: Any) -> None:
    steps = [2, STEPS]
    entries: list[Any] = [
        [partial(EchoEnv, 10 * w + p, LENGTHS) for p in range(envs)] for w in (0, 1)
    ]
    if envs == 1:
        entries = [entry[0] for entry in entries]
    with MultiSyncDataCollector(
        entries,
        parity_policy(),
        frames_per_batch=[envs * own for own in steps],
        cat_results=cat,
        set_truncated=True,
    ) as collector:
        oracle = FrameOracle(set_truncated=True)
        for _ in range(4):
            td = collector.next()
            parts = rows(td, envs, cat)
            assert [len(part) for _, _, part in parts[::envs]] == steps
            oracle.check(parts)
        total = check_ledger(collector.ledger())
        assert total["issued"] == total["delivered"] == 4 * envs * sum(steps)
        assert collector.frames_per_batch == envs * sum(steps)


@pytest.mark.processes
def test_shares_are_rounded_up_with_one_warning() -> None:
    entries = [[partial(CountingEnv, 10 * w + p, 50) for p in range(3)] for w in range(2)]
    with warned("frames_per_batch") as caught:
        collector = MultiSyncDataCollector(entries, frames_per_batch=[7, 4])
    (own,) = caught
    assert "15 frames" in str(own.message)
    with collector:
        td = collector.next()
        assert td.shape == (2, 3, 3)
        assert td[MASK].sum(-1).tolist() == [[3] * 3, [2] * 3]
        assert torch.equal(td[IDS] >= 0, td[MASK])
