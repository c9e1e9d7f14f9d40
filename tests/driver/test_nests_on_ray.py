"""Nests inside Ray actors and in ranks: several processes that collect as one worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    FrameOracle,
    Way,
    bias_policy,
    is_gone,
    marks_of,
    parity_policy,
    worker_processes,
)
from echo_envs import LENGTHS, EchoEnv, GateEnv, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError
from nest_support import FIRST, INNERS, STACK, STACK_2, Inner, T, W, check_padded
from test_restarts import check_ledger

from pycollect import WorkerError
from pycollect.data.generators import next_seed

IN_ACTORS = Way("ray")
IN_RANKS = [Way("ranks"), Way("ranks by messages"), Way("ranks by rpc")]
HOSTS = [
    pytest.param(IN_ACTORS, id=IN_ACTORS.name, marks=marks_of(IN_ACTORS)),
    *[pytest.param(way, id=way.name, marks=[*marks_of(way), pytest.mark.slow]) for way in IN_RANKS],
]


@contextmanager
def collecting(
    inner: Inner, workers: int, policy: Any, host: Way = IN_ACTORS, **arguments: Any
) -> Iterator[Any]:
    given = {**inner.arguments, **arguments}
    frames = inner.frames * (workers if given.get("sync") else 1)
    entries = given.pop("entries", None) or [inner.entries(b) for b in range(workers)]
    with host.collector(entries, policy, frames_per_batch=frames, **given) as collector:
        yield collector


def processes_of(collector: Any, worker: int) -> list[int]:
    pid = collector.stats()["workers"][worker]["pid"]
    return [process.pid for process in worker_processes(pid)]


OUTERS = {
    "stack": {"sync": True},
    "0": {"sync": True, "cat_results": 0},
    "-1": {"sync": True, "cat_results": -1},
    "async": {},
}


def outer_shape(outer: str, workers: int, inner: tuple[int, ...]) -> tuple[int, ...]:
    if outer == "stack":
        return (workers, *inner)
    if outer == "0":
        return (workers * inner[0], *inner[1:])
    return (*inner[:-1], workers * inner[-1]) if outer == "-1" else inner


def of_each_worker(td: Any, outer: str, workers: int) -> list[Any]:
    if outer == "stack":
        return list(td.unbind(0))
    if outer == "async":
        return [td]
    return list(td.chunk(workers, 0 if outer == "0" else td.ndim - 1))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        *[("stack", inner) for inner in INNERS],
        *[("async", inner) for inner in (STACK, STACK_2, Inner(-1, 2), FIRST, Inner(None, 2))],
        *[("0", inner) for inner in (STACK, STACK_2, Inner(0), Inner(-1, 2))],
        *[("-1", inner) for inner in (STACK, STACK_2, Inner(0, 2), Inner(-1), FIRST)],
    ],
    ids=str,
)
def test_every_frame_from_nests_in_actors(outer: str, inner: Inner) -> None:
    check_nests(IN_ACTORS, outer, inner)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("host", IN_RANKS, ids=lambda way: way.name)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("stack", STACK_2), ("async", FIRST), ("0", Inner(-1, 2)), ("-1", Inner(0, 2))],
    ids=str,
)
def test_every_frame_from_nests_in_ranks(outer: str, inner: Inner, host: Way) -> None:
    check_nests(host, outer, inner)


def check_nests(host: Way, outer: str, inner: Inner) -> None:
    workers = 2
    oracle = FrameOracle()
    with collecting(inner, workers, parity_policy(), host, **OUTERS[outer]) as collector:
        for _ in range(5):
            td = collector.next()
            assert td.shape == outer_shape(outer, workers, inner.shape)
            assert td.names == [None] * (td.ndim - 1) + ["time"]
            rows = []
            for worker, own in enumerate(of_each_worker(td, outer, workers)):
                rows += inner.rows(own, None)
                if outer != "async":
                    assert (own["observation"][..., 0] // 10 == worker).all()
            for row in rows if outer != "async" else [rows]:
                oracle.check([row] if outer != "async" else row)
        ledger = check_ledger(collector)
    assert ledger["total"]["delivered"] == oracle.frames
    assert ledger["total"]["lost"] == 0


@pytest.mark.parametrize("host", HOSTS)
def test_a_nest_in_an_actor(host: Way) -> None:
    """Check shapes, seeds, weights, state, and a death that the actor's collector reports."""
    policy = bias_policy()
    with collecting(STACK, 1, policy, host, sync=True) as collector:
        assert collector.set_seed(5) == next_seed(next_seed(5))
        first = collector.next()
        assert first.shape == (1, W, T)
        collector.update_policy_weights_({"module.bias": torch.tensor([2.0])})
        td = collector.next()
        assert (td["bias"] == 2).all()
        state = collector.state_dict()
        assert collector.stats()["workers"][0]["version"] == 1

        victim = processes_of(collector, 0)[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_gone(victim))
        later = collector.next()
        assert (later["bias"] == 2).all()
        account = check_ledger(collector)["workers"][0]
        assert account["reasons"] == {"worker_died": T}
        assert account["delivered"] == 3 * W * T
        assert collector.stats()["workers"][0]["restarts"] == 1
        ids = torch.cat([batch["collector", "traj_ids"] for batch in (first, td, later)])
        assert ids.unique().tolist() == list(range(int(ids.max()) + 1))

        collector.load_state_dict(state)
        assert collector.stats()["workers"][0]["restarts"] == 1
        again = collector.next()
        assert int(again["collector", "traj_ids"].min()) == int(ids[1].max()) + 1
        assert (again["observation"][..., 0, 2] == 0).all()
        left = processes_of(collector, 0)
    wait_until(lambda: all(is_gone(pid) for pid in left))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST, Inner(-1)], ids=str)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_actors_that_die_take_their_processes_with_them(inner: Inner, sync: bool) -> None:
    with collecting(inner, 2, parity_policy(), sync=sync) as collector:
        ids = [collector.next()["collector", "traj_ids"].flatten() for _ in range(3)]
        processes = processes_of(collector, 1)
        assert len(processes) == W
        os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in processes))
        ids += [collector.next()["collector", "traj_ids"].flatten() for _ in range(6)]
        check_ledger(collector)
    every = torch.cat(ids)
    assert every.unique().tolist() == list(range(int(every.max()) + 1))


