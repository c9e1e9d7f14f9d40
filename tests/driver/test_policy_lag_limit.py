"""max_policy_lag: no delivered frame is older than this many policy versions."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from collect_support import (
    ASYNC,
    CENTRAL,
    CENTRAL_ASYNC,
    MULTI_AHEAD,
    MULTI_ASYNC,
    Way,
    bias_policy,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import GateEnv, wait_until
from envs_for_tests import CountingEnv
from hypothesis import given
from hypothesis import strategies as st
from raising import refused, warned
from tensordict.nn import TensorDictModule
from test_ledger import check

from pycollect import AsyncBatchedCollector, MultiaSyncDataCollector, SyncDataCollector
from pycollect.data.weights import PolicyVersion
from pycollect.driver import stream
from pycollect.driver.pace import PolicyLagLimit

T = 5
VERSION = ("collector", "policy_version")
IDS = ("collector", "traj_ids")
FOUR = Way("multi async of four", 4, {"prefetch": 2})
FOUR_CENTRAL = Way("multi async central of four", 4, {"prefetch": 2, "inference": "central"})
WAYS = marked(MULTI_ASYNC[0], MULTI_ASYNC[2], ASYNC[0], ASYNC[2], MULTI_AHEAD)


class JitterEnv(CountingEnv):
    """An environment with steps of random duration: usually zero, sometimes long."""

    def step(self, action: Any) -> Any:
        chance = random.random()
        time.sleep(0.02 if chance < 0.02 else 0.001 * chance)
        return super().step(action)


class UpdatingEnv(CountingEnv):
    """Update the collector's policy in the third step, as a learner in another thread may."""

    collector: Any = None

    def step(self, action: Any) -> Any:
        if len(self.actions) == 2:
            self.collector.update_policy_weights_()
            self.collector.update_policy_weights_()
        return super().step(action)


class Buffer(list[Any]):
    """A buffer that keeps whole batches."""

    def extend(self, td: Any) -> None:
        self.append(td)


def jitter(worker: int) -> Any:
    return partial(JitterEnv, 10 * worker, 7)


def endless(worker: int) -> Any:
    return partial(CountingEnv, 10 * worker, 9_000)


def lag_of(collector: Any, batch: Any) -> int:
    """Return the policy lag of the oldest frame of a batch."""
    return collector.policy_version - int(batch[VERSION].min())


def kill_one(collector: Any) -> None:
    worker = random.choice([*collector.stats()["workers"].values()])
    with suppress(ProcessLookupError):  # the worker may already be dead
        os.kill(worker["pid"], signal.SIGKILL)


def check_counts(collector: Any) -> dict[str, Any]:
    """Check the ledger and the lags in `stats()`; return the ledger's total."""
    stats, total = collector.stats(), check(collector.ledger())
    assert sum(stats["policy_lag"].values()) == stats["frames"] == total["delivered"]
    return total


# The rule


@given(
    limit=st.integers(1, 6),
    workers=st.integers(1, 6),
    depth=st.integers(1, 3),
    every=st.integers(1, 10),
    rng=st.randoms(use_true_random=False),
)
def test_at_a_steady_pace_no_rollout_is_too_old(
    limit: int, workers: int, depth: int, every: int, rng: random.Random
) -> None:
    lags, lost = simulate(limit, workers, depth, [(every, 1)] * 30, rng)
    assert not lost
    assert max(lags) <= limit


@given(
    limit=st.integers(0, 6),
    workers=st.integers(1, 6),
    depth=st.integers(1, 3),
    pace=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=30),
    rng=st.randoms(use_true_random=False),
)
def test_at_any_pace_batches_come_and_few_are_lost(
    limit: int, workers: int, depth: int, pace: list[tuple[int, int]], rng: random.Random
) -> None:
    lags, lost = simulate(limit, workers, depth, pace, rng)
    assert max(lags) <= limit
    assert len(lags) == sum(batches for batches, _ in pace)
    assert lost <= workers * depth * len(pace)


def simulate(
    limit: int, workers: int, depth: int, pace: list[tuple[int, int]], rng: random.Random
) -> tuple[list[int], int]:
    """Return the lags of batches in random order, and the number of dropped batches.

    Args:
        pace: Number of batches before each update, and of versions per update.
    """
    version = PolicyVersion()
    rule = PolicyLagLimit(limit, version)
    requested: list[int] = []
    lags, lost = [], 0
    for batches, versions in pace:
        for _ in range(batches):
            while True:
                rule.look()
                while len(requested) < workers * depth and rule.may_start(requested, True, workers):
                    requested.append(version.number)
                newest = rule.most_recent_due(requested)
                due = [own for own in requested if newest is None or own <= newest]
                own = rng.choice(due)
                requested.remove(own)
                if version.lag(own) <= limit:
                    break
                lost += 1
            lags.append(version.lag(own))
            rule.delivered()
            while len(requested) < workers * depth and rule.may_start(requested, False, workers):
                requested.append(version.number)
        version.number += versions
    return lags, lost


