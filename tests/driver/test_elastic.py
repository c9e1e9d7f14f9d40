"""Adding and removing workers during collection."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_0,
    MULTI_0,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    Way,
    bias_policy,
    collecting,
    of_ranks,
)
from echo_envs import wait_until
from envs_for_tests import CountingEnv
from raising import refused
from test_ledger import check
from test_restarts import kill

from pycollect.api.set_up import WorkerTemplate
from pycollect.data.generators import next_seed

T = 4
AHEAD = Way("ray sync ahead", 2, {"sync": True, "prefetch": 1})


def ways(usual: list[Way], others: list[Way]) -> list[Any]:
    """Return test parameters; ranks and `others`, which only schedule differently, are slow."""
    others = [*others, *(own for way in usual if way.multi for own in of_ranks(way))]
    return [
        pytest.param(
            way,
            id=way.name,
            marks=[
                pytest.mark.processes if way.children else pytest.mark.ray,
                *([pytest.mark.slow] if way in others else []),
            ],
        )
        for way in (*usual, *others)
    ]


def endless(worker: int) -> Any:
    return partial(CountingEnv, 10 * worker, (4,))


def numbers(td: Any) -> list[int]:
    """Return the numbers of the workers that collected a batch."""
    return sorted({int(number) // 10 for number in td["observation"][..., 0].flatten().tolist()})


def changed(collector: Any, change: Callable[[], Any], warning: str) -> list[Any]:
    """Return three batches after a change; batches requested before it come first."""
    with pytest.warns(UserWarning, match=warning):
        return [change(), *itertools.islice(collector, 3)][1:]


@pytest.mark.parametrize("way", ways([STACK, MULTI_STACK], [AHEAD, CAT_0, MULTI_AHEAD, MULTI_0]))
def test_sync_shares_are_recomputed(way: Way) -> None:
    policy = bias_policy()
    cells = 0
    with collecting(way, endless, policy, frames=6) as collector:
        cells += collector.next().numel()
        with torch.no_grad():
            policy.module.bias += 2.0
        collector.update_policy_weights_()
        batches = changed(collector, lambda: collector.add_collectors([endless(2)]), "3 workers")
        td = batches[-1]
        assert numbers(td) == [0, 1, 2]
        assert td.shape == ((12,) if way.cat == 0 else (3, 4))
        assert td["bias"].unique().tolist() == [2.0]
        cells += sum(batch.numel() for batch in batches)
        pid = collector.stats()["workers"][0]["pid"]
        batches = changed(collector, lambda: collector.remove_collectors(0), "2 workers")
        cells += sum(batch.numel() for batch in batches)
        assert numbers(batches[-1]) == [1, 2]
        assert batches[-1].numel() == 12
        wait_until(lambda: not psutil.pid_exists(pid))
        batches = changed(collector, lambda: collector.add_collectors(endless(3)), "3 workers")
        cells += sum(batch.numel() for batch in batches)
        assert numbers(batches[-1]) == [1, 2, 3]  # ids are not reused
        total = check(collector.ledger())
    assert total["reasons"] == {}
    assert total["delivered"] == cells


@pytest.mark.parametrize("way", ways([MULTI_STACK], [STACK]))
@pytest.mark.parametrize("moment", ["after", "while it starts", "just before"])
def test_a_replacement_worker_has_the_new_share(way: Way, moment: str) -> None:
    with collecting(way, endless, frames=6) as collector:
        collector.next()
        if moment == "while it starts":
            kill(collector, 1)
            collector.reset()  # finds it dead, and starts its replacement
        collector.add_collectors([endless(2)])
        if moment == "just before":
            kill(collector, 1)
        with pytest.warns(UserWarning, match="3 workers"):
            collector.next()
        if moment == "after":
            kill(collector, 1)
            collector.next()
        td = collector.next()
        assert td.shape == (3, 4)
        assert numbers(td) == [0, 1, 2]
        assert collector.stats()["workers"][1]["restarts"] == 1
        check(collector.ledger())


@pytest.mark.parametrize("way", ways([ASYNC[2], MULTI_ASYNC[2]], [ASYNC[0], MULTI_ASYNC[0]]))
def test_async_workers_are_added_and_removed_at_once(way: Way) -> None:
    with collecting(way, endless, frames=T) as collector:
        collector.next()
        collector.add_collectors([endless(2), endless(3)])
        seen: set[int] = set()
        while not seen >= {2, 3}:
            seen |= set(numbers(collector.next()))
        collector.remove_collectors([0, 2])
        in_flight = collector.ledger()["workers"]
        owed = {w: in_flight[w]["in_flight"] for w in (0, 2)}
        late = {0: 0, 2: 0}
        after = 0
        while after < 10:  # later batches contain none of their frames
            td = collector.next()
            (worker,) = numbers(td)
            if worker in late:
                late[worker] += td.numel()
            after += late == owed
        assert late == owed
        assert set(collector.policy_lag) == {1, 3}
        total = check(collector.ledger())
        assert total["reasons"] == {}
        ids = [collector.next()["collector", "traj_ids"] for _ in range(3)]
        assert all((i >= 0).all() for i in ids)


@pytest.mark.parametrize("way", ways([MULTI_ASYNC[2]], [ASYNC[2]]))
def test_all_workers_may_be_stopped_and_new_ones_added(way: Way) -> None:
    with collecting(way, endless, frames=T) as collector:
        collector.next()
        assert len(collector.remote_collectors) == 2
        if way.children:
            pids = [process.pid for process in collector.remote_collectors]
            assert pids == [worker["pid"] for worker in collector.stats()["workers"].values()]
        collector.stop_remote_collectors()
        assert collector.remote_collectors == []
        assert check(collector.ledger())["reasons"].keys() == {"shutdown"}
        with pytest.raises(RuntimeError, match="add_collectors"):
            collector.next()
    with collecting(way, endless, frames=T) as collector:
        collector.stop_remote_collectors()
        assert collector.add_collectors([endless(2)]) == [2]
        assert numbers(collector.next()) == [2]


@pytest.mark.parametrize("way", ways([MULTI_STACK], [STACK]))
def test_refused_additions_and_removals(way: Way) -> None:
    factories = [bias_policy] * 2
    with collecting(way, endless, frames=T, policy_factory=factories) as collector:
        for ids in (5, [0, 7]):
            with refused(ValueError, "worker_ids"):
                collector.remove_collectors(ids)
        with refused(ValueError, "worker_ids"):
            collector.remove_collectors([0, 1])
        with refused(ValueError, "policy"):
            collector.add_collectors(endless(2))
        with refused(ValueError, "collector_kwargs") as caught:
            collector.add_collectors(endless(2), collector_kwargs={"frames_per_batch": 3})
        assert "'frames_per_batch'" in str(caught.value)
        own = {"policy_factory": bias_policy}
        with refused(ValueError, "create_env_fn") as caught:
            collector.add_collectors([partial(CountingEnv, dtype="float64")], collector_kwargs=own)
        assert "worker 2" in str(caught.value)
        assert collector.next().shape == (2, T)


def test_a_leaving_worker_gets_no_new_seed() -> None:
    with collecting(MULTI_AHEAD, endless, frames=T) as collector:
        collector.next()
        collector.remove_collectors(0)  # one more batch was requested of it
        with pytest.warns(UserWarning, match="1 worker"):
            assert collector.set_seed(3) == next_seed(3)
        assert numbers(collector.next()) == [1]


def test_arguments_of_single_workers_are_not_passed_to_added_ones() -> None:
    values = {"policy_factory": [int, int], "device": "cpu"}
    remote: Any = None  # of no effect here
    template = WorkerTemplate(values, {"policy_factory", "device"}, None, T, remote)
    own = {"policy_factory": float, "device": "meta"}
    assert template.arguments(own, 1) == [{"policy_factory": float, "device": "cpu"}]
