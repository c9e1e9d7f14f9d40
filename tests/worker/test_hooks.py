"""Hooks, init_fn, and the arguments that select the delivered entries of a frame."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    Way,
    bias_policy,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import echo_fns
from envs_for_tests import CountingEnv
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import SyncDataCollector

T = 5
WAYS = [pytest.param(IN_PROCESS), *marked(STACK, ASYNC[0], MULTI_TIME, MULTI_ASYNC[0], many=True)]


def one(worker: int) -> Any:
    return echo_fns(worker)[0]


class Diary:
    """A picklable log of calls, with one file per process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, what: str) -> None:
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(what + "\n")

    def pages(self) -> list[list[str]]:
        return [file.read_text().split() for file in sorted(self.folder.iterdir())]

    def init(self) -> None:
        self.write("init")

    def before(self) -> None:
        self.write("before")

    def after(self, td: Any) -> None:
        self.write("after:" + "x".join(map(str, td.shape)))
        td["next", "reward"] += 1000.0


class DiaryEnv:
    """An environment factory that logs its calls."""

    def __init__(self, diary: Diary, make: Any) -> None:
        self.diary, self.make = diary, make

    def __call__(self) -> Any:
        self.diary.write("env")
        return self.make()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_hooks_run_around_every_rollout_in_its_worker(way: Way, tmp_path: Path) -> None:
    diary = Diary(tmp_path)
    with collecting(
        way,
        lambda worker: DiaryEnv(diary, one(worker)),
        parity_policy(),
        frames=T,
        total_frames=2 * way.workers * T,
        init_fn=diary.init,
        pre_collect_hook=diary.before,
        post_collect_hook=diary.after,
    ) as collector:
        batches = list(collector)
    pages = diary.pages()
    assert len(pages) == way.workers
    assert (str(os.getpid()) in os.listdir(tmp_path)) == (not way.remote)
    for page in pages:
        assert page[:2] == ["init", "env"]
        assert page[2:] == ["before", f"after:{T}"] * (len(page) // 2 - 1)
    assert sum(len(page) // 2 - 1 for page in pages) == 2 * way.workers
    for td in batches:  # changes made by the hook are delivered
        assert (td["next", "reward"] >= 1000.0).all()


class Closing(Diary):
    """A hook with a method `close`."""

    def __call__(self, td: Any) -> None:
        self.write("called")

    def close(self) -> None:
        self.write("closed")


@pytest.mark.processes
def test_a_hook_is_closed_with_its_worker(tmp_path: Path) -> None:
    with collecting(
        MULTI_STACK, one, None, frames=T, post_collect_hook=Closing(tmp_path)
    ) as collector:
        collector.next()
    assert len(Diary(tmp_path).pages()) == MULTI_STACK.workers
    for page in Diary(tmp_path).pages():
        assert page == ["called"] * (len(page) - 1) + ["closed"]


class FailingClose(Closing):
    def close(self) -> None:
        raise OSError("the hook's own")


class NotingEnv(CountingEnv):
    def __init__(self, note: Path) -> None:
        super().__init__()
        self.note = note

    def close(self) -> None:
        self.note.touch()


@pytest.mark.processes
def test_environments_close_also_if_a_hook_does_not(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with collecting(
        MULTI_STACK,
        lambda worker: partial(NotingEnv, tmp_path / f"closed{worker}"),
        None,
        frames=T,
        post_collect_hook=FailingClose(pages),
    ) as collector:
        collector.next()
    assert len(list(tmp_path.glob("closed*"))) == MULTI_STACK.workers


def test_environments_close_also_if_a_trace_cannot_be_saved(tmp_path: Path) -> None:
    collector = SyncDataCollector(
        NotingEnv(tmp_path / "closed"), None, frames_per_batch=T, total_frames=-1
    )
    collector.enable_profile(num_rollouts=5, on_trace_ready=fail)
    collector.next()
    collector.next()
    with pytest.raises(LookupError):
        collector.shutdown()
    assert collector.closed
    assert (tmp_path / "closed").exists()


def fail(td: Any = None) -> None:
    raise LookupError("the hook's own")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("hook", ["pre_collect_hook", "post_collect_hook"])
def test_a_hooks_exception_reaches_the_caller(way: Way, hook: str) -> None:
    with (
        collecting(way, one, None, frames=T, **{hook: fail}) as collector,
        pytest.raises(LookupError, match="the hook's own"),
    ):
        collector.next()


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]], ids=lambda way: way.name)
def test_an_init_fn_that_raises(way: Way) -> None:
    with pytest.raises(LookupError), collecting(way, one, None, frames=T, init_fn=fail):
        pass


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_without_traj_ids(way: Way) -> None:
    arguments: dict[str, Any] = {"frames": T, "track_traj_ids": False}
    with collecting(way, one, parity_policy(), **arguments) as collector:
        assert "collector" not in collector.next()
    with collecting(way, one, parity_policy(), **arguments, track_policy_version=True) as collector:
        assert set(collector.next()["collector"].keys()) == {"policy_version"}
    with collecting(way, one, parity_policy(), **arguments, split_trajs=True) as collector:
        td = collector.next()
    assert set(td["collector"].keys()) == {"mask"}
    assert td["collector", "mask"].sum() == T * (way.workers if way.sync else 1)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_compact_batches_leave_out_the_next_observation(way: Way) -> None:
    kept = {"reward", "done", "terminated", "truncated"}
    batches = []
    for compact in (True, False):
        with collecting(way, one, parity_policy(), frames=T, compact_obs=compact) as collector:
            collector.set_seed(3)
            batches.append([collector.next() for _ in range(2)])
    for compact_td, td in zip(*batches, strict=True):
        assert set(compact_td["next"].keys()) == kept
        assert set(td["next"].keys()) == {*kept, "observation"}
        if way.sync or not way.remote:
            assert (compact_td == td.exclude(("next", "observation"))).all()


