"""Central inference with env_groups=2: a worker steps one half during the other's policy call.

The tests over all ways to collect also cover its frames, deaths, seeds and ledgers.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    CENTRAL,
    CENTRAL_ASYNC,
    GROUPS,
    GROUPS_ASYNC,
    RAY_CENTRAL,
    STEPS,
    FrameOracle,
    Way,
    assert_equal,
    collecting,
    parity,
    parity_policy,
)
from echo_envs import ENTRIES, LENGTHS, EchoEnv, GateEnv, echo_fns
from raising import refused
from state_support import POLICIES, Loop, T, env_fns, seeded, three, zeros
from tensordict.nn import TensorDictModule
from test_env_groups import KINDS, SIZES, counting_groups
from test_ledger import check as check_ledger
from test_restarts import killing_when
from torch import nn

from pycollect import AsyncBatchedCollector, MultiSyncDataCollector, WorkerError

pytestmark = pytest.mark.processes(usual=2)


def batches_of(way: Way, entry: Callable[[int], Any], envs: int, **arguments: Any) -> list[Any]:
    """Return three batches of a seeded run."""
    with collecting(way, entry, frames=envs * STEPS, **arguments) as collector:
        collector.set_seed(3)
        return [collector.next().clone() for _ in range(3)]


@pytest.mark.parametrize("envs", [2, 3, 4])
@pytest.mark.parametrize("limit", [0, 2])
def test_the_same_data_as_in_one_group(envs: int, limit: int) -> None:
    """Cover halves of one env each, unequal halves, and equal halves."""
    arguments = {
        "policy": parity_policy(),
        "max_frames_per_traj": limit,
        "track_policy_version": True,
        "init_random_frames": 2 * envs * STEPS,
    }
    one, two = (
        batches_of(way, partial(echo_fns, count=envs), envs, **arguments)
        for way in (CENTRAL, GROUPS)
    )
    for ours, theirs in zip(two, one, strict=True):
        assert_equal(ours, theirs)


class Noisy(nn.Module):
    """Return random actions and numbers."""

    def forward(self, observation: torch.Tensor) -> Any:
        lead = observation.shape[:-1]
        return torch.randint(0, 2, lead), torch.rand(*lead, 1)


def test_a_seed_determines_the_draws_of_the_policy() -> None:
    policy = TensorDictModule(Noisy(), ["observation"], ["action", "drawn"])
    first, second = (batches_of(GROUPS, echo_fns, 3, policy=policy) for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        assert_equal(ours, theirs)
    assert len(ours["drawn"].unique()) > ours.numel() / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_vector_environments_in_worker_and_processes(way: Way, kind: str) -> None:
    cut = 0 if kind == "ignores masks" else 3
    oracle = FrameOracle(max_frames=cut, set_truncated=True, skips=kind == "ignores masks")
    arguments = {"max_frames_per_traj": cut, "set_truncated": True, "env_groups": 2}
    envs = sum(SIZES)
    with collecting(
        way, partial(counting_groups, kind), parity_policy(), frames=envs * STEPS, **arguments
    ) as collector:
        for _ in range(4):
            oracle.check(way.rows(collector.next(), envs, True))


@pytest.mark.parametrize("name", POLICIES)
def test_states_are_of_each_environment(name: str) -> None:
    policy, shapes = seeded(name)
    initial = zeros(shapes, torch.float64 if name == "float64" else torch.float32)
    loops = [Loop(env_fns(w, 3), policy, initial, batched=True) for w in range(GROUPS.workers)]
    with collecting(GROUPS, three, policy, frames=T * 3) as collector:
        for _ in range(2):
            expected = torch.stack([loop.rollout(T) for loop in loops]).exclude("is_init")
            batch = collector.next().select(*expected.keys(True, True))
            # As dicts, because the batch sizes differ.
            torch.testing.assert_close(batch.to_dict(), expected.to_dict())


class Opening(nn.Module):
    """Open a gate in the second call for the env `number`; also return the observation.

    If workers are async, the call may include other waiting environments.
    """

    def __init__(self, gate: Path, number: int) -> None:
        super().__init__()
        self.gate, self.number, self.calls = gate, number, 0

    def forward(self, observation: torch.Tensor) -> Any:
        action, seen = parity(observation)
        if ((observation[..., 0] == self.number) & (observation[..., 2] == 1)).any():
            self.gate.touch()
        return action, seen


@pytest.mark.parametrize("way", [GROUPS, GROUPS_ASYNC], ids=lambda way: way.name)
def test_one_half_steps_while_the_policy_is_called_for_the_other(way: Way, tmp_path: Path) -> None:
    """The second env's first step ends only after the first env's second action is chosen."""
    gate = tmp_path / "gate"
    policy = TensorDictModule(Opening(gate, 0), ["observation"], ["action", "seen"])
    one = Way(way.name, 1, way.arguments)
    halves = [partial(EchoEnv, 0, (9,)), partial(GateEnv, gate, 1, number=1, length=(9,))]
    with collecting(one, lambda worker: halves, policy, frames=2 * STEPS) as collector:
        batch = collector.next()
    assert gate.exists()
    steps = torch.arange(STEPS, dtype=batch["observation"].dtype)
    assert torch.equal(batch["observation"][..., 2].reshape(2, STEPS), steps.expand(2, STEPS))


def test_calls_of_one_half_of_all_workers() -> None:
    seen: list[Any] = []

    def watched(observation: torch.Tensor) -> Any:
        seen.append((observation[..., 0] % 10).tolist())
        return parity(observation)

    policy = TensorDictModule(watched, ["observation"], ["action", "seen"])
    entry = partial(echo_fns, count=4)
    with collecting(GROUPS, entry, policy, frames=4 * STEPS) as collector:
        collector.next()
        seen.clear()
        collector.next()
        assert seen == [[0, 1, 0, 1], [2, 3, 2, 3]] * STEPS
    arguments = {"max_batch_size": 3}
    with collecting(GROUPS, entry, policy, frames=4 * STEPS, **arguments) as collector:
        collector.next()
        seen.clear()
        collector.next()
        assert seen == [[0, 1], [0, 1], [2, 3], [2, 3]] * STEPS


@pytest.mark.parametrize("arguments", [{"server_timeout": 0.01}, {"min_batch_size": 1}])
def test_other_workers_continue_while_one_steps(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Worker 1 waits in its second half until worker 0 has finished all of its steps."""
    gate = tmp_path / "gate"

    class Done(nn.Module):
        def forward(self, observation: torch.Tensor) -> Any:
            if ((observation[..., 0] == 1) & (observation[..., 2] == STEPS - 1)).any():
                gate.touch()
            return parity(observation)

    def entry(worker: int) -> Any:
        fns: list[Any] = [partial(EchoEnv, 10 * worker + p, (9,)) for p in range(2)]
        return [fns[0], partial(GateEnv, gate, 3, number=11, length=(9,))] if worker else fns

    policy = TensorDictModule(Done(), ["observation"], ["action", "seen"])
    with collecting(GROUPS, entry, policy, frames=2 * STEPS, **arguments) as collector:
        batch = collector.next()
    assert (batch["observation"][..., 2] == torch.arange(STEPS)).all()


