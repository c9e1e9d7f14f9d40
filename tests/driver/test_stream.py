"""One stream of batches: its length and end, resumption after a break, and batch options."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import weakref
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    REMOTELY,
    STACK,
    STEPS,
    FrameOracle,
    Way,
    collecting,
    marked,
    parity,
    parity_policy,
)
from echo_envs import ENTRIES, TallyEnv, echo_fns, wait_until
from envs_for_tests import CountingEnv
from raising import refused, warned
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type

from pycollect import RayCollector, SyncDataCollector, split_trajectories

ONE = ENTRIES["one"]
T = 5
WAYS = [IN_PROCESS, *marked(STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2], many=True)]


def names(value: Any) -> str | None:
    return value.name if isinstance(value, Way) else None


# Length and lifetime


@pytest.mark.parametrize("way", [IN_PROCESS, *marked(MULTI_ASYNC[0])], ids=names)
def test_an_unreferenced_collector_is_freed_at_once(way: Way) -> None:
    """No reference cycle holds the collector: its workers end without a garbage collection."""
    gc.disable()
    try:
        entries = [ONE(w) for w in range(way.workers)]
        collector = way.collector(entries, None, frames_per_batch=T)
        collector.next()
        processes = [worker["pid"] for worker in collector.stats()["workers"].values()]
        forgotten = weakref.ref(collector)
        del collector
        assert forgotten() is None
        if way is not IN_PROCESS:
            wait_until(lambda: not any(map(psutil.pid_exists, processes)))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("total", "frames", "batches"),
    [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), (20, 5, 4), (20, 7, 3)],
)
def test_the_end(total: int, frames: int, batches: int) -> None:
    with collecting(IN_PROCESS, ONE, frames=frames, total_frames=total) as collector:
        assert len(collector) == batches
        assert [td.numel() for td in collector] == [frames] * batches
        assert collector.next() is None
        assert list(collector) == []
        assert len(collector) == batches
        assert collector
    assert collector
    assert collector.next() is None


@pytest.mark.parametrize("way", marked(IN_PROCESS, STACK, MULTI_STACK))
def test_repr(way: Way) -> None:
    with collecting(way, ONE, frames=5, total_frames=-1) as collector:
        frames = collector.frames_per_batch
        collector.next()
        collector.update_policy_weights_()
        shown = repr(collector)
    name = type(collector).__name__
    assert shown == (
        f"{name}(frames_per_batch={frames}, total_frames=inf, delivered={frames}, "
        "policy_version=1, closed=False)"
    )
    assert repr(collector).endswith("closed=True)")


def test_repr_after_a_failed_constructor() -> None:
    with refused(ValueError, "frames_per_batch") as raised:
        SyncDataCollector(lambda: CountingEnv(1), None, frames_per_batch=-4)
    frames = [frame.locals["self"] for frame in raised.traceback if "self" in frame.locals]
    shown = [repr(self) for self in frames if isinstance(self, SyncDataCollector)]
    assert shown
    assert all(text.startswith("<pycollect.") for text in shown)


@pytest.mark.parametrize("total", [None, -1, -7])
def test_without_an_end(total: int | None) -> None:
    with collecting(IN_PROCESS, ONE, frames=T, total_frames=total) as collector:
        for number, td in enumerate(collector):
            assert td.shape == (T,)
            if number == 50:
                break
        with refused(TypeError, "total_frames"):
            len(collector)
        assert collector
        assert collector.total_frames == float("inf")


def test_total_frames_counts_collected_frames() -> None:
    """Uncollected cells do not count as frames."""
    entry = ENTRIES["ignores masks"]
    with collecting(IN_PROCESS, entry, frames=3 * STEPS, total_frames=6 * STEPS) as collector:
        counted = [int(td["collector", "mask"].sum()) for td in collector]
    assert len(counted) == 3
    assert sum(counted[:2]) < 6 * STEPS <= sum(counted)


def test_a_batch_is_rounded_up_with_a_warning() -> None:
    with warned("frames_per_batch") as caught:
        collector = SyncDataCollector(echo_fns(0), None, frames_per_batch=10, total_frames=24)
    assert [own.filename for own in caught] == [__file__]
    with collector:
        assert collector.frames_per_batch == 12
        assert len(collector) == 2
        assert [td.shape for td in collector] == [(3, 4)] * 2


@pytest.mark.slow
@pytest.mark.ray
def test_shares_are_rounded_up_with_a_warning() -> None:
    with warned("frames_per_batch") as caught:
        collector = RayCollector(
            [echo_fns(0, 3), echo_fns(1, 3)], None, frames_per_batch=7, total_frames=13, sync=True
        )
    assert [own.filename for own in caught] == [__file__]
    with collector:
        assert collector.frames_per_batch == 12
        assert len(collector) == 2
        assert [td.shape for td in collector] == [(2, 3, 2)] * 2


@pytest.mark.parametrize("total", [20, 17])
@pytest.mark.parametrize("way", REMOTELY)
def test_nothing_is_collected_that_cannot_be_delivered(way: Way, total: int, tmp_path: Any) -> None:
    tally = tmp_path / "steps"

    def entry(worker: int) -> Any:
        return partial(TallyEnv, tally, number=10 * worker)

    with collecting(way, entry, frames=T, total_frames=total) as collector:
        delivered = sum(td.numel() for td in collector)
        assert delivered == 20
        assert collector.next() is None
        assert collector.stats()["frames_stepped"] == delivered
    assert tally.stat().st_size == delivered


@pytest.mark.slow
@pytest.mark.ray
def test_no_frames_at_all_from_actors() -> None:
    with collecting(Way("one actor", 1, {}), ONE, frames=T, total_frames=0) as collector:
        assert len(collector) == 0
        assert list(collector) == []
        assert collector.stats()["frames_stepped"] == 0


# One stream


@pytest.mark.parametrize("way", WAYS, ids=names)
def test_iteration_resumes_after_a_break(way: Way) -> None:
    """Resume after a break with iter(), next() and .next() in turn."""
    oracle = FrameOracle()
    batches = 0

    def took(td: Any) -> None:
        nonlocal batches
        batches += 1
        oracle.check(way.rows(td, 1, False))

    total = 10 * T * (way.workers if way.sync else 1)
    with collecting(way, ONE, parity_policy(), frames=T, total_frames=total) as collector:
        for td in collector:
            took(td)
            if batches == 3:
                break
        took(next(collector))
        took(collector.next())
        iterator = iter(collector)
        took(next(iterator))
        with pytest.raises(ZeroDivisionError):
            _break_in_the_loop(collector, took)
        took(next(iterator))
        for td in collector:
            took(td)
        assert batches == 10 == len(collector)
        with pytest.raises(StopIteration):
            next(iterator)


def _break_in_the_loop(collector: Any, took: Any) -> None:
    for td in collector:
        took(td)
        raise ZeroDivisionError


def test_after_shutdown() -> None:
    with collecting(IN_PROCESS, ONE, frames=T) as collector:
        collector.next()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()
    collector.shutdown()
    assert collector.stats()["frames"] == T


# Batch options


@pytest.mark.parametrize("way", WAYS, ids=names)
def test_random_frames_first(way: Way) -> None:
    """Random frames are rounded up to whole batches; the policy's other outputs are zero."""
    per_batch = T * (way.workers if way.sync else 1)
    asked = 2 * per_batch + 1
    with collecting(
        way, ONE, parity_policy(), frames=T, total_frames=6 * per_batch, init_random_frames=asked
    ) as collector:
        batches = list(collector)
    policys = [bool((td["seen"] == td["observation"]).all()) for td in batches]
    # Async batches are delivered first ready first, so a worker's third may come early.
    assert sorted(policys) == [False] * 3 + [True] * 3
    if way.sync or not way.remote:
        assert policys == sorted(policys)
    oracle = FrameOracle(acts=False)
    actions = []
    for td, by_policy in zip(batches, policys, strict=True):
        if not by_policy:
            assert not td["seen"].any()
            actions += td["action"].flatten().tolist()
        else:
            assert torch.equal(td["action"], parity(td["observation"])[0])
        oracle.check(way.rows(td, 1, False))
    assert set(actions) == {0, 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("DETERMINISTIC", "DETERMINISTIC"),
        ("deterministic", "DETERMINISTIC"),
        ("Random", "RANDOM"),
        ("mode", "MODE"),
        ("MEAN", "MEAN"),
        *[(InteractionType[name], name) for name in ("DETERMINISTIC", "RANDOM", "MODE", "MEAN")],
        (None, "RANDOM"),
    ],
)
def test_exploration_type(given: Any, expected: str) -> None:
    seen = []

    def act(observation: torch.Tensor) -> torch.Tensor:
        seen.append(interaction_type())
        assert not torch.is_grad_enabled()
        return (observation[..., 2] % 2).long()

    with collecting(IN_PROCESS, ONE, act, frames=T, exploration_type=given) as collector:
        collector.next()
        assert interaction_type() is not InteractionType.MODE
    assert set(seen) == {InteractionType[expected]}


