"""Features specific to Ray actors: entries, order of delivery, mixed layouts, interrupts."""

from __future__ import annotations

import gc
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    CAT_0,
    CAT_TIME,
    PATIENCE,
    STACK,
    Way,
    collecting,
    parity_policy,
)
from echo_envs import ENTRIES, GateEnv, TallyEnv, echo_fns, wait_until
from envs_for_tests import CountingEnv, NestedEnv, PixelEnv
from raising import refused

from pycollect import RayCollector, split_trajectories

pytestmark = pytest.mark.ray
T = 5
CONFIG = {"num_cpus": 1, "memory": 1024**3}


# Entries


@pytest.mark.slow
def test_one_callable_for_all() -> None:
    """One callable is repeated `num_collectors` times, with kwargs and several envs per worker."""
    kwargs = [{"number": 3, "length": 2}, {"number": 13, "length": 4}]
    with RayCollector(
        CountingEnv,
        None,
        frames_per_batch=12,
        sync=True,
        num_collectors=2,
        num_workers_per_collector=2,
        create_env_kwargs=kwargs,
        remote_configs=[CONFIG, {**CONFIG, "num_cpus": 0.5}],
        collector_class="single",
    ) as collector:
        td = collector.next()
    assert td.shape == (2, 2, 3)
    assert td["observation"][..., 0].flatten(1).unique(dim=1).tolist() == [[3], [13]]
    assert td["next", "done"][:, 0, 1].flatten().tolist() == [True, False]


@pytest.mark.slow
def test_an_instance_is_copied() -> None:
    env = CountingEnv(7)
    with RayCollector(
        [env, env], None, frames_per_batch=2 * T, sync=True, remote_configs=CONFIG
    ) as collector:
        td = collector.next()
    assert (td["observation"][..., 0] == 7).all()
    assert td["collector", "traj_ids"].tolist() == [[0] * T, [1] * T]
    assert env.actions == []


@pytest.mark.slow
def test_gymnasiums_own_envs() -> None:
    """Real vectorized environments, by registered name, on a running cluster."""
    entry = partial(gymnasium.make_vec, "CartPole-v1", num_envs=3)
    with RayCollector(
        [entry, entry],
        None,
        frames_per_batch=6 * 40,
        sync=True,
        cat_results=0,
        split_trajs=True,
        remote_configs=CONFIG,
    ) as collector:
        collector.set_seed(0)
        for _ in range(3):
            td = collector.next()
            mask = td["collector", "mask"]
            ends = td["next", "done"].squeeze(-1) & mask
            assert (ends.sum(1) <= 1).all()
            assert td["observation"][mask].abs().sum() > 0
        stats = collector.stats()
    assert stats["episodes"] > 0
    assert 5 < stats["episode_length"] < 60


@pytest.mark.slow
def test_large_frames() -> None:
    """Several rollouts of more than a megabyte each."""
    way = Way("async", 2, {"prefetch": 2})
    with collecting(way, lambda w: partial(PixelEnv, number=w, length=200), frames=64) as collector:
        steps = {0: 0, 1: 0}
        for _ in range(8):
            td = collector.next()
            first = int(td["observation"][0, 0, 0, 0])
            assert (
                td["observation"] == torch.arange(first, first + 64)[:, None, None, None] % 200
            ).all()
            assert first in (value % 200 for value in steps.values())
            key = next(k for k, value in steps.items() if value % 200 == first)
            steps[key] += 64


# Order


def test_first_ready_first_served(tmp_path: Path) -> None:
    """One worker waits at a gate; the other's batches keep coming, in order."""
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        return partial(GateEnv, gate, T + 2) if worker == 0 else partial(CountingEnv, 10)

    with collecting(ASYNC[2], entry, frames=T) as collector:
        numbers = []

        def take() -> None:
            td = collector.next()
            numbers.append(int(td["observation"][0, 0]))

        while len(numbers) < 8 or 0 not in numbers:
            take()
        assert numbers.count(0) == 1
        gate.touch()
        while numbers.count(0) < 5:
            take()