def test_shares_that_differ() -> None:
    """A worker with fewer steps no longer delays the calls after its last step."""
    steps = [2, STEPS]
    oracle = FrameOracle()
    with MultiSyncDataCollector(
        [echo_fns(worker) for worker in range(2)],
        parity_policy(),
        frames_per_batch=[3 * own for own in steps],
        inference="central",
        env_groups=2,
    ) as collector:
        for _ in range(3):
            td = collector.next()
            mask = ("collector", "mask")
            assert td[mask].sum(-1).tolist() == [[own] * 3 for own in steps]
            oracle.check(
                [(w, p, td[w, p, : steps[w]].exclude(mask)) for w in range(2) for p in range(3)]
            )


def test_a_worker_that_dies_within_a_step_is_replaced(tmp_path: Path) -> None:
    """It dies while its second half steps and its first half's request is still pending."""
    gate = tmp_path / "gate"

    def entry(worker: int) -> Any:
        fns: list[Any] = [partial(EchoEnv, 10 * worker + p, LENGTHS) for p in range(2)]
        waits = partial(GateEnv, gate, STEPS + 3, number=11, length=LENGTHS)
        return [fns[0], waits] if worker else fns

    with collecting(GROUPS, entry, parity_policy(), frames=2 * STEPS) as collector:
        collector.next()
        pid = collector.stats()["workers"][1]["pid"]
        killer = killing_when(gate.with_suffix(".reached"), pid, then=gate)
        batches = [collector.next() for _ in range(3)]
        killer.join()
        assert check_ledger(collector.ledger())["reasons"] == {"worker_died": 2 * STEPS}
        assert collector.stats()["workers"][1]["restarts"] == 1
    for td in batches:
        assert td.shape == (2, 2, STEPS)
        assert torch.equal(td["seen"], td["observation"])
        assert td["observation"][..., 0, 0].tolist() == [[0, 1], [10, 11]]


