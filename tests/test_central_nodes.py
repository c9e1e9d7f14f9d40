"""Central inference on other nodes: a server on each node calls the policy for its workers.

The other node is a second node of the session's Ray on this machine; only Ray's node id counts.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    PATIENCE,
    RAY_CENTRAL,
    RAY_CENTRAL_ASYNC,
    STACK,
    STEPS,
    Way,
    collecting,
    is_gone,
    parity_policy,
)
from echo_envs import ENTRIES, envs_of, wait_until
from state_support import POLICIES, Loop, T, entry_of, env_fns, seeded, zeros
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_central import Watched, failing, watched
from test_central_process import HangsIn, Sizes, Where
from test_ray_nodes import ELSEWHERE, HERE, follow, one_more_node, other_node
from test_restarts import kill

from pycollect import WorkerError
from pycollect.api.arguments import check_devices
from pycollect.transport.ray.servers import ServerActor, ServerEngine

__all__ = ["other_node"]

pytestmark = pytest.mark.ray
MIXED = {"remote_configs": [HERE, ELSEWHERE]}  # worker 0, worker 1
ASIDE = {"remote_configs": ELSEWHERE}
WAYS = pytest.mark.parametrize("way", [RAY_CENTRAL, RAY_CENTRAL_ASYNC], ids=lambda way: way.name)


def node_server(collector: Any) -> dict[str, Any]:
    """Return the statistics of the only node server."""
    (told,) = collector.stats()["node_servers"].values()
    return dict(told)


def killed(collector: Any) -> int:
    """Kill the node server and return its pid."""
    pid: int = node_server(collector)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), PATIENCE)
    return pid


def number_of(frames: Any) -> int:
    """Return the worker of a rollout."""
    return int(frames["observation"].flatten()[0]) // 10


def rollouts(way: Way, batch: Any) -> list[Any]:
    """Return each worker's rollout in a batch of single environments."""
    return [*batch] if way.sync else [batch]


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("kind", ["one", "list"])
def test_frames_of_workers_here_and_there(other_node: Any, way: Way, kind: str) -> None:
    seen, *_ = follow(way, kind, 12, **MIXED)
    assert seen == ["shared memory", "object store"]


@WAYS
def test_the_policy_is_called_on_the_workers_node(other_node: Any, way: Way) -> None:
    policy = TensorDictModule(Where(), ["observation"], ["action", "seen"])
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        called = {}
        while called.keys() != {0, 1}:
            for own in rollouts(way, collector.next()):
                (called[number_of(own)],) = own["seen"].unique().tolist()
        told = collector.stats()
        here = os.getpid() if way.sync else told["server"]["pid"]
        assert called == {0: here, 1: node_server(collector)["pid"]}
        workers = {own["pid"] for own in told["workers"].values()}
        assert not {*called.values()} & workers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "list"])
def test_the_same_data_as_with_the_policy_in_the_workers(other_node: Any, kind: str) -> None:
    envs, _ = envs_of(kind)
    arguments = {"track_policy_version": True, **MIXED}
    seen = []
    for way in (STACK, RAY_CENTRAL):
        policy = parity_policy()
        with collecting(way, ENTRIES[kind], policy, frames=envs * STEPS, **arguments) as collector:
            collector.set_seed(3)
            seen.append([collector.next().clone() for _ in range(3)])
    for ours, theirs in zip(*seen, strict=True):
        assert (ours == theirs).all()
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("name", POLICIES)
def test_states_follow_the_loop(other_node: Any, kind: str, name: str) -> None:
    (policy, shapes), (entry, count, batched) = seeded(name), entry_of(kind)
    initial = zeros(shapes, torch.float64 if name == "float64" else torch.float32)
    loops = [Loop(env_fns(w, count), policy, initial, batched=batched) for w in range(2)]
    with collecting(RAY_CENTRAL, entry, policy, frames=T * count, **MIXED) as collector:
        for _ in range(2):
            expected = torch.stack([loop.rollout(T) for loop in loops]).exclude("is_init")
            batch = collector.next().select(*expected.keys(True, True))
            # As dicts, because the batch sizes differ.
            torch.testing.assert_close(batch.to_dict(), expected.to_dict())


