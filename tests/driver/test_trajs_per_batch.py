"""Batches of whole trajectories: each from start to done, none repeated, losses reported."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_0,
    CAT_TIME,
    IN_PROCESS,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    Way,
    collecting,
    marked,
)
from echo_envs import echo_fns
from envs_for_tests import CountingEnv
from raising import refused, warned
from test_ledger import check

from pycollect import SyncDataCollector

T = 5
N = 4
REMOTE_WAYS = (STACK, CAT_0, CAT_TIME, ASYNC[0], ASYNC[2], MULTI_STACK, MULTI_TIME, MULTI_ASYNC[2])
WAYS = marked(IN_PROCESS, *REMOTE_WAYS)


def one(worker: int) -> Any:
    return echo_fns(worker)[0]


@pytest.mark.parametrize(("entry", "form"), [(one, "padded"), (echo_fns, "cat")])
@pytest.mark.parametrize("way", WAYS)
def test_trajectories_are_complete_and_returned_once(way: Way, form: str, entry: Any) -> None:
    """An episode of length 7 spans rollouts of 5 steps and is cut at 6 by max_frames_per_traj."""

    def envs(worker: int) -> Any:
        made = entry(worker)
        if isinstance(made, list):
            return [partial(CountingEnv, 10 * worker + p, (3, 7, 1)) for p in range(3)]
        return partial(CountingEnv, 10 * worker, (3, 7, 1))

    seen: list[tuple[int, int]] = []
    with collecting(
        way,
        envs,
        frames=3 * T,
        total_frames=150,
        trajs_per_batch=N,
        traj_format=form,
        max_frames_per_traj=6,
    ) as collector:
        for index, td in enumerate(collector):
            for at, trajectory in enumerate(split(td, form)):
                ids = trajectory["collector", "traj_ids"]
                assert ids.unique().tolist() == [index * N + at]
                number, episode = trajectory["observation"][0, :2].tolist()
                seen.append((int(number), int(episode)))
                length = min((3, 7, 1)[int(episode) % 3], 6)
                assert trajectory["observation"][:, 2].tolist() == list(range(length))
                assert trajectory["next", "done"].flatten().tolist() == [False] * (length - 1) + [
                    True
                ]
            assert check(collector.ledger())["delivered"] == collector.stats()["frames"]
        total = check(collector.ledger())
    held_at_the_end = total["reasons"].get("incomplete", 0)
    assert total["delivered"] + held_at_the_end >= 150
    assert total["in_flight"] == 0
    assert set(total["reasons"]) <= {"incomplete"}
    assert len(set(seen)) == len(seen) == N * collector.stats()["batches"]


def split(td: Any, form: str) -> list[Any]:
    if form == "padded":
        assert td.shape[0] == N
        assert td.ndim == 2
        return [row[mask] for row, mask in zip(td, td["collector", "mask"], strict=True)]
    assert td.ndim == 1
    ids = td["collector", "traj_ids"]
    return [td[ids == i] for i in ids.unique().tolist()]


def test_episodes_without_a_bound_are_warned_about() -> None:
    """Unfinished episodes are held in memory, for at most `total_frames` frames."""
    with warned("trajs_per_batch") as caught:
        collector = SyncDataCollector(
            partial(CountingEnv, 0, (1000,)),
            None,
            frames_per_batch=T,
            total_frames=4 * T,
            trajs_per_batch=2,
        )
    assert len(caught) == 1
    assert list(collector) == []
    assert check(collector.ledger())["reasons"] == {"incomplete": 4 * T}
    collector.shutdown()


def test_time_limits_are_known() -> None:
    for make in (
        lambda: gymnasium.make("CartPole-v1"),
        [lambda: gymnasium.make("CartPole-v1")] * 2,
        lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"),
        lambda: gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point"),
    ):
        collector = SyncDataCollector(make, None, frames_per_batch=20, trajs_per_batch=2)
        assert collector.next().shape[0] == 2
        with refused(TypeError, "trajs_per_batch"):
            len(collector)
        collector.shutdown()


def test_resets_at_each_batch_cut_them() -> None:
    with SyncDataCollector(
        CountingEnv,
        None,
        frames_per_batch=T,
        total_frames=4 * T,
        trajs_per_batch=2,
        max_frames_per_traj=3,
        reset_at_each_iter=True,
    ) as collector:
        shapes = [collector.next().shape]
        # The second rollout cut the open trajectories of the first; its new ones are still open.
        assert check(collector.ledger())["reasons"] == {"incomplete": T - 3}
        shapes += [td.shape for td in collector]
        total = check(collector.ledger())
    assert shapes == [(2, 3)] * 2
    assert (total["delivered"], total["reasons"]) == (4 * 3, {"incomplete": 4 * (T - 3)})


@pytest.mark.parametrize("way", marked(IN_PROCESS, STACK, MULTI_STACK, central=False))
def test_waiting_frames_are_in_flight_and_lost_with_a_reason(way: Way) -> None:
    with collecting(
        way, one, frames=T, trajs_per_batch=2, max_frames_per_traj=20, split_trajs=True
    ) as collector:
        collector.next()
        waiting = check(collector.ledger())["in_flight"]
        collector.set_seed(3)
        total = check(collector.ledger())
        assert total["in_flight"] == 0
        assert total["reasons"].get("set_seed", 0) == waiting
        state = collector.next(), collector.state_dict()
        first_id = int(state[0]["collector", "traj_ids"].max()) + 1
        collector.load_state_dict(state[1])
        ids = collector.next()["collector", "traj_ids"]
        assert ids[ids >= 0].min() == first_id


@pytest.mark.filterwarnings("ignore:from the next batch on")
@pytest.mark.parametrize("way", [MULTI_AHEAD, MULTI_ASYNC[0]], ids=lambda way: way.name)
def test_the_last_rollout_of_a_removed_worker_completes_its_trajectories(way: Way) -> None:
    """An episode of length 7 spans two rollouts; the worker leaves after the first."""
    with collecting(
        way,
        lambda worker: partial(CountingEnv, worker, (7,)),
        frames=T,
        total_frames=60,
        trajs_per_batch=1,
        max_frames_per_traj=10,
    ) as collector:
        numbers = []
        for td in collector:
            number, _, _ = td["observation"][0, 0].tolist()
            assert td["observation"][0, :, 2].tolist() == list(range(7))
            if not numbers:
                collector.remove_collectors(1 - int(number))
            numbers.append(int(number))
        if way.sync:  # async, its only rollout may be shorter than an episode
            assert 1 - numbers[0] in numbers
        assert check(collector.ledger())["in_flight"] == 0


def test_a_vector_env_that_skips_cells() -> None:
    from echo_envs import foreign_vector

    env = foreign_vector(0, ignores_mask=True)
    env.spec = gymnasium.envs.registration.EnvSpec("Foreign-v0", max_episode_steps=10)
    collector = SyncDataCollector(env, None, frames_per_batch=3 * T, trajs_per_batch=3)
    for _ in range(3):
        td = collector.next()
        lengths = td["collector", "mask"].sum(-1)
        last = td["next", "done"][torch.arange(3), lengths - 1]
        assert last.all()
        check(collector.ledger())
    collector.shutdown()


@pytest.mark.parametrize("form", ["padded", "cat"])
def test_set_truncated_completes_a_trajectory(form: str) -> None:
    """The rest of the episode of length 7 is another trajectory, but the same episode."""
    with SyncDataCollector(
        partial(CountingEnv, 0, (7,)),
        None,
        frames_per_batch=T,
        total_frames=2 * T,
        trajs_per_batch=1,
        traj_format=form,
        max_frames_per_traj=20,
        set_truncated=True,
    ) as collector:
        parts = [td.reshape(-1) for td in collector]
        assert check(collector.ledger())["delivered"] == 2 * T
        assert collector.stats()["episodes"] == 1
    assert [part["observation"][:, 2].tolist() for part in parts] == [
        [0, 1, 2, 3, 4],
        [5, 6],
        [0, 1, 2],
    ]
    assert [part["collector", "traj_ids"].unique().tolist() for part in parts] == [[0], [1], [2]]
    ends = [part["next", "truncated"].flatten()[-1].item() for part in parts]
    assert ends == [True, False, True]
    assert all(part["next", "done"].flatten()[-1] for part in parts)


def test_nothing_is_collected_after_the_end() -> None:
    """Frames lost at the end are not collected again by a further call."""
    with SyncDataCollector(
        partial(CountingEnv, 0, (3,)),
        None,
        frames_per_batch=T,
        total_frames=4 * T,
        trajs_per_batch=N,
        max_frames_per_traj=20,
    ) as collector:
        assert len(list(collector)) == 1
        total = check(collector.ledger())
        assert (total["issued"], total["delivered"]) == (4 * T, 12)
        assert list(collector) == []
        assert collector.stats()["completed"]
        assert check(collector.ledger()) == total


@pytest.mark.parametrize("name", ["load_state_dict", "set_seed", "reset"])
def test_frames_that_are_dropped_are_collected_again(name: str) -> None:
    """The second rollout ends within the second episode of 7 steps, so 3 frames are dropped."""
    with SyncDataCollector(
        partial(CountingEnv, 0, (7,)),
        None,
        frames_per_batch=T,
        total_frames=6 * T,
        trajs_per_batch=1,
        max_frames_per_traj=20,
    ) as collector:
        collector.next()
        calls = {"load_state_dict": (collector.state_dict(),), "set_seed": (0,), "reset": ()}
        getattr(collector, name)(*calls[name])
        assert check(collector.ledger())["reasons"] == {name: 3}
        list(collector)
        total = check(collector.ledger())
    assert total["issued"] == 7 + 3 + 5 * T
    assert total["issued"] - total["reasons"][name] >= 6 * T