# Collectors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [0, 1])
def test_no_frame_is_older(way: Way, limit: int) -> None:
    options: dict[str, Any] = {"max_policy_lag": limit, "track_policy_version": True}
    with collecting(way, jitter, bias_policy(), frames=T, **options) as collector:
        for _ in range(20):
            assert lag_of(collector, collector.next()) <= limit
            collector.update_policy_weights_()
        assert max(collector.stats()["policy_lag"]) <= limit
        assert not check_counts(collector)["lost"]
        if way.workers <= limit + 1:
            assert max(collector.stats()["policy_lag"]) == limit  # the rollouts of workers overlap


@pytest.mark.processes
@pytest.mark.parametrize("way", [FOUR, CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_random_actions_have_the_newest_version(way: Way) -> None:
    """Else the first frames would all be too old, and `next()` would collect without an end."""
    options = {"max_policy_lag": 0, "track_policy_version": True, "init_random_frames": 1_000}
    with collecting(way, endless, bias_policy(), frames=T, **options) as collector:
        for _ in range(5):
            assert lag_of(collector, collector.next()) == 0
            collector.update_policy_weights_()
        assert not check_counts(collector)["lost"]


def stormy(way: Way, batches: int, kill_every: int, **options: Any) -> dict[str, Any]:
    """Collect with updates after each batch, random delays and kills; return the ledger's total."""
    options |= {"max_policy_lag": 1, "track_policy_version": True, "max_worker_restarts": batches}
    with collecting(way, jitter, bias_policy(), frames=T, **options) as collector:
        for number in range(1, batches + 1):
            assert lag_of(collector, collector.next()) <= 1
            collector.update_policy_weights_()
            if number % kill_every == 0:
                kill_one(collector)
        assert set(collector.stats()["policy_lag"]) == {0, 1}
        total = check_counts(collector)
        assert total["reasons"].keys() <= {"worker_died", "max_policy_lag"}
        # An update may reach an inference server just as it begins to serve a worker.
        most = max(T, batches * T // 100) if "inference" in way.arguments else 0
        assert total["reasons"].get("max_policy_lag", 0) <= most
        return total


@pytest.mark.processes(usual=1)
@pytest.mark.parametrize("way", [FOUR, FOUR_CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_no_frame_is_older_while_workers_die(way: Way) -> None:
    assert stormy(way, 60, 20)["delivered"] == 60 * T


@pytest.mark.slow
@pytest.mark.processes(usual=3)
@pytest.mark.parametrize("way", [FOUR, FOUR_CENTRAL], ids=lambda way: way.name)
def test_a_thousand_batches_while_workers_die(way: Way) -> None:
    assert stormy(way, 1_000, 25)["lost"] > 0


@pytest.mark.slow
@pytest.mark.ray
def test_actors_that_die() -> None:
    stormy(ASYNC[2], 30, 10)


@pytest.mark.processes
@pytest.mark.parametrize("limit", [0, 1])
def test_a_learner_that_never_updates_gets_batches(limit: int) -> None:
    with collecting(FOUR, endless, bias_policy(), frames=T, max_policy_lag=limit) as collector:
        for _ in range(40):
            collector.next()
        assert collector.stats()["policy_lag"] == {0: 40 * T}
        assert check_counts(collector)["lost"] == 0
        assert all(own["frames"] for own in collector.stats()["workers"].values())


@pytest.mark.processes
@pytest.mark.parametrize("way", [FOUR, FOUR_CENTRAL], ids=lambda way: way.name)
@pytest.mark.parametrize("limit", [0, 1, 4])
def test_a_learner_with_more_updates_than_batches(way: Way, limit: int) -> None:
    options: dict[str, Any] = {"max_policy_lag": limit, "track_policy_version": True}
    with collecting(way, endless, bias_policy(), frames=T, **options) as collector:
        for _ in range(30):
            assert lag_of(collector, collector.next()) <= limit
            for _ in range(3):
                collector.update_policy_weights_()
        total = check_counts(collector)
        assert total["reasons"].keys() <= {"max_policy_lag"}
        assert total["lost"] <= 12 * T  # before the pace of the learner was known


@pytest.mark.processes
def test_workers_share_the_frames_that_may_be_collected_ahead() -> None:
    with collecting(FOUR, endless, bias_policy(), frames=T, max_policy_lag=1) as collector:
        for _ in range(40):
            collector.next()
            collector.update_policy_weights_()
        frames = [own["frames"] for own in collector.stats()["workers"].values()]
        assert min(frames) > 0.8 * max(frames)


@pytest.mark.processes
def test_workers_collect_at_once_for_a_learner_that_takes_several_batches() -> None:
    """With an update every four batches, a lag of 1 lets four workers run at the same time."""
    with collecting(FOUR, endless, bias_policy(), frames=T, max_policy_lag=1) as collector:
        for number in range(1, 49):
            collector.next()
            if number % 4 == 0:
                collector.update_policy_weights_()
            if number > 8:
                assert collector.ledger()["total"]["in_flight"] >= 3 * T
        assert check_counts(collector)["lost"] == 0


@pytest.mark.processes
def test_a_rollout_that_became_too_old_is_dropped_and_its_trajectory_ends(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = partial(GateEnv, gate, 4 * T + 2, length=9_000)
    options: dict[str, Any] = {"max_policy_lag": 1, "track_policy_version": True}
    with MultiaSyncDataCollector([env], bias_policy(), frames_per_batch=T, **options) as collector:
        for _ in range(4):
            before = collector.next()
        wait_until(gate.with_suffix(".reached").exists)
        for _ in range(2):
            collector.update_policy_weights_()
        gate.touch()
        after = collector.next()
        assert lag_of(collector, after) == 0
        assert check_counts(collector)["reasons"] == {"max_policy_lag": T}
        missing = after["observation"][0, 2] - before["next", "observation"][-1, 2]
        assert int(missing) == T  # the length of one rollout
        assert set(after[IDS].tolist()).isdisjoint(before[IDS].tolist())


def test_in_process_a_rollout_that_updates_overtake_is_dropped() -> None:
    env = UpdatingEnv(length=9_000)
    buffer = Buffer()
    with SyncDataCollector(
        env, parity_policy(), frames_per_batch=T, max_policy_lag=1, replay_buffer=buffer
    ) as collector:
        env.collector = collector
        collector.next()
        assert check_counts(collector)["reasons"] == {"max_policy_lag": T}
        assert buffer[0]["observation"][:, 1:].tolist() == [[1, step] for step in range(T)]
        assert set(buffer[0][IDS].tolist()) == {1}


def test_a_rollout_that_updates_overtake_before_it_is_written_is_dropped() -> None:
    buffer = Buffer()
    updates = iter([2, 1])

    def update(td: Any) -> Any:
        for _ in range(next(updates)):
            collector.update_policy_weights_()
        return td

    with SyncDataCollector(
        CountingEnv(length=9_000),
        parity_policy(),
        frames_per_batch=T,
        max_policy_lag=1,
        replay_buffer=buffer,
        postproc=update,
    ) as collector:
        collector.next()
        collector.next()
        assert check_counts(collector)["reasons"] == {"max_policy_lag": T}
        assert collector.stats()["policy_lag"] == {1: T}
        assert [set(written[IDS].tolist()) for written in buffer] == [{1}]


def test_an_interrupted_batch_is_dropped_if_it_became_too_old() -> None:
    with SyncDataCollector(
        CountingEnv(length=9_000), parity_policy(), frames_per_batch=T, max_policy_lag=0
    ) as collector:
        with (
            mock.patch.object(stream, "assemble", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            collector.next()
        assert collector.ledger()["total"]["in_flight"] == T
        collector.update_policy_weights_()
        assert collector.next()["observation"][0, 1:].tolist() == [1, 0]
        assert check_counts(collector)["reasons"] == {"max_policy_lag": T}


def test_a_collector_without_fresh_enough_frames_raises() -> None:
    class Hasty(CountingEnv):
        collector: Any = None

        def step(self, action: Any) -> Any:
            if len(self.actions) < 20 * T:
                self.collector.update_policy_weights_()
            return super().step(action)

    env = Hasty(length=9_000)
    with SyncDataCollector(
        env, parity_policy(), frames_per_batch=T, max_policy_lag=1
    ) as env.collector:
        with warned("max_policy_lag"):
            env.collector.next()
        assert check_counts(env.collector)["lost"] == 20 * T


@pytest.mark.processes
@pytest.mark.parametrize("options", [{"update_after_each_batch": True}, {}], ids=["each", "every"])
def test_automatic_updates_go_to_all_workers(options: dict[str, Any]) -> None:
    options = options or {"max_weight_update_interval": 1}
    policy = bias_policy()
    with collecting(
        FOUR, endless, policy, frames=T, max_policy_lag=1, track_policy_version=True, **options
    ) as collector:
        for number in range(20):
            assert lag_of(collector, collector.next()) <= 1
            with torch.no_grad():
                policy.module.bias.fill_(number)
        assert check_counts(collector)["lost"] == 0
        assert collector.policy_version > 5


@pytest.mark.processes
def test_workers_can_be_added_and_removed() -> None:
    options: dict[str, Any] = {"max_policy_lag": 1, "track_policy_version": True}
    with collecting(MULTI_ASYNC[2], endless, bias_policy(), frames=T, **options) as collector:
        for number in range(30):
            assert lag_of(collector, collector.next()) <= 1
            collector.update_policy_weights_()
            if number == 10:
                assert collector.add_collectors(partial(CountingEnv, 20, 9_000)) == [2]
            if number == 20:
                collector.remove_collectors(0)
        assert check_counts(collector)["lost"] == 0
        assert collector.stats()["workers"][2]["frames"]


@pytest.mark.processes
def test_a_run_that_is_resumed() -> None:
    options: dict[str, Any] = {"max_policy_lag": 1, "track_policy_version": True}
    with collecting(MULTI_ASYNC[2], endless, bias_policy(), frames=T, **options) as collector:
        for _ in range(5):
            collector.next()
            collector.update_policy_weights_()
        state = collector.state_dict()
    with collecting(MULTI_ASYNC[2], endless, bias_policy(), frames=T, **options) as collector:
        collector.load_state_dict(state)
        for _ in range(10):
            assert lag_of(collector, collector.next()) <= 1
            collector.update_policy_weights_()
        assert check(collector.ledger())["lost"] == 0


@pytest.mark.processes
def test_a_version_that_starts_above_zero() -> None:
    class Tracker:
        version = 7

        def increment_version(self) -> None:
            self.version += 1

    options: dict[str, Any] = {"max_policy_lag": 0, "track_policy_version": Tracker()}
    with collecting(MULTI_ASYNC[2], endless, bias_policy(), frames=T, **options) as collector:
        for _ in range(5):
            collector.next()
            collector.update_policy_weights_()
        assert collector.policy_version == 12
        assert check_counts(collector)["lost"] == 0


@pytest.mark.processes
def test_batches_of_several_rollouts() -> None:
    net = torch.nn.Linear(3, 2)
    policy = TensorDictModule(lambda x: net(x).argmax(-1), ["observation"], ["action"])
    with AsyncBatchedCollector(
        [jitter(worker) for worker in range(3)],
        policy=policy,
        frames_per_batch=4 * T,
        transition_chunk_size=T,
        max_policy_lag=1,
    ) as collector:
        for _ in range(10):
            batch = collector.next()
            assert collector.policy_version - int(batch["policy_version"].min()) <= 1
            collector.update_policy_weights_()
        assert check_counts(collector)["lost"] == 0


@pytest.mark.processes
def test_in_the_background() -> None:
    buffer = Buffer()
    options: dict[str, Any] = {"max_policy_lag": 3, "track_policy_version": True}
    with collecting(
        FOUR, jitter, bias_policy(), frames=T, replay_buffer=buffer, **options
    ) as collector:
        collector.start()
        for _ in range(100):
            collector.update_policy_weights_()
            time.sleep(0.005)
        with collector.pause():
            assert max(collector.stats()["policy_lag"], default=0) <= 3
            assert check_counts(collector)["reasons"].keys() <= {"max_policy_lag"}
        wait_until(lambda: len(buffer) > 10)


# Errors


@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_invalid_limits(value: Any) -> None:
    with refused((TypeError, ValueError), "max_policy_lag"):
        SyncDataCollector(CountingEnv, None, frames_per_batch=T, max_policy_lag=value)


def test_trajectories_wait_for_their_end() -> None:
    with refused(ValueError, "max_policy_lag"):
        SyncDataCollector(
            CountingEnv, None, frames_per_batch=T, max_policy_lag=1, trajs_per_batch=1
        )


@pytest.mark.processes
def test_updates_of_some_workers_are_refused() -> None:
    with collecting(
        MULTI_ASYNC[2], endless, bias_policy(), frames=T, max_policy_lag=1
    ) as collector:
        with refused(ValueError, "worker_ids"):
            collector.update_policy_weights_(worker_ids=0)
        with refused(ValueError, "worker_ids"):
            collector.update_policy_weights_({1: bias_policy().state_dict()})
        with refused(ValueError, "worker_ids"):
            collector.pipes[0].send((bias_policy().state_dict(), "update"))
        with refused(RuntimeError, "max_policy_lag"):
            collector.increment_version()
        collector.update_policy_weights_(worker_ids=[0, 1])
        collector.next()


@pytest.mark.processes
def test_a_policy_that_is_called_here() -> None:
    with collecting(CENTRAL, endless, bias_policy(), frames=T, max_policy_lag=0) as collector:
        for _ in range(5):
            collector.next()
            collector.update_policy_weights_()
        assert check_counts(collector)["lost"] == 0