@pytest.mark.slow
def test_one_call_for_the_workers_of_a_node(other_node: Any) -> None:
    policy = TensorDictModule(Sizes(), ["observation"], ["action", "size"])
    arguments = {"min_batch_size": 2, "server_timeout": PATIENCE, **ASIDE}
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
    ) as collector:
        assert all((collector.next()["size"] == 2).all() for _ in range(3))


def tripled(policy: Any) -> Any:
    return TensorDict.from_module(policy).data.apply(lambda own: 3 * own)


@pytest.mark.slow
@WAYS
def test_each_frame_tells_the_version_that_acted(other_node: Any, way: Way) -> None:
    _, policy = watched()
    arguments = {"track_policy_version": True, **MIXED}
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        for version in range(1, 4):
            weights = TensorDict.from_module(policy).data.apply(
                lambda own, version=version: torch.full_like(own, 1.0 + version)
            )
            collector.update_policy_weights_(weights, wait=True)
            oldest = {}
            while oldest.keys() != {0, 1} or min(oldest.values()) < version:
                for own in rollouts(way, collector.next()):
                    versions = own["collector", "policy_version"]
                    assert torch.equal(own["seen"], own["observation"] * (1.0 + versions)[:, None])
                    oldest[number_of(own)] = int(versions.min())
        assert collector.policy_version == 3


@pytest.mark.slow
@WAYS
def test_weights_are_sent_without_being_told(other_node: Any, way: Way) -> None:
    module, policy = watched()
    arguments = {"update_after_each_batch": True, **ASIDE}
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        batch = collector.next()
        with torch.no_grad():
            module.scale.fill_(3.0)
        while not torch.equal(batch["seen"], 3 * batch["observation"]):
            batch = collector.next()
        version = collector.policy_version
        collector.next()
        assert collector.policy_version == version


@WAYS
def test_a_server_that_dies_is_replaced_with_the_workers_of_its_node(
    other_node: Any, way: Way
) -> None:
    _, policy = watched()
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_(tripled(policy))
        collector.next()
        before = killed(collector)
        while node_server(collector)["pid"] == before:
            collector.next()
        told = node_server(collector)
        assert told["restarts"] == 1
        assert "server_died" in told["failure"]
        numbers: set[int] = set()
        while numbers != {0, 1}:
            for own in rollouts(way, collector.next()):
                assert torch.equal(own["seen"], 3 * own["observation"])
                numbers.add(number_of(own))
        workers = collector.stats()["workers"]
        assert [workers[index]["restarts"] for index in (0, 1)] == [0, 1]
        assert workers[1]["failure"] == told["failure"]
        ledger = collector.ledger()
    assert ledger["total"]["reasons"].keys() == {"server_died"}
    assert ledger["workers"][0]["lost"] == 0
    total = ledger["total"]
    assert total["issued"] == total["delivered"] + total["lost"] + total["in_flight"]


def after_its_end(note: Path, worker: int) -> Any:
    """Kill the process that the note names, if there is a note; then build the environment."""
    if note.exists():
        pid = int(note.read_text())
        note.unlink()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), PATIENCE)
    return ENTRIES["one"](worker)()


@pytest.mark.slow
def test_a_worker_that_comes_when_its_server_dies(
    other_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker finds its server's memory gone before the driver notices the death."""
    note, policy = tmp_path / "pid", parity_policy()
    gone, news = vars(ServerActor)["is_gone"].fget, {}

    def is_gone_later(actor: ServerActor) -> bool:
        if not gone(actor):
            return False
        return time.monotonic() - news.setdefault(actor, time.monotonic()) > 5.0

    monkeypatch.setattr(ServerActor, "is_gone", property(is_gone_later))

    def entry(worker: int) -> Any:
        return partial(after_its_end, note, worker) if worker else ENTRIES["one"](worker)

    with collecting(RAY_CENTRAL_ASYNC, entry, policy, frames=STEPS, **MIXED) as collector:
        collector.next()
        note.write_text(str(node_server(collector)["pid"]))
        kill(collector, 1)
        while node_server(collector)["restarts"] == 0:
            collector.next()
        while number_of(collector.next()) != 1:
            pass
        ledger = collector.ledger()
    assert ledger["workers"][1]["reasons"].keys() <= {"worker_died", "server_died"}
    assert ledger["workers"][0]["lost"] == 0


@pytest.mark.slow
def test_past_the_limit_the_servers_death_is_told(other_node: Any) -> None:
    arguments = {"max_worker_restarts": 0, **MIXED}
    policy = parity_policy()
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
    ) as collector:
        collector.next()
        killed(collector)
        with pytest.raises(WorkerError, match="policy server"):
            deque(collector, 0)


