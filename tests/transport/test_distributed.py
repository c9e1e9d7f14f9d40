"""Workers that are ranks of torch.distributed: start, requests, failure and shutdown.

Tests that apply to every kind of worker also run with ranks: see `collect_support.marked`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collect_support import (
    MULTI_ASYNC,
    MULTI_STACK,
    STEPS,
    FrameOracle,
    Way,
    bias_policy,
    collecting,
    elsewhere,
    is_gone,
    of_ranks,
    parity_policy,
)
from echo_envs import ENTRIES, PATIENCE, GateEnv, wait_until
from envs_for_tests import CountingEnv
from raising import raised, refused
from test_restarts import check_ledger, endless, kill

from pycollect import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    WorkerError,
)

T = 5
STACKS, ASYNCS = of_ranks(MULTI_STACK), of_ranks(MULTI_ASYNC[2])
EACH = pytest.mark.parametrize("way", STACKS, ids=lambda way: way.name)


def transports(collector: Any) -> list[str]:
    return [worker["transport"] for worker in collector.stats()["workers"].values()]


# Arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"launcher": "ssh"},
        {"backend": "smoke"},
        {"backend": "mpi"},
        {"tcp_port": 1 << 16},
        {"slurm_kwargs": {}},
        {"num_collectors": 3},
    ],
    ids=str,
)
def test_arguments_refused_before_anything_starts(arguments: dict[str, Any]) -> None:
    with refused(ValueError, *arguments):
        DistributedDataCollector([CountingEnv], **{"launcher": "mp", **arguments})


@pytest.mark.processes
@EACH
def test_ranks_may_take_any_time_to_start(way: Way) -> None:
    with collecting(way, endless, frames=T, worker_init_timeout=float("inf")) as collector:
        assert collector.next().shape == (2, T)


@pytest.mark.parametrize(
    ("arguments", "error", "meant"),
    [
        ({"update_interval": 0}, ValueError, ""),
        ({"sync": True}, ValueError, "DistributedDataCollector"),
        ({"update_after_each_batch": True}, ValueError, "update_interval"),
        ({"visible_devices": [0]}, TypeError, "RPCDataCollector"),
    ],
)
def test_arguments_that_sync_ranks_refuse(arguments: Any, error: Any, meant: str) -> None:
    with refused(error, *arguments) as caught:
        DistributedSyncDataCollector([CountingEnv], launcher="mp", **arguments)
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "name", "meant"),
    [
        ({"update_interval": 3}, "update_interval", "DistributedSyncDataCollector"),
        ({"collector_kwargs": {"foo": 1}}, "collector_kwargs", "foo"),
        (
            {"collector_kwargs": {"cat_resuts": 1}, "collector_class": "async"},
            "collector_kwargs",
            "'cat_results'",
        ),
        ({"tcp_port": True}, "tcp_port", ""),
        ({"tcp_port": "8o"}, "tcp_port", ""),
    ],
)
def test_arguments_of_wrong_types(arguments: dict[str, Any], name: str, meant: str) -> None:
    with refused(TypeError, name) as caught:
        DistributedDataCollector([CountingEnv], launcher="mp", **arguments)
    assert meant in str(caught.value)


# Collecting


@pytest.mark.processes(usual=3)
@pytest.mark.parametrize("way", [*STACKS, *ASYNCS], ids=lambda way: way.name)
def test_every_frame_comes_once(way: Way) -> None:
    with collecting(way, ENTRIES["list"], parity_policy(), frames=3 * STEPS) as collector:
        oracle = FrameOracle()
        for _ in range(8):
            oracle.check(way.rows(collector.next(), 3, True))
        assert transports(collector) == [way.transport] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_batches_are_equal_for_every_transport() -> None:
    batches = []
    for way in (MULTI_STACK, *STACKS):
        with collecting(way, ENTRIES["one"], parity_policy(), frames=STEPS) as collector:
            collector.set_seed(3)
            batches.append([collector.next().clone() for _ in range(3)])
    for others in batches[1:]:
        for ours, theirs in zip(batches[0], others, strict=True):
            assert (ours == theirs).all()


@pytest.mark.processes
@EACH
def test_a_rank_that_dies_is_replaced(way: Way) -> None:
    policy = bias_policy()
    with collecting(way, endless, policy, frames=T) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.bias += 1.0
        collector.update_policy_weights_(wait=True)
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        assert (collector.next()["bias"] == 1.0).all()
        check_ledger(collector)


@pytest.mark.processes
@EACH
def test_beyond_the_limit_a_dead_rank_is_named(way: Way) -> None:
    with collecting(way, endless, frames=T, max_worker_restarts=0) as collector:
        collector.next()
        kill(collector, 1)
        with raised(WorkerError, worker=1) as caught:
            collector.next()
        assert "SIGKILL" in str(caught.value)


@pytest.mark.processes
@EACH
def test_a_rank_that_answers_nothing_is_replaced(way: Way) -> None:
    """Stop the rank without breaking its connection, as if its node were gone."""
    with collecting(way, endless, frames=T, worker_timeout=1.0) as collector:
        collector.next()
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGSTOP)
        while not collector.stats()["workers"][0]["restarts"]:
            collector.next()
        assert check_ledger(collector)["workers"][0]["reasons"].keys() == {"worker_timeout"}


@pytest.mark.processes
@EACH
def test_ranks_of_an_unreferenced_collector_end(way: Way) -> None:
    entries = [endless(0), endless(1)]
    collector = way.collector(entries, parity_policy(), frames_per_batch=2 * T)
    collector.next()
    pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
    del collector
    gc.collect()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.processes
@pytest.mark.slow
@EACH
def test_a_collector_that_is_shut_down_while_a_rank_hangs(way: Way, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    entry = partial(GateEnv, gate, T + 2)
    with collecting(way, lambda w: entry, frames=T, prefetch=1) as collector:
        collector.next()
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
        wait_until(gate.with_suffix(".reached").exists)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize("way", [MULTI_STACK, *STACKS], ids=lambda way: way.name)
def test_an_unresponsive_worker_has_little_time_to_close(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle worker that does not respond is killed soon; other workers get their full time."""
    monkeypatch.setattr("pycollect.transport.engine._RESPOND_SECONDS", 0.5)
    monkeypatch.setattr("pycollect.transport.engine._CLOSE_SECONDS", PATIENCE)
    with collecting(way, endless, frames=T) as collector:
        collector.next()
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
        os.kill(pids[1], signal.SIGSTOP)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.processes
