"""With env_groups=2, the policy runs for one half of the environments while the other steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import (
    IN_PROCESS,
    MULTI_STACK,
    FrameOracle,
    Way,
    collected_frames,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import LENGTHS, EchoEnv
from envs_for_tests import CompactVectorEnv, CountingVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from raising import refused
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector

STEPS = 7
SIZES = (2, 3)
EVENTS: list[str] = []
"""What a policy and the environments below did, in this process."""


class Late:
    """A vector environment that steps in `recv`, as if the step ran elsewhere."""

    name = ""

    def send(self, actions: Any) -> None:
        EVENTS.append(f"send {self.name}")
        self.given = actions

    def recv(self) -> Any:
        EVENTS.append(f"recv {self.name}")
        return self.step(self.given)  # type: ignore[attr-defined]


class LateSync(Late, SyncVectorEnv):
    pass


class LateCounting(Late, CountingVectorEnv):
    pass


class LatePool(Late, CompactVectorEnv):
    pass


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "DISABLED": partial(LateCounting, mode="DISABLED"),
    "NEXT_STEP": LateCounting,
    "SAME_STEP": partial(LateCounting, mode="SAME_STEP"),
    "ignores masks": partial(LateCounting, ignores_mask=True),
    "falls behind": LatePool,
}


def counting_groups(kind: str, worker: int) -> list[Callable[[], Any]]:
    """Return factories for two groups of the worker's environments."""

    def make(first: int, count: int) -> Any:
        numbers = range(10 * worker + first, 10 * worker + first + count)
        return KINDS[kind]([EchoEnv(number, LENGTHS) for number in numbers])

    return [partial(make, 0, SIZES[0]), partial(make, *SIZES)]


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *[pytest.param(IN_PROCESS, kind, id=kind) for kind in KINDS],
        *[
            pytest.param(*own.values, "falls behind", id=own.id, marks=own.marks)
            for own in marked(MULTI_STACK, central=False)
        ],
    ],
)
def test_every_frame_comes_once(way: Way, kind: str) -> None:
    cut = 0 if kind == "ignores masks" else 3
    oracle = FrameOracle(max_frames=cut, set_truncated=True, skips=kind == "ignores masks")
    with collecting(
        way,
        partial(counting_groups, kind),
        parity_policy(),
        frames=sum(SIZES) * STEPS,
        max_frames_per_traj=cut,
        set_truncated=True,
        env_groups=2,
    ) as collector:
        for _ in range(4):
            td = collector.next()
            assert td.shape == way.shape(sum(SIZES), True, STEPS)
            oracle.check(way.rows(td, sum(SIZES), True))
        ledger = collector.ledger()["total"]
        assert ledger["delivered"] == collector.stats()["frames"] == oracle.frames
        assert collector.stats()["episodes"] > 0
    assert collected_frames(td) <= td.numel()


def pendulums(sizes: tuple[int, ...]) -> list[Callable[[], Any]]:
    fns = [partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5)]
    return [partial(LateSync, fns * size) for size in sizes]


def steering() -> TensorDictModule:
    """Return a policy that computes each environment's action independently of the others."""
    return TensorDictModule(
        lambda own: (own[..., :1] * 2, own[..., 1:]), ["observation"], ["action", "seen"]
    )


@pytest.mark.parametrize("make_policy", [steering, lambda: None], ids=["policy", "random"])
def test_the_same_data_as_in_one_group(make_policy: Any) -> None:
    batches = []
    for sizes, groups in (((5,), 1), (SIZES, 2)):
        entry = pendulums(sizes)
        with SyncDataCollector(
            entry if groups == 2 else entry[0],
            make_policy(),
            frames_per_batch=5 * STEPS,
            max_frames_per_traj=4,
            init_random_frames=5 * STEPS,
            env_groups=groups,
        ) as collector:
            assert collector.set_seed(3) != 3
            batches.append([collector.next() for _ in range(3)])
            assert collector.n_env == 5
    for one, two in zip(*batches, strict=True):
        assert set(one.keys(True)) == set(two.keys(True))
        for key in one.keys(True, True):
            assert torch.equal(one[key], two[key]), key


def test_two_runs_resumed_from_one_state_are_the_same() -> None:
    def collector() -> SyncDataCollector:
        return SyncDataCollector(pendulums(SIZES), None, frames_per_batch=5 * STEPS, env_groups=2)

    with collector() as first:
        first.set_seed(1)
        first.next()
        state = first.state_dict()
    batches = []
    for _ in range(2):
        with collector() as resumed:
            resumed.load_state_dict(state)
            batches.append(resumed.next())
    for key in batches[0].keys(True, True):
        assert torch.equal(batches[0][key], batches[1][key]), key


class Counting(torch.nn.Module):
    """A policy that counts the steps of each trajectory in its recurrent state."""

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
        return torch.zeros(observation.shape[:-1], dtype=torch.int64), h + 1


@pytest.mark.parametrize("kind", ["NEXT_STEP", "falls behind"])
def test_states_are_of_each_environment(kind: str) -> None:
    policy = TensorDictModule(Counting(), ["observation", "h"], ["action", ("next", "h")])
    with SyncDataCollector(
        counting_groups(kind, 0),
        policy,
        frames_per_batch=5 * STEPS,
        policy_state={"h": (1,)},
        env_groups=2,
    ) as collector:
        for td in (collector.next(), collector.next()):
            assert torch.equal(td["h"][..., 0], td["observation"][..., 2])
            assert torch.equal(td["next", "h"][..., 0], td["next", "observation"][..., 2])


