"""Replacement of dead workers, and reports of the lost frames."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    MULTI_0,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    NEST_STACK,
    ON_REQUEST,
    REMOTELY,
    STACK,
    Way,
    bias_policy,
    collecting,
    is_gone,
    marked,
    parity_policy,
)
from echo_envs import EchoEnv, GateEnv, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError
from raising import raised
from test_ledger import check

from pycollect import MultiSyncDataCollector, WorkerError

T = 5
AHEAD = Way("ray sync ahead", 2, {"sync": True, "prefetch": 1})
WAYS = marked(STACK, AHEAD, ASYNC[0], ASYNC[2], MULTI_0, MULTI_AHEAD, MULTI_ASYNC[2], NEST_STACK)


def kill(collector: Any, worker: int) -> None:
    pid = collector.stats()["workers"][worker]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))


def endless(worker: int) -> Any:
    return partial(EchoEnv, 10 * worker, (4,))


def check_ledger(collector: Any) -> dict[str, Any]:
    ledger: dict[str, Any] = collector.ledger()
    check(ledger)
    return ledger


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_worker_is_replaced_and_no_frame_is_repeated(way: Way) -> None:
    batches = 8
    total = batches * T * (2 if way.sync else 1)
    with collecting(way, endless, parity_policy(), frames=T, total_frames=total) as collector:
        ids, per_worker = [], {0: 0, 1: 0}
        for index, td in enumerate(collector):
            ids.append(td["collector", "traj_ids"].flatten())
            for number in td["observation"][..., 0].flatten().tolist():
                per_worker[number // 10] += 1
            if index == 2:
                kill(collector, 1)
        ledger = check_ledger(collector)
        stats = collector.stats()
    assert sum(per_worker.values()) == total == ledger["total"]["delivered"]
    assert {w: account["delivered"] for w, account in ledger["workers"].items()} == per_worker
    assert torch.cat(ids).unique().tolist() == list(range(int(torch.cat(ids).max()) + 1))
    lost = ledger["total"]["reasons"]
    if way.sync:
        assert set(lost) <= {"worker_died"}
        assert stats["workers"][1]["restarts"] == 1
        assert per_worker[0] == per_worker[1]


@pytest.mark.processes
def test_stats_report_why_a_worker_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with collecting(MULTI_STACK, endless, parity_policy(), frames=T) as collector:
        collector.next()
        kill(collector, 1)
        for _ in range(3):
            collector.next()
        workers = collector.stats()["workers"]
    assert workers[0]["failure"] is None
    assert workers[1]["failure"].startswith("worker_died: ")
    assert "SIGKILL" in workers[1]["failure"]
    (record,) = [record for record in caplog.records if record.name.startswith("pyco")]
    line = record.getMessage()
    # a traceback would keep the error's frames
    assert not any(isinstance(arg, BaseException) for arg in record.args or ())
    assert "worker 1" in line
    assert "in flight" in line


@pytest.mark.parametrize("way", marked(STACK, MULTI_STACK))
@pytest.mark.parametrize("act", ["set_seed", "reset"])
def test_a_death_noticed_only_by_set_seed_or_reset(way: Way, act: str) -> None:
    with collecting(way, endless, parity_policy(), frames=T) as collector:
        collector.set_seed(1)
        ids = [collector.next()["collector", "traj_ids"]]
        kill(collector, 1)
        collector.set_seed(3) if act == "set_seed" else collector.reset()
        ids += [collector.next()["collector", "traj_ids"] for _ in range(2)]
        check_ledger(collector)
        assert collector.stats()["workers"][1]["restarts"] == 1
    every = torch.stack(ids)
    assert every.unique().tolist() == list(range(int(every.max()) + 1))


@pytest.mark.parametrize("way", marked(STACK, MULTI_STACK))
def test_an_unfinished_rollout_of_a_dead_worker_is_requested_again(
    way: Way, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        return partial(GateEnv, gate, T + 3, number=10, length=(4,)) if worker else endless(0)

    with collecting(way, entry, parity_policy(), frames=T, total_frames=4 * 2 * T) as collector:
        collector.next()
        pid = collector.stats()["workers"][1]["pid"]
        killer = killing_when(gate.with_suffix(".reached"), pid, then=gate)
        batches = list(collector)
        killer.join()
        ledger = check_ledger(collector)
    assert ledger["workers"][1]["reasons"] == {"worker_died": T}
    assert ledger["total"]["delivered"] == 4 * 2 * T
    assert [td.shape for td in batches] == [(2, T)] * 3
    # The frames after the death begin with an episode of the new env.
    assert batches[0]["observation"][1, 0, 2] == 0


@pytest.mark.processes(usual=2)
def test_a_call_does_not_wait_for_a_dead_worker_with_queued_rollouts() -> None:
    """With a smaller share, a worker is rounds ahead, so the driver does not wait for it."""
    with MultiSyncDataCollector(
        [endless(0), endless(1)],
        parity_policy(),
        frames_per_batch=[1, 3],
        total_frames=40,
        prefetch=4,
        inference="central",
    ) as collector:
        collector.next()
        kill(collector, 0)
        assert sum(td["collector", "mask"].sum().item() for td in collector) == 36
        assert collector.stats()["workers"][0]["restarts"] == 1
        check(collector.ledger())


def killing_when(reached: Path, pid: int, then: Path) -> Any:
    """Start a thread that kills a process after it reaches its gate, and then opens the gate."""

    def run() -> None:
        wait_until(reached.exists)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid))
        then.touch()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ON_REQUEST)
def test_a_replacement_has_the_newest_weights(way: Way) -> None:
    policy = bias_policy()
    with collecting(
        way, endless, policy, frames=T, track_policy_version=True, worker_init_timeout=60
    ) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.bias += 3.0
        collector.update_policy_weights_()
        kill(collector, 1)
        seen = []
        while not (seen and collector.stats()["workers"][1]["restarts"]) or len(seen) < 6:
            td = collector.next()
            seen.append((td["bias"].max().item(), int(td["collector", "policy_version"].max())))
    assert seen[-1] == (3.0, 1)
    assert {bias for bias, version in seen if version == 1} == {3.0}


class ExitingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        print("goodbye, world", file=sys.stderr, flush=True)
        os._exit(37)


@pytest.mark.parametrize("way", marked(Way("one", 1), Way("multi async one", 1)))
def test_beyond_the_limit_a_death_is_reported(way: Way) -> None:
    with collecting(way, lambda w: ExitingEnv, frames=T, max_worker_restarts=2) as collector:
        with raised(WorkerError, worker=0, incarnation=2) as caught:
            collector.next()
        for _ in range(2):
            with raised(WorkerError, worker=0) as caught:
                collector.next()
            assert "max_worker_restarts" in str(caught.value)
        ledger = check_ledger(collector)
    assert "goodbye, world" in str(caught.value)
    assert ledger["total"]["reasons"]["worker_died"] >= 3 * T
    assert ledger["total"]["in_flight"] == 0


class Hanging(CountingEnv):
    """Hang in step `at` of the first life."""

    def __init__(self, folder: str, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.at = Path(folder) / "first", at
        self.taken = 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken == self.at and not self.first.exists():
            self.first.touch()
            threading.Event().wait()
        return super().step(action)


@pytest.mark.parametrize("way", REMOTELY)
def test_a_hanging_worker_is_replaced(way: Way, tmp_path: Path) -> None:
    def entry(worker: int) -> Any:
        kwargs = {"number": 10 * worker, "length": (4,)}
        if worker == 0:
            return partial(CountingEnv, **kwargs)
        return partial(Hanging, str(tmp_path), T + 2, **kwargs)

    with collecting(way, entry, parity_policy(), frames=T, worker_timeout=1.0) as collector:
        while not collector.ledger()["total"]["reasons"]:
            collector.next()
        for _ in range(4):
            collector.next()
        ledger = check_ledger(collector)
    assert set(ledger["workers"][1]["reasons"]) == {"worker_timeout"}
    assert ledger["workers"][0]["reasons"] == {}


@pytest.mark.processes
def test_a_hang_beyond_the_limit_is_reported_after_finished_rollouts(tmp_path: Path) -> None:
    def entry(worker: int) -> Any:
        if worker == 0:
            return partial(EchoEnv, 0, (4,))
        return partial(Hanging, str(tmp_path), 2, number=10, length=(4,))

    with collecting(
        MULTI_ASYNC[2], entry, parity_policy(), frames=T, worker_timeout=1.0, max_worker_restarts=0
    ) as collector:
        batches: list[Any] = []
        with raised(WorkerError, worker=1) as caught:
            batches.extend(iter(collector.next, None))
        assert "1.0 s" in str(caught.value)
        delivered = sum(td.numel() for td in batches)
        ledger = check_ledger(collector)
    assert ledger["workers"][0] == {
        "issued": delivered,
        "delivered": delivered,
        "in_flight": 0,
        "lost": 0,
        "reasons": {},
    }


class RaisingOnce(CountingEnv):
    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = Path(folder) / "first"

    def step(self, action: Any) -> Any:
        if not self.first.exists():
            self.first.touch()
            raise EnvBrokeError("once")
        return super().step(action)


@pytest.mark.parametrize("way", ON_REQUEST)
def test_an_exception_is_retried_if_configured(way: Way, tmp_path: Path) -> None:
    def entry(worker: int) -> Any:
        return partial(RaisingOnce, str(tmp_path), number=10 * worker)

    total = 4 * T * (2 if way.sync else 1)
    with collecting(
        way, entry, parity_policy(), frames=T, restart_on_error=True, total_frames=total
    ) as collector:
        frames = sum(td.numel() for td in collector)
        ledger = check_ledger(collector)
    assert frames == total
    assert "env_error" in ledger["total"]["reasons"]


@pytest.mark.processes
def test_workers_that_wait_to_be_served_are_not_stalled() -> None:
    """A learner may need more than `worker_timeout` per batch; finished workers are not stalled."""
    seconds = 0.2
    with collecting(
        MULTI_ASYNC[1], endless, parity_policy(), frames=T, worker_timeout=seconds
    ) as collector:
        for _ in range(6):
            collector.next()
            done = [worker.handle for worker in collector._source.group.present]
            wait_until(lambda done=done: all(handle.has_answer for handle in done))
            since = time.monotonic()
            wait_until(lambda since=since: time.monotonic() - since > 2 * seconds)
        assert check_ledger(collector)["total"]["reasons"] == {}
        assert all(own["restarts"] == 0 for own in collector.stats()["workers"].values())


class Dying(CountingEnv):
    """An environment with a method that ends its process."""

    def die(self) -> None:
        os._exit(3)


@pytest.mark.processes
@pytest.mark.parametrize("way", marked(MULTI_AHEAD, MULTI_ASYNC[2]))
def test_a_worker_that_a_call_kills_too_often_ends_the_stream(way: Way) -> None:
    with collecting(
        way, lambda w: partial(Dying, 10 * w, (4,)), frames=T, max_worker_restarts=0
    ) as collector:
        collector.next()
        with pytest.raises(WorkerError, match="max_worker_restarts"):
            collector.map_fn("env.die")
        with pytest.raises(WorkerError, match="max_worker_restarts"):
            list(islice(collector, 10))  # earlier rollouts may be delivered first
        check_ledger(collector)
        collector.shutdown()
        assert check_ledger(collector)["total"]["in_flight"] == 0


@pytest.mark.processes
def test_a_worker_that_hangs_is_replaced_while_all_are_seeded(tmp_path: Path) -> None:
    def entry(worker: int) -> Any:
        kwargs = {"number": 10 * worker, "length": (4,)}
        if worker == 0:
            return partial(CountingEnv, **kwargs)
        return partial(Hanging, str(tmp_path), T + 2, **kwargs)

    with collecting(MULTI_AHEAD, entry, frames=T, worker_timeout=1.0) as collector:
        collector.next()
        wait_until((tmp_path / "first").exists)
        collector.set_seed(3)
        collector.next()
        reasons = check_ledger(collector)["workers"][1]["reasons"]
        assert set(reasons) <= {"set_seed", "worker_timeout"}
        assert collector.stats()["workers"][1]["restarts"] == 1