class Settings(torch.nn.Module):
    """Output the interaction type and the current number of torch threads."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kind = list(InteractionType).index(interaction_type())
        threads = torch.get_num_threads()
        return (observation[..., 2] % 2).long(), torch.tensor([kind]), torch.tensor([threads])


def settings_policy() -> TensorDictModule:
    return TensorDictModule(Settings(), ["observation"], ["action", "kind", "threads"])


@pytest.fixture
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("count", [None, 1, 2])
def test_threads_in_process(count: int | None) -> None:
    with collecting(IN_PROCESS, ONE, settings_policy(), frames=T, num_threads=count) as collector:
        td = collector.next()
        assert torch.get_num_threads() == 3
    assert (td["threads"] == (count or 3)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("three_threads")
@pytest.mark.ray
def test_settings_of_actors() -> None:
    arguments = {
        "exploration_type": "mean",
        "collector_kwargs": [{"num_threads": 2}, {}],
        "track_policy_version": True,
    }
    with collecting(STACK, ONE, settings_policy(), frames=T, **arguments) as collector:
        td = collector.next()
        assert torch.get_num_threads() == 3
    assert (td["kind"] == list(InteractionType).index(InteractionType.MEAN)).all()
    assert td["threads"].squeeze(-1).tolist() == [[2] * T, [1] * T]
    assert (td["collector", "policy_version"] == 0).all()


def test_postproc_after_splitting() -> None:
    given = []

    def halve(td: Any) -> Any:
        given.append(td)
        return td[: td.shape[0] // 2]

    arguments = {"postproc": halve, "split_trajs": True, "total_frames": 60}
    with collecting(IN_PROCESS, ENTRIES["list"], frames=30, **arguments) as collector:
        batches = list(collector)
    assert len(batches) == 2  # total_frames counts frames before postproc
    for td, before in zip(batches, given, strict=True):
        assert before["collector", "mask"].sum() == 30
        assert td.shape == (before.shape[0] // 2, before.shape[1])


def test_postproc_that_raises() -> None:
    def refuse(td: Any) -> Any:
        raise KeyError("no")

    with collecting(IN_PROCESS, ONE, frames=T, postproc=refuse) as collector:
        with pytest.raises(KeyError, match="no"):
            collector.next()
        assert collector.stats()["batches"] == 1


def test_split_trajs() -> None:
    """The same as splitting each batch, with ids that continue over batches."""
    arguments = {"frames": 3 * STEPS, "total_frames": 3 * 3 * STEPS}
    entry = ENTRIES["list"]
    with collecting(IN_PROCESS, entry, parity_policy(), **arguments) as collector:
        plain = list(collector)
    arguments["split_trajs"] = True
    with collecting(IN_PROCESS, entry, parity_policy(), **arguments) as collector:
        split = list(collector)
    for a, b in zip(plain, split, strict=True):
        assert b.ndim == 2
        assert b["collector", "mask"].sum() == a.numel()
        assert (b["collector", "traj_ids"][~b["collector", "mask"]] == -1).all()
        assert (split_trajectories(a) == b).all()
    ids = torch.cat([td["collector", "traj_ids"].flatten() for td in split])
    assert ids[ids >= 0].unique().numel() == ids.max() + 1


@pytest.mark.parametrize("total", [3 * T, None])
def test_progress(total: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with collecting(IN_PROCESS, ONE, frames=T, total_frames=total, progress=True) as collector:
        for _ in range(3):
            collector.next()
    shown = capsys.readouterr().err
    assert "15.0" in shown
    assert "return=" in shown
    assert "lag=" in shown


def test_no_progress_by_default() -> None:
    shown = io.StringIO()
    with (
        contextlib.redirect_stderr(shown),
        collecting(IN_PROCESS, ONE, frames=T, total_frames=T) as collector,
    ):
        list(collector)
    assert shown.getvalue() == ""


def test_policy_version_of_each_frame() -> None:
    with collecting(
        IN_PROCESS, ONE, parity_policy(), frames=T, track_policy_version=True
    ) as collector:
        for version in range(3):
            assert (collector.next()["collector", "policy_version"] == version).all()
            collector.update_policy_weights_()
            assert collector.policy_version == version + 1


def test_reset_at_each_iter_may_be_a_number_or_none() -> None:
    for value in (1, np.True_, 0, None):
        with collecting(IN_PROCESS, ONE, frames=2, reset_at_each_iter=value) as collector:
            collector.next()
            assert (collector.next()["observation"][0, 2] == 0) == bool(value)


def test_set_truncated_does_not_end_an_episode() -> None:
    """The trajectory keeps its id, and the episode statistics do not change."""
    with collecting(
        IN_PROCESS, lambda w: partial(CountingEnv, length=7), frames=5, set_truncated=True
    ) as collector:
        batches = [collector.next() for _ in range(7)]
        stats = collector.stats()
    ids = torch.cat([td["collector", "traj_ids"] for td in batches])
    assert ids.tolist() == [i // 7 for i in range(35)]
    assert all(td["next", "truncated"][-1] and td["next", "done"][-1] for td in batches)
    assert (stats["episodes"], stats["episode_length"]) == (5, 7)


def test_an_env_instance_and_kwargs() -> None:
    env = CountingEnv(4)
    with SyncDataCollector(env, None, frames_per_batch=T) as collector:
        assert (collector.next()["observation"][:, 0] == 4).all()
    assert env.closed == 1
    arguments = {"create_env_kwargs": {"number": 6, "length": 2}}
    for entry in (CountingEnv, [CountingEnv, CountingEnv], [[CountingEnv]]):
        with SyncDataCollector(entry, None, frames_per_batch=4, **arguments) as collector:
            td = collector.next()
        assert (td["observation"][..., 0] == 6).all()
        assert td.numel() == 4
        assert math.prod(td.shape[:-1]) == (2 if len(entry_list(entry)) == 2 else 1)


def entry_list(entry: Any) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]