def test_the_policy_is_called_while_others_step() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        EVENTS.append(f"act {len(observation)}")
        return torch.zeros(len(observation), 1)

    made = pendulums(SIZES)
    envs = []

    def make(place: int) -> Any:
        env = made[place]()
        env.name = str(SIZES[place])
        envs.append(env)
        return env

    with SyncDataCollector(
        [partial(make, 0), partial(make, 1)], policy, frames_per_batch=15, env_groups=2
    ) as collector:
        EVENTS.clear()
        collector.next()
    turn = ["recv 2", "act 2", "send 2", "recv 3", "act 3", "send 3"]
    begin = ["act 2", "send 2", "act 3", "send 3"]
    expected = [*begin, *turn, *turn, "recv 2", "recv 3"]
    assert expected == EVENTS


def test_calls_of_the_policy_may_reuse_memory() -> None:
    memory = torch.zeros(max(SIZES), 3)

    def policy(observation: torch.Tensor) -> Any:
        kept = memory[: len(observation)]
        kept.copy_(observation)
        return torch.zeros(len(observation), 1), kept

    module = TensorDictModule(policy, ["observation"], ["action", "seen"])
    with SyncDataCollector(
        pendulums(SIZES), module, frames_per_batch=5 * STEPS, env_groups=2
    ) as collector:
        td = collector.next()
    assert torch.equal(td["seen"], td["observation"])


def test_single_environments_can_be_reset() -> None:
    with SyncDataCollector(
        counting_groups("NEXT_STEP", 0), None, frames_per_batch=5, env_groups=2
    ) as collector:
        before = collector.next()
        collector.reset(torch.tensor([1, 4]))
        after = collector.next()
    steps, episodes = after["observation"][:, 0, 2], after["observation"][:, 0, 1]
    assert (steps[[1, 4]] == 0).all()
    assert (episodes >= before["observation"][:, 0, 1]).all()


class InterruptedEnv(EchoEnv):
    """An environment that raises KeyboardInterrupt in its fifth step."""

    def step(self, action: Any) -> Any:
        if len(self.actions) == 4:
            self.actions.append(action)
            raise KeyboardInterrupt
        return super().step(action)


def test_pending_steps_are_dropped_with_their_rollout() -> None:
    def make(place: int) -> Any:
        if place == 0:
            return LateCounting([EchoEnv(number, LENGTHS) for number in range(2)], "DISABLED")
        return LateCounting([InterruptedEnv(2, LENGTHS)], "DISABLED")

    oracle = FrameOracle(exact=False)
    with SyncDataCollector(
        [partial(make, 0), partial(make, 1)],
        parity_policy(),
        frames_per_batch=3 * STEPS,
        env_groups=2,
    ) as collector:
        EVENTS.clear()
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert EVENTS.count("send ") == EVENTS.count("recv ") + 1
        td = collector.next()
        assert EVENTS.count("send ") == EVENTS.count("recv ")
        assert collector.ledger()["total"]["lost"] == 3 * STEPS
    oracle.check(IN_PROCESS.rows(td, 3, True))


@pytest.mark.parametrize(
    ("entry", "groups", "name", "given"),
    [
        ([EchoEnv, EchoEnv, EchoEnv], 2, "env_groups", "3"),
        ([EchoEnv, EchoEnv], 2, "env_groups", "<EchoEnv"),
        (EchoEnv, 2, "env_groups", "<EchoEnv"),
        (EchoEnv(), 2, "env_groups", ""),
        (lambda: SyncVectorEnv([EchoEnv]), 2, "env_groups", "SyncVectorEnv"),
        (EchoEnv, 3, "env_groups", "3"),
        (EchoEnv, 0, "env_groups", "0"),
        ([pendulums((1,))[0], partial(LateSync, [EchoEnv])], 2, "create_env_fn", ""),
    ],
)
def test_refused_arguments(entry: Any, groups: Any, name: str, given: str) -> None:
    with refused(ValueError, name) as caught:
        SyncDataCollector(entry, None, frames_per_batch=10, env_groups=groups)
    assert given in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_async_vector_envs(mode: str) -> None:
    make = partial(AsyncVectorEnv, [EchoEnv] * 2, autoreset_mode=AutoresetMode[mode])
    with SyncDataCollector(make, parity_policy(), frames_per_batch=40, env_groups=2) as collector:
        for _ in range(2):
            td = collector.next()
            assert td.shape == (4, 10)
            done, steps = td["next", "done"][..., 0], td["next", "observation"][..., 2]
            assert torch.equal(
                td["observation"][:, 1:][~done[:, :-1]],
                td["next", "observation"][:, :-1][~done[:, :-1]],
            )
            assert (td["observation"][:, 1:, 2][done[:, :-1]] == 0).all()
            assert (steps > 0).all()


def test_ales_vector_env() -> None:
    ale_py = pytest.importorskip("ale_py.vector_env")
    make = partial(ale_py.AtariVectorEnv, "breakout", 2, num_threads=1)
    with SyncDataCollector(make, None, frames_per_batch=32, env_groups=2) as collector:
        collector.set_seed(0)
        td = collector.next()
    assert td.shape == (4, 8)
    assert np.array_equal(td["observation"][:, 1:], td["next", "observation"][:, :-1])