@pytest.mark.slow
def test_a_call_that_does_not_return_is_given_up(other_node: Any, tmp_path: Path) -> None:
    """The workers that wait for the call do not time out."""
    policy = TensorDictModule(HangsIn(tmp_path / "hung", 10), ["observation"], ["action", "seen"])
    arguments = {"worker_timeout": 3.0, **ASIDE}
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
    ) as collector:
        while node_server(collector)["restarts"] == 0:
            collector.next()
        assert "worker_timeout" in node_server(collector)["failure"]
        collector.next()
        assert collector.ledger()["total"]["reasons"].keys() == {"server_died"}


@pytest.mark.slow
@WAYS
def test_what_the_policy_raises_is_the_callers(other_node: Any, way: Way) -> None:
    module, policy = failing(ZeroDivisionError("by the policy"))
    module.left = 10
    with (
        collecting(way, ENTRIES["one"], policy, frames=STEPS, **ASIDE) as collector,
        pytest.raises(ZeroDivisionError, match="by the policy"),
    ):
        deque(collector, 0)


class NotThere(Watched):
    """A policy that only the driver can build."""

    def __init__(self, driver: int) -> None:
        if os.getpid() != driver:
            raise ZeroDivisionError("of the factory")
        super().__init__()


@pytest.mark.slow
def test_a_policy_that_cannot_be_built_there_is_the_callers_error(other_node: Any) -> None:
    driver = os.getpid()

    def factory() -> Any:
        return TensorDictModule(NotThere(driver), ["observation"], ["action", "seen"])

    with (
        pytest.raises(ZeroDivisionError, match="of the factory") as raised,
        collecting(RAY_CENTRAL, ENTRIES["one"], frames=STEPS, policy_factory=factory, **MIXED),
    ):
        pass
    assert "policy server" in str(raised.value.__cause__)


@pytest.mark.slow
def test_a_factorys_policy_is_the_same_on_all_nodes(other_node: Any) -> None:
    """All nodes use the driver's weights, even if the factory creates others there."""

    def factory() -> Any:
        module, policy = watched()
        with torch.no_grad():
            module.scale.fill_(float(os.getpid()))
        return policy

    with collecting(
        RAY_CENTRAL, ENTRIES["one"], frames=STEPS, policy_factory=factory, **MIXED
    ) as collector:
        batch = collector.next()
        assert torch.equal(batch["seen"], os.getpid() * batch["observation"])


@pytest.mark.slow
def test_workers_may_come_to_other_nodes(other_node: Any) -> None:
    _, policy = watched()
    arguments = {"remote_configs": HERE}
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
    ) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_(tripled(policy))
        collector.next()
        assert collector.stats()["node_servers"] == {}
        collector.add_collectors([ENTRIES["one"](2)], remote_configs=ELSEWHERE)
        assert node_server(collector)["restarts"] == 0
        batch = collector.next()
        while number_of(batch) != 2:
            batch = collector.next()
        assert torch.equal(batch["seen"], 3 * batch["observation"])


def frames_of(collector: Any, worker: int) -> Any:
    """Return the next frames of this worker."""
    while True:
        for own in rollouts(RAY_CENTRAL_ASYNC, collector.next()):
            if number_of(own) == worker:
                return own


