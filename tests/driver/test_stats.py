"""Counts and timings in a collector's stats."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_0,
    MULTI_ASYNC,
    STACK,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import ENTRIES
from envs_for_tests import CountingEnv

from pycollect import SyncDataCollector

T = 6
WAYS = [IN_PROCESS, *marked(STACK, ASYNC[2], MULTI_0, MULTI_ASYNC[2])]


@pytest.mark.processes
def test_stats_answer_while_workers_cannot() -> None:
    with collecting(MULTI_ASYNC[2], lambda w: CountingEnv, frames=T) as collector:
        collector.next()
        workers = [own["pid"] for own in collector.stats()["workers"].values()]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            stats = collector.stats("both")
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        assert stats["workers_alive"] == len(workers)
        assert stats["stepped_frames"] == T
        assert collector.next().numel() == T


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_stats(way: Way) -> None:
    """Episodes have 4 steps and a return of 1 + 2 + 3 + 4 = 10."""

    def entry(worker: int) -> Any:
        return [partial(CountingEnv, 10 * worker + p, length=4) for p in range(2)]

    batch = 2 * T * (way.workers if way.sync else 1)
    with collecting(way, entry, frames=2 * T, total_frames=6 * batch) as collector:
        before = collector.stats()
        assert (before["frames"], before["batches"], before["episodes"]) == (0, 0, 0)
        assert before["episode_return"] is None
        assert before["episode_length"] is None
        batches = list(collector)
        stats = collector.stats()
    assert stats["batches"] == len(batches) == 6
    assert stats["frames"] == stats["frames_stepped"] == 6 * batch
    assert stats["episodes"] == sum(int(td["next", "done"].sum()) for td in batches)
    assert (stats["episode_return"], stats["episode_length"]) == (10.0, 4.0)
    assert not any(stats["slow_paths"].values())
    assert stats["frames_per_second"] > 0
    check_workers(stats["workers"], way, 6 * batch)
    phases = {"assemble", "deliver", "user"}
    phases |= {"idle", "transport"} if way.remote else {"env", "policy", "record"}
    assert stats["seconds"].keys() == phases | {"elapsed"}
    check_seconds(stats["seconds"], phases)
    assert json.loads(json.dumps(stats))["frames"] == 6 * batch


def check_workers(workers: dict[int, Any], way: Way, frames: int) -> None:
    assert list(workers) == list(range(way.workers))
    assert sum(worker["frames"] for worker in workers.values()) == frames
    pids = {worker["pid"] for worker in workers.values()}
    assert len(pids) == way.workers
    if way.remote:
        assert os.getpid() not in pids
        assert {worker["transport"] for worker in workers.values()} == {way.transport}
    else:
        assert pids == {os.getpid()}
        assert psutil.pid_exists(os.getpid())
    for worker in workers.values():
        assert worker["seconds"].keys() == {"env", "policy", "record", "idle"}
        assert all(seconds >= 0 for seconds in worker["seconds"].values())
        assert worker["node"] == socket.gethostname()
        assert (worker["version"], worker["restarts"]) == (0, 0)


def check_seconds(seconds: dict[str, float], phases: set[str]) -> None:
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds[phase] for phase in phases) <= seconds["elapsed"] + 0.01


def test_the_seconds_add_up_to_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of CPU time does not count the time in which other programs use the CPU."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    with collecting(IN_PROCESS, lambda w: CountingEnv, parity_policy(), frames=1000) as collector:
        for _ in range(10):
            collector.next()
        seconds = collector.stats()["seconds"]
    elapsed = seconds.pop("elapsed")
    assert 0.95 * elapsed <= sum(seconds.values()) <= elapsed


def test_the_callers_time_is_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """User time includes the time after an exception and since the newest batch."""
    now = 0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("pycollect.driver.accounts.time", clock)

    def refuse_the_second(td: Any) -> Any:
        nonlocal now
        now += 1
        if collector.stats()["batches"] == 2:
            raise KeyError("no")
        return td

    collector = SyncDataCollector(
        CountingEnv, None, frames_per_batch=10, postproc=refuse_the_second
    )
    collector.next()
    now += 10
    with pytest.raises(KeyError):
        collector.next()
    now += 100
    collector.next()
    now += 1000
    seconds = collector.stats()["seconds"]
    assert (seconds["deliver"], seconds["user"], seconds["elapsed"]) == (3, 1110, 1113)
    collector.shutdown()


def test_stats_show_a_slow_env() -> None:
    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            sum(range(20_000))
            return super().step(action)

    with collecting(IN_PROCESS, lambda w: Slow, parity_policy(), frames=300) as collector:
        collector.next()
        seconds = collector.stats()["seconds"]
    assert seconds["env"] > seconds["policy"] + seconds["record"]


def test_episodes_cut_by_the_collector_count() -> None:
    with collecting(
        IN_PROCESS, lambda w: CountingEnv, frames=9, max_frames_per_traj=3
    ) as collector:
        collector.next()
        stats = collector.stats()
    assert (stats["episodes"], stats["episode_length"], stats["episode_return"]) == (3, 3, 6)


def test_trajectories_cut_by_a_reset_do_not_count() -> None:
    entry = partial(CountingEnv, length=4)
    with collecting(IN_PROCESS, lambda w: entry, frames=6, reset_at_each_iter=True) as collector:
        for _ in range(3):
            collector.next()
        collector.set_seed(1)
        stats = collector.stats()
    assert (stats["episodes"], stats["episode_length"]) == (3, 4)


def test_an_episode_over_several_batches() -> None:
    with collecting(IN_PROCESS, lambda w: CountingEnv, frames=2) as collector:
        for _ in range(5):
            collector.next()
        stats = collector.stats()
    assert (stats["episodes"], stats["episode_length"], stats["episode_return"]) == (2, 5, 15)


def test_the_last_hundred_episodes() -> None:
    entry = partial(CountingEnv, length=[1] * 50 + [3] * 100)
    with collecting(IN_PROCESS, lambda w: entry, frames=350) as collector:
        collector.next()
        stats = collector.stats()
    assert (stats["episodes"], stats["episode_length"]) == (150, 3)


def test_dummies_do_not_count_as_frames() -> None:
    with collecting(IN_PROCESS, ENTRIES["ignores masks"], parity_policy(), frames=21) as collector:
        td = collector.next()
        stats = collector.stats()
    assert stats["frames"] == stats["frames_stepped"] == int(td["collector", "mask"].sum()) < 21


def test_slow_paths() -> None:
    def act(td: Any) -> Any:
        return td.set("action", (td["observation"][..., 2] % 2).long())

    with collecting(IN_PROCESS, ENTRIES["one"], act, frames=4) as collector:
        collector.next()
        assert collector.stats()["slow_paths"] == {
            "policy_tensordict": 1,
            "env_tensordict": 0,
            "extras": 0,
        }