class Memory(nn.Module):
    def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> Any:
        return torch.zeros((), dtype=torch.int64), hidden + 1


def test_compact_batches_leave_out_the_next_state() -> None:
    policy = TensorDictModule(Memory(), ["observation", "hidden"], ["action", ("next", "hidden")])
    collector = SyncDataCollector(
        one(0), policy, frames_per_batch=6, compact_obs=True, policy_state={"hidden": (2,)}
    )
    td = collector.next()
    assert ("next", "hidden") not in td.keys(include_nested=True)
    assert td["hidden"][:, 0].tolist() == [0, 1, 2, 0, 0, 1]  # episodes of 3, 1 and 4


@pytest.mark.parametrize(
    "way", marked(STACK, MULTI_STACK, Way("ray async, one", 1, {"prefetch": 0}), central=False)
)
def test_workers_are_updated_within_the_maximum_interval(way: Way) -> None:
    policy = bias_policy()
    with collecting(
        way, one, policy, frames=T, max_weight_update_interval=2, track_policy_version=True
    ) as collector:
        seen = []
        for batch in range(6):
            td = collector.next()
            seen.append((td["bias"].unique().tolist(), td["collector", "policy_version"].max()))
            with torch.no_grad():
                policy.module.bias += 1.0
            if batch == 2:  # a manual update restarts the count
                collector.update_policy_weights_()
    biases = [values for values, _ in seen]
    assert all(len(values) == 1 for values in biases)
    assert [values[0] for values in biases] == [0.0, 0.0, 2.0, 3.0, 3.0, 5.0]
    assert [int(version) for _, version in seen] == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("extend_buffer", [True, False])
def test_a_replay_buffer_takes_the_batches(way: Way, extend_buffer: bool) -> None:
    taken: list[Any] = []
    with collecting(
        way,
        partial(echo_fns, count=2),
        parity_policy(),
        frames=2 * T,
        total_frames=4 * T * way.workers,
        replay_buffer=taken,
        extend_buffer=extend_buffer,
    ) as collector:
        yielded = list(collector)
        assert collector.next() is None
    frames = sum(td.numel() for td in taken)
    assert yielded == [None] * len(yielded)
    assert frames == 4 * T * way.workers == collector.stats()["frames"]