@pytest.mark.slow
@pytest.mark.parametrize("end", ["removed", "stopped"])
def test_a_server_ends_with_the_last_worker_of_its_node(other_node: Any, end: str) -> None:
    """A new server starts when a worker joins this node again."""
    _, policy = watched()
    with collecting(RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        collector.set_seed(3)
        collector.next()
        former = node_server(collector)["pid"]
        if end == "removed":
            collector.remove_collectors(1)
        else:
            collector.stop_remote_collectors()
            collector.add_collectors([ENTRIES["one"](2)], remote_configs=HERE)
        while collector.stats()["node_servers"]:
            collector.next()
        wait_until(lambda: is_gone(former), PATIENCE)
        collector.update_policy_weights_(tripled(policy))
        (added,) = collector.add_collectors([ENTRIES["one"](4)], remote_configs=ELSEWHERE)
        own = frames_of(collector, 4)
        assert torch.equal(own["seen"], 3 * own["observation"])
        assert node_server(collector)["pid"] != former
        assert node_server(collector)["restarts"] == 0
        assert collector.ledger()["workers"][added]["lost"] == 0


@pytest.mark.slow
def test_a_server_ends_when_its_workers_go_on_elsewhere(other_node: Any, ray_cluster: Any) -> None:
    """Another actor takes the resources of the dead worker's actor, so the worker moves."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    whole = {**ELSEWHERE, "resources": {"elsewhere": 4}}  # all of a node
    arguments = {"remote_configs": [HERE, whole]}
    policy = parity_policy()
    with (
        collecting(
            RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
        ) as collector,
        one_more_node(ray_cluster),
    ):
        frames_of(collector, 1)
        ((node, former),) = collector.stats()["node_servers"].items()
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        other = ray_cluster.remote(Sizes).options(**whole, scheduling_strategy=there).remote()
        kill(collector, 1)
        while node in (servers := collector.stats()["node_servers"]):
            collector.next()
        wait_until(lambda: is_gone(former["pid"]), PATIENCE)
        assert servers.keys() != {node}
        frames_of(collector, 1)
        collector.shutdown()
        ray_cluster.kill(other)


@pytest.mark.slow
@WAYS
def test_a_state_goes_on_in_another_run(other_node: Any, way: Way) -> None:
    module, policy = watched()
    with torch.no_grad():
        module.scale.fill_(2.0)
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **ASIDE) as collector:
        collector.set_seed(3)
        collector.next()
        state = collector.state_dict()
    _, other = watched()
    with collecting(way, ENTRIES["one"], other, frames=STEPS, **ASIDE) as collector:
        collector.load_state_dict(state)
        batch = collector.next()
        assert torch.equal(batch["seen"], 2 * batch["observation"])


class Asked(Exception):
    """Raised with the requested options of a server."""


@pytest.mark.parametrize(("device", "gpus"), [("cuda:1", 0.2), ("cpu", 0), (None, 0)])
def test_what_a_servers_actor_asks_for(
    device: str | None, gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server requests part of a GPU for a policy on it, and its workers' runtime environment."""

    def asked(engine: Any, gpus: float) -> None:
        of_worker = {"num_cpus": 4, "runtime_env": {"env_vars": {}}}
        raise Asked(ServerEngine(engine, gpus).server_options("there", of_worker))

    monkeypatch.setattr("pycollect.api.ray.ServerEngine", asked)
    there = partial(check_devices, other_machines=True)  # this machine may have no GPU
    monkeypatch.setattr("pycollect.api.central.check_devices", there)
    with pytest.raises(Asked) as raised:
        RAY_CENTRAL_ASYNC.collector(
            [ENTRIES["one"](0)],
            policy_factory=parity_policy,
            policy_device=device,
            frames_per_batch=STEPS,
        )
    (options,) = raised.value.args
    assert (options["num_gpus"], options["num_cpus"]) == (gpus, 0)
    assert options["runtime_env"] == {"env_vars": {}}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["shutdown", "forgotten"])
def test_nothing_is_left(other_node: Any, end: str) -> None:
    collector = RAY_CENTRAL_ASYNC.collector(
        [ENTRIES["one"](w) for w in range(2)], parity_policy(), frames_per_batch=STEPS, **MIXED
    )
    collector.next()
    told = collector.stats()
    pids = [node_server(collector)["pid"], told["server"]["pid"]]
    pids += [own["pid"] for own in told["workers"].values()]
    if end == "shutdown":
        collector.shutdown()
    del collector
    gc.collect()
    wait_until(lambda: all(is_gone(pid) for pid in pids), PATIENCE)
