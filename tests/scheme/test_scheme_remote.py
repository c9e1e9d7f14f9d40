"""Remote workers of a CWorkerSet: Ray actors that end with their set."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from raising import raised, refused, warned
from scheme_support import ACTIONS, OBSERVATION, RESOURCES, on_policy

from pycollect import WorkerError, scheme
from pycollect.scheme import CWorker, CWorkerSet, unpack
from pycollect.scheme.gym import ActorCritic

pytestmark = pytest.mark.ray


def set_of(count: int, *, fraction_samples: float = 1.0, **factories: Any) -> CWorkerSet:
    return CWorkerSet(
        count,
        0,
        local_device="cpu",
        fraction_samples=fraction_samples,
        worker_remote_config=RESOURCES,
        **(factories or on_policy()),
    )


def test_remote_workers_collect_with_the_local_weights(ray_cluster: Any) -> None:
    """Check weights and versions, added workers, and the reported statistics."""
    ray = ray_cluster
    workers = set_of(2)
    local, remote = workers.local_worker(), workers.remote_workers()
    assert local.envs_train is None
    assert not local.is_remote
    for weights in ray.get([worker.get_weights.remote() for worker in remote]):
        assert all(torch.equal(weights[name], own) for name, own in local.get_weights().items())
    data, info = ray.get(remote[0].collect_data.remote())
    assert data["Observation"].shape == (13, 2, 2)
    assert info["ActorVersion"] == {"DataCollection": 0}
    with torch.no_grad():
        local.actor.critic[-1].bias.fill_(100.0)
    local.actor_version = 1
    workers.broadcast_weights()
    results = workers.collect_data()
    assert [info["ActorVersion"]["DataCollection"] for _, info in results] == [1, 1]
    assert all((data["Value"][:12] > 50).all() for data, _ in results)
    workers.add_workers(1)
    assert workers.num_workers == len(workers.remote_workers()) == 3
    data, info = ray.get(workers.remote_workers()[2].collect_data.remote())
    assert info["ActorVersion"] == {"DataCollection": 1}
    assert (data["Value"][:12] > 50).all()
    workers.stop()
    assert workers.remote_workers() == []


@pytest.mark.slow
def test_remote_workers_draw_different_numbers(ray_cluster: Any) -> None:
    workers = set_of(2)
    first, second = (data["Action"] for data, _ in workers.collect_data())
    workers.stop()
    assert not torch.equal(first[:12], second[:12])  # 24 actions with 2 choices each


@pytest.mark.slow
def test_a_remote_worker_can_be_ended(ray_cluster: Any) -> None:
    workers = set_of(2)
    first, second = workers.remote_workers()
    rollout = first.collect_data.remote()
    ended = first.terminate_worker.remote()
    # requested before the end
    assert ray_cluster.get(rollout)[1]["NumberSamples"] == 24
    with pytest.raises(ray_cluster.exceptions.RayActorError):
        ray_cluster.get(ended)
    with raised(WorkerError, worker=1):
        workers.collect_data()
    assert ray_cluster.get(second.collect_data.remote())[1]["NumberSamples"] == 24
    workers.stop()


def test_a_killed_worker_is_reported(ray_cluster: Any) -> None:
    with set_of(2) as workers:
        ray_cluster.kill(workers.remote_workers()[1])
        with raised(WorkerError, worker=2):
            workers.collect_data()


@pytest.mark.slow
def test_an_unreferenced_set_leaves_nothing_behind(ray_cluster: Any) -> None:
    """Its actors end; the fixture that watches all tests checks this."""
    assert len(set_of(2).collect_data()) == 2


@pytest.mark.slow
def test_an_exception_of_a_component_is_raised(ray_cluster: Any) -> None:
    workers = set_of(2)
    (first, _) = workers.remote_workers()
    with pytest.raises(AttributeError, match="'gama'"):
        ray_cluster.get(first.update_algorithm_parameter.remote("gama", 1.0))
    factory = ActorCritic.create_factory(OBSERVATION, ACTIONS, 4)
    ray_cluster.get(first.replace_agent_component.remote("Actor", factory))
    assert ray_cluster.get(first.get_weights.remote())["policy.0.bias"].shape == (4,)
    workers.stop()


@pytest.mark.slow
def test_a_worker_that_refuses_weights_is_reported(ray_cluster: Any) -> None:
    with set_of(2) as workers:
        factory = ActorCritic.create_factory(OBSERVATION, ACTIONS, 4)
        second = workers.remote_workers()[1]
        ray_cluster.get(second.replace_agent_component.remote("Actor", factory))
        workers.broadcast_weights()
        with pytest.raises(ValueError, match="actor_weights"):
            workers.collect_data()
        assert len(workers.collect_data()) == 2  # the error is raised once


@pytest.mark.slow
def test_a_worker_that_cannot_be_created(ray_cluster: Any) -> None:
    factories = on_policy()

    def only_here(device: Any, *place: Any) -> Any:
        raise OSError("no display")

    with pytest.raises(WorkerError, match="no display"):
        set_of(2, **{**factories, "train_envs_factory": only_here})


def test_unavailable_resources(ray_cluster: Any) -> None:
    with refused(ValueError, "worker_remote_config"):
        CWorkerSet(2, 0, worker_remote_config={"num_cpus": 50}, local_device="cpu", **on_policy())
    workers = CWorkerSet(0, 0, local_device="cpu", **on_policy())
    assert workers.remote_config["num_gpus"] is None  # its device is no GPU
    workers.stop()


@pytest.mark.slow
def test_a_class_of_actors(ray_cluster: Any) -> None:
    """As in PyTorchRL: Ray makes the class an actor, and the caller calls it."""
    with warned("object_store_memory"):
        remote = CWorker.as_remote(num_cpus=1, object_store_memory=1)
    worker = remote.remote(index_worker=1, index_parent=0, device="cpu", **on_policy())
    _, info = ray_cluster.get(worker.collect_data.remote())
    assert info["NumberSamples"] == 24
    assert ray_cluster.get(worker.get_host.remote())
    ray_cluster.get(worker.stop.remote())
    ended = worker.__ray_terminate__.remote()
    ray_cluster.wait([ended], timeout=30)


@pytest.mark.slow
def test_packed(ray_cluster: Any) -> None:
    workers = CWorkerSet(
        2,
        0,
        local_device="cpu",
        compress_data_to_send=True,
        worker_remote_config=RESOURCES,
        **on_policy(),
    )
    for packed in workers.collect_data():
        data, info = unpack(packed)
        assert info["NumberSamples"] == 24
        assert data["Reward"][:12].sum() == 24
    workers.stop()


class TestMessages:
    @pytest.mark.slow
    def test_all_processes_of_a_cluster_see_them(self, ray_cluster: Any) -> None:
        @ray_cluster.remote
        def elsewhere() -> bytes | None:
            seen = scheme.check_message("greeting")
            scheme.broadcast_message("greeting", "and back")
            return seen

        assert scheme.check_message("greeting") is None
        scheme.broadcast_message("greeting", b"hello")
        assert ray_cluster.get(elsewhere.remote()) == b"hello"
        assert scheme.check_message("greeting") == b"and back"

    @pytest.mark.slow
    def test_stop_ends_a_rollout(self, ray_cluster: Any) -> None:
        """The message ends a rollout of ten seconds after half of its steps at the latest."""
        workers = set_of(2, fraction_samples=0.1, **on_policy(size=100, seconds={1: 0.1, 2: 0.1}))
        scheme.broadcast_message("sync", b"start-continue")
        calls = [w.collect_data.remote(listen_to=["sync"]) for w in workers.remote_workers()]
        scheme.broadcast_message("sync", b"stop")
        for data, info in ray_cluster.get(calls):
            steps = info["NumberSamples"] // 2
            assert 10 <= steps < 50
            assert len(data["Observation"]) == steps + 1
            assert (data["Reward"][:steps] == 1).all()
            assert not data["Reward"][steps].any()
        workers.stop()


@pytest.mark.slow
def test_a_straggler_takes_little_of_the_others_time(ray_cluster: Any) -> None:
    """One of three workers is 20 times slower: the others keep 85 % of their speed."""
    quick = on_policy((5,), size=400, seconds={1: 0.002, 2: 0.002})
    mixed = on_policy((5,), size=400, seconds={1: 0.002, 2: 0.002, 3: 0.04})

    def seconds_of(workers: CWorkerSet, fraction_workers: float) -> float:
        """Return the duration of a typical collection round."""
        workers.collect_data(fraction_workers)
        rounds = []
        for _ in range(7):
            start = time.perf_counter()
            results = workers.collect_data(fraction_workers)
            rounds.append(time.perf_counter() - start)
            assert [info["NumberSamples"] for _, info in results[:2]] == [400, 400]
        return median(rounds)

    alone = set_of(2, **quick)
    without = seconds_of(alone, 1.0)
    alone.stop()
    workers = set_of(3, fraction_samples=0.01, **mixed)
    with_straggler = seconds_of(workers, 0.66)
    workers.stop()
    assert without / with_straggler >= 0.85