@pytest.mark.parametrize("interval", [1, 2])
def test_sync_ranks_are_updated_after_a_number_of_batches(interval: int) -> None:
    policy = bias_policy()
    with DistributedSyncDataCollector(
        [endless(0), endless(1)],
        policy,
        frames_per_batch=2 * T,
        launcher="mp",
        update_interval=interval,
    ) as collector:
        seen = []
        for _ in range(6):
            seen.append(collector.next()["bias"].unique().item())
            with torch.no_grad():
                policy.module.bias += 1.0
    assert seen == [float(n // interval * interval) for n in range(6)]


@pytest.mark.processes
def test_the_programs_default_group_is_not_changed(tmp_path: Path) -> None:
    """A learner that uses torch.distributed keeps its default group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1)
    try:
        with elsewhere(), DistributedDataCollector([CountingEnv], launcher="mp") as collector:
            collector.next()
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == 1
            assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


DRIVER_PROGRAM = """
import sys, time
from collect_support import elsewhere
from contextlib import nullcontext
from envs_for_tests import CountingEnv
from pycollect import DistributedDataCollector

if __name__ == "__main__":
    with elsewhere() if sys.argv[1] == "messages" else nullcontext():
        collector = DistributedDataCollector([CountingEnv] * 2, launcher="mp", frames_per_batch=5)
    collector.next()
    print(*[worker["pid"] for worker in collector.stats()["workers"].values()], flush=True)
    time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["shared memory", "messages"])
def test_ranks_end_with_their_driver(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DRIVER_PROGRAM)
    driver = subprocess.Popen([sys.executable, program, how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