class DragEnv(EchoEnv):
    """An environment with slow steps."""

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        return super().step(action)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK_2, Inner(0, 2), Inner(-1), FIRST], ids=str)
def test_a_straggling_actor_stops_its_processes(inner: Inner) -> None:
    """Check only that it was stopped: the time at which the stop request arrives varies."""
    ours, theirs = inner.entries(0), inner.entries(1)
    for process in range(W if inner is FIRST else 1):  # all are slow if any of them may be first
        drag = partial(DragEnv, 10 + process, LENGTHS)
        theirs[process] = [drag, *theirs[process][1:]] if inner.envs else drag
    with collecting(
        inner, 2, parity_policy(), entries=[ours, theirs], sync=True, preemptive_threshold=0.5
    ) as collector:
        oracle = FrameOracle()
        short = 0
        while short < 2:
            td = collector.next()
            assert td.shape == (2, *inner.shape)
            lengths = [check_padded(inner.rows(own, None), oracle) for own in td]
            short += min(lengths[1]) < T
        ledger = check_ledger(collector)["total"]
        assert ledger["delivered"] == ledger["issued"] == oracle.frames
        assert ledger["lost"] == 0


class BreakingEnv(CountingEnv):
    """Raise an error in the tenth step."""

    def step(self, action: Any) -> Any:
        if len(self.actions) == 9:
            raise EnvBrokeError("it broke")
        return super().step(action)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST], ids=str)
