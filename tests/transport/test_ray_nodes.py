"""Actors on the driver's node share memory with it; others use the object store.

The other node is a second node of the Ray session, on this machine: only Ray's node id decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_0,
    CAT_TIME,
    STACK,
    STEPS,
    FrameOracle,
    Way,
    bias_policy,
    collecting,
    is_gone,
    parity_policy,
)
from echo_envs import ENTRIES, GateEnv, wait_until
from envs_for_tests import CountingEnv
from raising import refused
from test_process_engine import ParentEnv
from test_restarts import check_ledger, endless, kill
from test_stragglers import check_batches, one_straggler

from pycollect import RayCollector
from pycollect._core import Bell, Mailbox
from pycollect.transport.channel import ThreadBell
from pycollect.transport.ray.engine import RayWorker

T = 5
HERE = {"num_cpus": 1, "memory": 1024**3}
ELSEWHERE = {"num_cpus": 0, "memory": 0, "resources": {"elsewhere": 1}}
AHEAD = Way("ray sync ahead", 2, {"sync": True, "prefetch": 1})


@contextmanager
def one_more_node(ray: Any) -> Iterator[Any]:
    """Add a node without CPUs that has the resource "elsewhere"."""
    from ray.cluster_utils import Cluster

    before = ray.cluster_resources().get("elsewhere", 0)
    cluster = Cluster()
    cluster.head_node = ray._private.worker._global_node
    cluster.redis_address = cluster.head_node.redis_address
    node = cluster.add_node(wait=False, num_cpus=0, resources={"elsewhere": 4})
    wait_until(lambda: ray.cluster_resources().get("elsewhere", 0) > before)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


@pytest.fixture(scope="module")
def other_node(ray_cluster: Any) -> Iterator[Any]:
    """A second node."""
    with one_more_node(ray_cluster) as node:
        yield node


def transports(collector: RayCollector) -> list[str]:
    return [worker["transport"] for worker in collector.stats()["workers"].values()]


def follow(way: Way, kind: str, batches: int, **arguments: Any) -> list[Any]:
    """Collect some batches and check each frame; return the transports and the batches."""
    envs = 1 if kind == "one" else 3
    oracle = FrameOracle()
    kept = []
    with collecting(
        way, ENTRIES[kind], parity_policy(), frames=envs * STEPS, **arguments
    ) as collector:
        for _ in range(batches):
            td = collector.next()
            oracle.check(way.rows(td, envs, kind != "one"))
            kept.append(td)
        return [transports(collector), *kept]


@pytest.mark.ray
@pytest.mark.parametrize("order", [[HERE, ELSEWHERE], [ELSEWHERE, HERE]], ids=["here", "there"])
@pytest.mark.parametrize(
    "way", [STACK, AHEAD, CAT_0, CAT_TIME, ASYNC[0], ASYNC[2]], ids=lambda way: way.name
)
def test_local_and_remote_actors_in_one_collector(
    other_node: Any, way: Way, order: list[dict[str, Any]]
) -> None:
    """A worker's node does not change its frames."""
    seen, *_ = follow(way, "list", 12, remote_configs=order)
    assert seen == ["shared memory" if config is HERE else "object store" for config in order]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("way", [STACK, CAT_TIME], ids=lambda way: way.name)
def test_batches_do_not_depend_on_the_actors_nodes(
    other_node: Any, way: Way, compress: bool
) -> None:
    mixed, *one = follow(way, "one", 4, remote_configs=[HERE, ELSEWHERE], compress=compress)
    local, *other = follow(way, "one", 4)
    assert (mixed[1], local) == ("object store", ["shared memory"] * 2)
    for ours, theirs in zip(one, other, strict=True):
        assert (ours == theirs).all()


@pytest.mark.ray
def test_an_actor_of_another_node_gets_weights_with_its_next_rollout(other_node: Any) -> None:
    """Nothing is queued and the driver does not wait, so no call of its own carries the weights."""
    policy = bias_policy()
    with collecting(
        STACK, endless, policy, frames=T, remote_configs=[HERE, ELSEWHERE]
    ) as collector:
        for version in range(3):
            with torch.no_grad():
                policy.module.bias.fill_(version)
            collector.update_policy_weights_()
            assert (collector.next()["bias"] == version).all()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("way", [STACK, ASYNC[2]], ids=lambda way: way.name)