def test_a_server_that_dies_is_replaced_with_its_workers() -> None:
    with collecting(GROUPS_ASYNC, echo_fns, parity_policy(), frames=3 * STEPS) as collector:
        collector.next()
        os.kill(collector.stats()["server"]["pid"], signal.SIGKILL)
        while collector.stats()["server"]["restarts"] == 0:
            collector.next()
        for _ in range(4):
            td = collector.next()
            assert (td["seen"] == td["observation"]).all()
        total = check_ledger(collector.ledger())
        assert total["reasons"].keys() == {"server_died"}


class BreaksOnce(EchoEnv):
    """Raise in the third step, but only once over all instances."""

    def __init__(self, broke: Path, number: int) -> None:
        super().__init__(number, LENGTHS)
        self.broke = broke

    def step(self, action: Any) -> Any:
        if len(self.actions) == 2 and not self.broke.exists():
            self.broke.touch()
            raise ZeroDivisionError("by the environment")
        return super().step(action)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("way", [GROUPS, GROUPS_ASYNC], ids=lambda way: way.name)
def test_a_pending_request_of_a_worker_whose_environment_raised(
    way: Way, half: int, tmp_path: Path
) -> None:
    def entry(worker: int) -> Any:
        fns: list[Any] = [partial(EchoEnv, 10 * worker + p, LENGTHS) for p in range(2)]
        if worker == 1:
            fns[half] = partial(BreaksOnce, tmp_path / "broke", 10 + half)
        return fns

    arguments = {"restart_on_error": True}
    with collecting(way, entry, parity_policy(), frames=2 * STEPS, **arguments) as collector:
        restarts, batches = 0, 0
        while not restarts or batches < 4:
            td = collector.next()
            assert (td["seen"] == td["observation"]).all()
            restarts, batches = collector.stats()["workers"][1]["restarts"], batches + 1
        total = check_ledger(collector.ledger())
        assert total["reasons"] == {"env_error": 2 * STEPS}
    (tmp_path / "broke").unlink()
    with (
        collecting(way, entry, parity_policy(), frames=2 * STEPS) as collector,
        pytest.raises(ZeroDivisionError, match="by the environment") as raised,
    ):
        deque(collector, 0)
    assert isinstance(raised.value.__cause__, WorkerError)


def test_workers_can_be_added_and_removed() -> None:
    with collecting(GROUPS, echo_fns, parity_policy(), frames=3 * 6) as collector:
        collector.next()
        collector.add_collectors([echo_fns(2)])
        with pytest.warns(UserWarning, match="3 workers"):
            td = collector.next()
        assert td.shape == (3, 3, 4)
        assert (td["seen"] == td["observation"]).all()
        with pytest.warns(UserWarning, match="2 workers"):
            collector.remove_collectors([0])
        assert collector.next().shape == (2, 3, 6)
        with refused(ValueError, "env_groups"):
            collector.add_collectors([echo_fns(3)], collector_kwargs={"env_groups": 1})
        with refused(ValueError, "env_groups"):
            collector.add_collectors([[EchoEnv]])


def test_batches_of_the_ready_workers() -> None:
    with AsyncBatchedCollector(
        [partial(EchoEnv, number, LENGTHS) for number in range(4)],
        policy=parity_policy(),
        frames_per_batch=4 * STEPS,
        envs_per_worker=2,
        transition_chunk_size=STEPS,
        env_groups=2,
    ) as collector:
        for _ in range(3):
            td = collector.next()
            assert td.shape == (4 * STEPS,)
            assert torch.equal(td["env_index"], td["observation"][:, 0].long())
            assert torch.equal(td["seen"], td["observation"])


def test_attributes_of_all_environments() -> None:
    with collecting(GROUPS, echo_fns, parity_policy(), frames=3 * STEPS) as collector:
        assert [collector.get_distant_attr(f"env[{place}].number") for place in range(3)] == [
            [0, 10],
            [1, 11],
            [2, 12],
        ]


@pytest.mark.parametrize(
    ("entry", "name"),
    [([EchoEnv], "env_groups"), (EchoEnv(), "env_groups"), (EchoEnv, "env_groups")],
)
@pytest.mark.filterwarnings("ignore:frames_per_batch")
def test_refused_arguments(entry: Any, name: str) -> None:
    with refused(ValueError, name):
        MultiSyncDataCollector(
            [entry] * 2, parity_policy(), frames_per_batch=8, env_groups=2, inference="central"
        )


@pytest.mark.ray
@pytest.mark.slow
def test_every_frame_from_actors() -> None:
    way, oracle = RAY_CENTRAL, FrameOracle()
    with collecting(
        way, ENTRIES["list"], parity_policy(), frames=3 * STEPS, env_groups=2
    ) as collector:
        for _ in range(4):
            oracle.check(way.rows(collector.next(), 3, True))