def test_an_exception_in_a_process_reaches_the_caller(inner: Inner) -> None:
    entries = [[partial(CountingEnv, 0), partial(BreakingEnv, 1)]]
    with collecting(inner, 1, None, entries=entries, sync=True) as collector:
        with pytest.raises(EnvBrokeError, match="it broke") as caught:
            list(collector)
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerError)
        assert cause.worker == 0
        assert "BreakingEnv" in cause.remote_traceback or "it broke" in cause.remote_traceback
        check_ledger(collector)
        with pytest.raises(EnvBrokeError):
            collector.next()


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_that_hangs_is_ended_by_its_nest(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    entries = [[partial(EchoEnv, 0, (4,)), partial(GateEnv, gate, T + 3, number=1, length=(4,))]]
    with collecting(
        STACK, 1, parity_policy(), entries=entries, sync=True, worker_timeout=5.0
    ) as collector:
        collector.next()
        pid = collector.stats()["workers"][0]["pid"]
        collector.next()
        stats = collector.stats()["workers"][0]
        assert (stats["pid"], stats["restarts"]) == (pid, 1)
        assert check_ledger(collector)["total"]["reasons"] == {"worker_timeout": T}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, Inner(-1), FIRST], ids=str)
def test_a_buffer_gets_the_rollouts_of_each_process(inner: Inner) -> None:
    taken: list[Any] = []

    class Buffer(list[Any]):
        def extend(self, td: Any) -> None:
            taken.append(td)

    with collecting(inner, 2, parity_policy(), sync=True, replay_buffer=Buffer()) as collector:
        for _ in range(2):
            collector.next()
        assert sum(td.numel() for td in taken) == check_ledger(collector)["total"]["delivered"]
    for td in taken:
        assert td.ndim == 1
        # number of its environment
        assert (td["observation"][:, 0] == td["observation"][0, 0]).all()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, Inner(-1), FIRST], ids=str)
def test_whole_trajectories_from_nests(inner: Inner) -> None:
    with collecting(
        inner, 2, parity_policy(), sync=True, trajs_per_batch=5, max_frames_per_traj=10
    ) as collector:
        for _ in range(4):
            td = collector.next()
            for row in td:
                own = row[row["collector", "mask"]]
                assert own["observation"][:, 2].tolist() == list(range(len(own)))
                assert own["next", "done"].flatten().tolist() == [False] * (len(own) - 1) + [True]
        assert check_ledger(collector)["total"]["reasons"] == {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST], ids=str)
def test_nests_can_be_added_and_removed(inner: Inner) -> None:
    with collecting(inner, 1, parity_policy(), sync=True) as collector:
        assert collector.next().shape == (1, *inner.shape)
        (new,) = collector.add_collectors([inner.entries(1)])
        with pytest.warns(UserWarning, match="2 workers"):
            td = collector.next()
        assert td.shape[:-1] == (2, *inner.shape[:-1])
        assert td.shape[-1] == -(-T // 2)
        processes = processes_of(collector, 0)
        with pytest.warns(UserWarning, match="1 worker"):
            collector.remove_collectors(0)
        assert collector.next().shape == (1, *inner.shape)
        assert list(collector.stats()["workers"]) == [0, new]
        wait_until(lambda: all(is_gone(pid) for pid in processes))
        check_ledger(collector)


@pytest.mark.ray
@pytest.mark.slow
def test_torchrls_classes_select_our_classes() -> None:
    collectors = pytest.importorskip("torchrl.collectors")
    cls = collectors.MultiSyncCollector
    entries = [partial(CountingEnv, b) for b in range(2)]
    with collecting(
        STACK, 2, None, entries=entries, sync=True, collector_class=cls, num_workers_per_collector=W
    ) as collector:
        td = collector.next()
    assert td.shape == (2, W, T)
    assert td["observation"][:, :, 0, 0].tolist() == [[0, 0], [1, 1]]