def test_local_and_remote_actors_get_weights_and_replacements(other_node: Any, way: Way) -> None:
    policy = bias_policy()
    with collecting(way, endless, policy, frames=T, remote_configs=[HERE, ELSEWHERE]) as collector:
        for worker in (0, 1):
            collector.next()
            with torch.no_grad():
                policy.module.bias += 1.0
            collector.update_policy_weights_(wait=True)
            kill(collector, worker)
            seen: set[int] = set()
            while seen != {0, 1} or not collector.stats()["workers"][worker]["restarts"]:
                td = collector.next()
                new = td["bias"].flatten() == worker + 1.0
                seen |= set((td["observation"][..., 0].flatten()[new] // 10).int().tolist())
            told = collector.stats()["workers"][worker]["failure"]
            cause = (
                rf"worker {worker} died: it was killed, or it crashed \(process \d+ on node \S+\)"
            )
            assert re.fullmatch(f"worker_died: {cause}", told)
        collector.reset()
        collector.next()
        check_ledger(collector)
        assert transports(collector) == ["shared memory", "object store"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("envs", "cat"), [(3, "stack"), (1, 0), (3, -1)])
def test_a_straggler_on_another_node_is_stopped(
    other_node: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, envs: int, cat: Any
) -> None:
    """A remote actor is stopped by a message outside its queue; a local one by a shared flag."""
    with one_straggler(
        monkeypatch,
        tmp_path,
        RayCollector,
        envs,
        sync=True,
        cat_results=cat,
        remote_configs=[HERE, ELSEWHERE],
    ) as collector:
        check_batches(collector, envs, cat, 0)
        assert transports(collector) == ["shared memory", "object store"]


# Simulated nodes on one machine


def no_sharing(ray: Any, bell: Any) -> tuple[str, Any]:
    return ray.get_runtime_context().get_node_id(), ThreadBell()


def far_away(ray: Any, bell: Any) -> tuple[str, Any]:
    return "another node's id", Bell()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("where", [no_sharing, far_away])
@pytest.mark.parametrize("way", [STACK, AHEAD, CAT_TIME, ASYNC[2]], ids=lambda way: way.name)
def test_the_object_store(way: Way, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store is used if memory cannot be shared, or if no actor is local."""
    monkeypatch.setattr("pycollect.transport.ray.engine.driver_address", where)
    seen, *_ = follow(way, "list", 8)
    assert seen == ["object store"] * 2


class LostMailbox(Mailbox):  # type: ignore[misc]
    """A mailbox with an invalid address."""

    @property
    def address(self) -> Any:
        pid, file, inode, *part = super().address
        return (pid, file, inode + 1, *part)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("way", [STACK, ASYNC[2]], ids=lambda way: way.name)
def test_local_actors_that_cannot_attach_use_the_object_store(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycollect.transport.ray.engine.Mailbox", LostMailbox)
    seen, *_ = follow(way, "list", 8)
    assert seen == ["object store"] * 2


@pytest.mark.ray
@pytest.mark.slow
def test_rollouts_larger_than_the_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.transport.ray.engine.driver_address", far_away)
    with refused(ValueError, "frames_per_batch", "prefetch"):
        RayCollector([CountingEnv], frames_per_batch=40_000_000, prefetch=3, remote_configs=HERE)


@pytest.mark.ray
def test_an_actor_that_cannot_open_the_drivers_memory_reports_it(ray_cluster: Any) -> None:
    """In another container, the driver's pid or its file may belong to something else."""
    node = ray_cluster.get_runtime_context().get_node_id()
    mailbox, bell = Mailbox(1), Bell()
    pid, file, inode, offset, size = mailbox.address
    worker = RayWorker()
    not_it = (pid, file, inode + 1, offset, size)
    assert "no longer" in worker.serve(node, not_it, bell.address, pid)
    nobody = (2**22 + 1, file, inode, offset, size)
    assert "shared memory" in worker.serve(node, nobody, bell.address, pid)
    assert "address" in worker.serve(node, bell.address, bell.address, pid)
    assert "another node" in worker.serve("other", mailbox.address, bell.address, pid)


# Deaths and restarts


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("end", ["shutdown", "forgotten", "killed"])
def test_processes_of_an_environment_end_with_its_actor(end: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    collector = RayCollector(
        [partial(ParentEnv, str(note))], frames_per_batch=T, remote_configs=HERE
    )
    collector.next()
    child, pid = int(note.read_text()), collector.stats()["workers"][0]["pid"]
    if end == "killed":
        os.kill(pid, 9)
        while not collector.stats()["workers"][0]["restarts"]:
            collector.next()
        wait_until(lambda: is_gone(child))
        child = int(note.read_text())
    if end == "forgotten":
        del collector
    else:
        collector.shutdown()
    wait_until(lambda: is_gone(child))
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.ray
@pytest.mark.slow
def test_a_collector_that_is_shut_down_while_an_actor_hangs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    collector = RayCollector(
        [partial(GateEnv, gate, T + 2)], frames_per_batch=T, remote_configs=HERE
    )
    collector.next()
    pid = collector.stats()["workers"][0]["pid"]
    wait_until(gate.with_suffix(".reached").exists)
    collector.shutdown()
    assert is_gone(pid)