@pytest.mark.slow
def test_workers_with_finished_rollouts_alternate(tmp_path: Path) -> None:
    """Two workers that both have finished rollouts alternate."""

    def entry(worker: int) -> Any:
        return partial(TallyEnv, tmp_path / "steps", number=10 * worker)

    with collecting(ASYNC[2], entry, frames=T) as collector:
        counts = {0: 0, 1: 0}
        for delivered in range(1, 13):
            td = collector.next()
            counts[int(td["observation"][0, 0]) // 10] += 1
            all_steps = (delivered + 4) * T
            wait_until(lambda steps=all_steps: (tmp_path / "steps").stat().st_size == steps)
    assert min(counts.values()) >= 2  # a few finished rollouts may still be on the way


# Layouts


@pytest.mark.slow
def test_async_workers_may_differ() -> None:
    entries = [partial(CountingEnv, 0), [partial(CountingEnv, 10), partial(CountingEnv, 11)]]
    kinds: set[Any] = set()
    ids: list[torch.Tensor] = []
    with RayCollector(
        [*entries, NestedEnv], None, frames_per_batch=6, remote_configs=CONFIG
    ) as collector:
        while len(kinds) < 3:
            td = collector.next()
            kinds.add((tuple(td.shape), "count" in td))
            ids.append(td["collector", "traj_ids"].flatten())
    assert kinds == {((6,), False), ((2, 3), False), ((6,), True)}
    numbers = torch.cat(ids)
    assert numbers.unique().numel() == numbers.max() + 1


@pytest.mark.slow
def test_sync_workers_of_other_layouts() -> None:
    with refused(ValueError, "create_env_fn") as caught:
        RayCollector(
            [CountingEnv, NestedEnv], None, frames_per_batch=6, sync=True, remote_configs=CONFIG
        )
    assert "count" in str(caught.value)
    assert "worker 1" in str(caught.value)


@pytest.mark.parametrize("way", [CAT_0, CAT_TIME], ids=lambda way: way.name)
def test_rows_are_in_worker_order(way: Way, tmp_path: Path) -> None:
    """Worker 1 finishes first; worker 0 waits for a gate that the test opens."""
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        fns = [partial(GateEnv, gate, T), partial(CountingEnv, 1)]
        return fns if worker == 0 else [partial(CountingEnv, 10), partial(CountingEnv, 11)]

    def open_gate() -> None:
        wait_until(gate.with_suffix(".reached").exists)
        gate.touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    with collecting(way, entry, frames=2 * T) as collector:
        td = collector.next()
        opener.join()
    numbers = [int(row["observation"][0, 0]) for _, _, row in way.rows(td, 2, True)]
    ids = [row["collector", "traj_ids"].unique().tolist() for _, _, row in way.rows(td, 2, True)]
    assert numbers == [0, 1, 10, 11]
    assert ids == [[0], [1], [2], [3]]
    assert split_trajectories(td)["collector", "mask"].sum() == td.numel()


# Interrupts


@pytest.mark.parametrize("way", [STACK, ASYNC[1]], ids=lambda way: way.name)
def test_an_interrupt_loses_nothing(way: Way, tmp_path: Path) -> None:
    """After Ctrl-C during next(), the following frames equal an uninterrupted run."""
    gate, before = tmp_path / "gate", 2 * T

    def entry(worker: int) -> Any:
        return partial(GateEnv, gate, before + 3, number=10 * worker)

    def interrupt() -> None:
        wait_until(lambda: set(steps.values()) == {before})  # next() has no finished rollout left
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    steps = {0: 0, 10: 0}

    def take(collector: RayCollector) -> None:
        td = collector.next()
        assert td is not None
        for row in td if way.sync else [td]:
            number = int(row["observation"][0, 0])
            expected = (np.arange(steps[number], steps[number] + T)) % 5
            assert row["observation"][:, 2].tolist() == expected.tolist()
            steps[number] += T

    def take_for_ever(collector: RayCollector) -> None:
        while True:
            take(collector)

    with collecting(way, entry, frames=T) as collector:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            take_for_ever(collector)
        thread.join()
        gate.touch()
        for _ in range(6):
            take(collector)
        assert collector.stats()["frames"] == sum(steps.values())


# Collectors without a shutdown


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "arguments",
    [{}, *({"sync": sync, "inference": "central"} for sync in (True, False))],
    ids=["policies", "central", "async central"],
)
def test_an_unreferenced_collector_ends_its_actors(arguments: dict[str, Any]) -> None:
    """Actors exit without a shutdown when the last reference to the collector is gone."""
    given = {"frames_per_batch": T, "remote_configs": CONFIG, **arguments}
    collector = RayCollector([CountingEnv], parity_policy(), **given)
    collector.next()
    pid = collector.stats()["workers"][0]["pid"]
    del collector
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.slow
def test_a_collector_freed_in_a_thread_of_ray(ray_cluster: Any) -> None:
    """A collector may be freed by the garbage collection of any thread."""
    collected = threading.Event()

    def collect(answer: Any) -> None:
        gc.collect()
        collected.set()

    collector = RayCollector([CountingEnv], None, frames_per_batch=T, remote_configs=CONFIG)
    collector.next()
    pid = collector.stats()["workers"][0]["pid"]
    gc.disable()
    try:
        circle = [collector]
        circle.append(circle)
        del circle, collector
        answer = ray_cluster.remote(lambda: None).remote()
        answer.future().add_done_callback(collect)
        assert collected.wait(PATIENCE)
    finally:
        gc.enable()
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.slow
def test_two_collectors_side_by_side() -> None:
    with (
        collecting(Way("one", 1, {}), ENTRIES["one"], frames=T) as a,
        collecting(Way("two", 1, {}), lambda w: echo_fns(3)[0], frames=T) as b,
    ):
        for _ in range(3):
            assert a.next()["observation"][0, 0] == 0
            assert b.next()["observation"][0, 0] == 30
        a.shutdown()
        assert b.next()["observation"][0, 0] == 30
