"""Central inference with workers on other nodes: they call copies of the policy.

The other node is a second node of the session's Ray on this machine; only Ray's node id counts.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
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
    parity_policy,
)
from echo_envs import ENTRIES, envs_of, wait_until
from raising import refused
from state_support import POLICIES, Loop, T, entry_of, env_fns, seeded, zeros
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_central import Watched, watched
from test_central_process import Where
from test_ray_nodes import ELSEWHERE, HERE, follow, other_node
from test_restarts import check_ledger, kill

__all__ = ["other_node"]

pytestmark = pytest.mark.ray
MIXED = {"remote_configs": [HERE, ELSEWHERE]}  # worker 0, worker 1
ASIDE = {"remote_configs": ELSEWHERE}
WAYS = pytest.mark.parametrize("way", [RAY_CENTRAL, RAY_CENTRAL_ASYNC], ids=lambda way: way.name)


def number_of(frames: Any) -> int:
    """Return the worker of a rollout."""
    return int(frames["observation"].flatten()[0]) // 10


def rollouts(way: Way, batch: Any) -> list[Any]:
    """Return each worker's rollout in a batch of single environments."""
    return [*batch] if way.sync else [batch]


def tripled(policy: Any) -> Any:
    return TensorDict.from_module(policy).data.apply(lambda own: 3 * own)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("kind", ["one", "list"])
def test_frames_of_workers_on_two_nodes(other_node: Any, way: Way, kind: str) -> None:
    seen, *_ = follow(way, kind, 12, **MIXED)
    assert seen == ["shared memory", "object store"]


@pytest.mark.slow
def test_without_copies_no_version_is_counted(other_node: Any) -> None:
    module, policy = watched()
    arguments = {"update_after_each_batch": True, "remote_configs": HERE}
    with collecting(RAY_CENTRAL, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        for _ in range(3):
            collector.next()
            with torch.no_grad():
                module.scale.add_(1.0)
        assert collector.policy_version == 0


@pytest.mark.slow
def test_new_copies_have_the_policys_current_weights(other_node: Any) -> None:
    """The weights were changed in place, and no update was sent."""
    module, policy = watched()
    with collecting(RAY_CENTRAL, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_()
        collector.next()
        with torch.no_grad():
            module.scale.fill_(5.0)
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            batch = collector.next()
        assert torch.equal(batch["seen"], 5 * batch["observation"])


@pytest.mark.slow
def test_a_worker_that_moves_to_this_node_while_its_server_dies(other_node: Any) -> None:
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], parity_policy(), frames=STEPS, **MIXED
    ) as collector:
        collector.next()
        (worker,) = collector._source.group.of([1])
        worker.plan = replace(worker.plan, options={**HERE, "num_gpus": 0})
        kill(collector, 1)
        while not worker.starting:
            collector.next()
        wait_until(lambda: worker.starting.has_answer, PATIENCE)
        os.kill(collector.stats()["server"]["pid"], signal.SIGKILL)
        while number_of(collector.next()) != 1:
            pass
        check_ledger(collector)


@WAYS
def test_a_worker_on_another_node_calls_a_copy(other_node: Any, way: Way) -> None:
    policy = TensorDictModule(Where(), ["observation"], ["action", "seen"])
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        called = {}
        while called.keys() != {0, 1}:
            for own in rollouts(way, collector.next()):
                (called[number_of(own)],) = own["seen"].unique().tolist()
        stats = collector.stats()
        here = os.getpid() if way.sync else stats["server"]["pid"]
        assert called == {0: here, 1: stats["workers"][1]["pid"]}


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
def test_states_equal_those_of_a_loop(other_node: Any, kind: str, name: str) -> None:
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
@WAYS
def test_two_groups_of_environments(other_node: Any, way: Way) -> None:
    seen, *_ = follow(way, "list", 6, env_groups=2, **MIXED)
    assert seen == ["shared memory", "object store"]


@pytest.mark.slow
@WAYS
def test_each_frame_has_the_version_that_acted(other_node: Any, way: Way) -> None:
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
def test_weights_are_sent_automatically(other_node: Any, way: Way) -> None:
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


@pytest.mark.slow
@WAYS
def test_a_replacement_has_the_newest_weights(other_node: Any, way: Way) -> None:
    _, policy = watched()
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **MIXED) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_(tripled(policy))
        collector.next()
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        numbers: set[int] = set()
        while numbers != {0, 1}:
            for own in rollouts(way, collector.next()):
                assert torch.equal(own["seen"], 3 * own["observation"])
                numbers.add(number_of(own))
        assert collector.stats()["workers"][0]["restarts"] == 0
        check_ledger(collector)


def unlike() -> Any:
    """Return a policy whose weights differ from process to process."""
    module, policy = watched()
    with torch.no_grad():
        module.scale.fill_(float(os.getpid()))
    return policy


@pytest.mark.slow
def test_a_factorys_policy_has_the_same_weights_everywhere(other_node: Any) -> None:
    arguments = {"policy_factory": unlike, **MIXED}
    with collecting(RAY_CENTRAL, ENTRIES["one"], frames=STEPS, **arguments) as collector:
        batch = collector.next()
        assert torch.equal(batch["seen"], os.getpid() * batch["observation"])


@pytest.mark.slow
def test_an_update_reaches_policies_that_a_factory_made_in_other_processes(other_node: Any) -> None:
    arguments = {"policy_factory": unlike, **MIXED}
    with collecting(RAY_CENTRAL_ASYNC, ENTRIES["one"], frames=STEPS, **arguments) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_(TensorDict({"module.scale": torch.tensor([2.0])}))
        numbers: set[int] = set()
        while numbers != {0, 1}:
            batch = collector.next()
            assert torch.equal(batch["seen"], 2 * batch["observation"])
            numbers.add(number_of(batch))


@pytest.mark.slow
def test_workers_can_be_added_on_other_nodes(other_node: Any) -> None:
    _, policy = watched()
    arguments = {"remote_configs": HERE}
    with collecting(
        RAY_CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments
    ) as collector:
        collector.set_seed(3)
        collector.update_policy_weights_(tripled(policy))
        collector.next()
        collector.add_collectors([ENTRIES["one"](2)], remote_configs=ELSEWHERE)
        batch = collector.next()
        while number_of(batch) != 2:
            batch = collector.next()
        assert torch.equal(batch["seen"], 3 * batch["observation"])


class Unpicklable(Watched):
    """A policy that cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@pytest.mark.slow
def test_only_a_worker_that_needs_a_copy_pickles_the_policy(other_node: Any) -> None:
    policy = TensorDictModule(Unpicklable(), ["observation"], ["action", "seen"])
    with collecting(
        RAY_CENTRAL, ENTRIES["one"], policy, frames=STEPS, remote_configs=HERE
    ) as collector:
        collector.next()
    with (
        refused(TypeError, "policy"),
        collecting(RAY_CENTRAL, ENTRIES["one"], policy, frames=STEPS, **MIXED),
    ):
        pass


@pytest.mark.slow
@WAYS
def test_a_state_continues_in_another_run(other_node: Any, way: Way) -> None:
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
