"""Policies with a state: the recorded states equal the states of a plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from collect_support import IN_PROCESS, STACK, collecting
from echo_envs import ENTRIES as VECTOR_ENTRIES
from echo_envs import EchoEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from state_support import (
    ENTRIES,
    POLICIES,
    Counter,
    Loop,
    Net,
    T,
    assert_follows,
    boxes,
    entry_of,
    env_fns,
    gru_cell,
    nested,
    one,
    plain,
    seeded,
    three,
    zeros,
)
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import SyncDataCollector
from pycollect.policy.remote import PolicyNeeds
from pycollect.policy.runner import PolicyRunner


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("cut", [0, 2])
def test_states_follow_the_loop(kind: str, name: str, cut: int) -> None:
    (policy, shapes), (entry, count, batched) = seeded(name), entry_of(kind)
    initial = zeros(shapes, torch.float64 if name == "float64" else torch.float32)
    loop = Loop(env_fns(0, count), policy, initial, batched=batched, cut=cut)
    with collecting(
        IN_PROCESS, entry, policy, frames=T * count, max_frames_per_traj=cut
    ) as collector:
        for _ in range(3):
            assert_follows(collector.next(), loop.rollout(T))


@pytest.mark.parametrize("envs", [3, 10])
def test_is_init_marks_only_first_steps(envs: int) -> None:
    """Small frames of many environments are written to the slab several steps at a time."""

    def act(observation: torch.Tensor, is_init: torch.Tensor, count: torch.Tensor) -> Any:
        count = torch.where(is_init, 0, count) + 1
        return is_init[..., 0].long(), count

    policy = TensorDictModule(
        act, ["observation", "is_init", "count"], ["action", ("next", "count")]
    )
    with SyncDataCollector(
        env_fns(0, envs), policy, frames_per_batch=envs * T, policy_state={"count": (1,)}
    ) as collector:
        for _ in range(5):
            batch = collector.next()
            begun = batch["observation"][..., 2:] == 0
            assert torch.equal(batch["is_init"], begun)
            assert torch.equal(batch["action"], begun[..., 0].long())


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("kind", ["one", "list"])
def test_on_ray(kind: str) -> None:
    (policy, shapes), (entry, count, batched) = seeded("LSTMCell"), entry_of(kind)
    loops = [
        Loop(env_fns(w, count), policy, zeros(shapes), batched=batched)
        for w in range(STACK.workers)
    ]
    with collecting(STACK, entry, policy, frames=T * count) as collector:
        for _ in range(2):
            expected = torch.stack([loop.rollout(T) for loop in loops])
            assert_follows(collector.next(), expected)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 7),
    cut=st.integers(0, 4),
    each=st.booleans(),
    flag=st.booleans(),
)
def test_any_schedule_follows_the_loop(
    lengths: list[list[int]], steps: int, cut: int, each: bool, flag: bool
) -> None:
    policy, shapes = seeded("GRUCell")
    fns = [partial(EchoEnv, p, tuple(own)) for p, own in enumerate(lengths)]
    loop = Loop(fns, policy, zeros(shapes), batched=True, cut=cut)
    with SyncDataCollector(
        [fns],  # a list of one callable also makes a batch, of one
        policy,
        frames_per_batch=steps * len(fns),
        max_frames_per_traj=cut,
        reset_at_each_iter=each,
        set_truncated=flag,
    ) as collector:
        for number in range(4):
            if each and number:
                loop.start()
            assert_follows(collector.next(), loop.rollout(steps))


def test_nested_keys() -> None:
    torch.manual_seed(3)
    policy = nested(Net(nn.GRUCell(3, 4), gru_cell))
    loop = Loop(env_fns(0, 3), policy, {("memory", "h"): torch.zeros(4)}, batched=True)
    with collecting(IN_PROCESS, three, policy, frames=3 * T) as collector:
        assert_follows(collector.next(), loop.rollout(T))


def test_set_seed_and_random_frames_reset_states() -> None:
    policy, shapes = seeded("GRUCell")
    env = one(0)()
    with collecting(
        IN_PROCESS, lambda _: env, policy, frames=T, init_random_frames=T, set_truncated=True
    ) as collector:
        random = collector.next()
        assert (random["h"] == 0).all()
        assert (random["next", "h"] == 0).all()
        following = collector.next()
        assert (following["h"][0] == 0).all()
        assert (following["h"][-1] != 0).any() or following["next", "done"][-2]
        collector.set_seed(0)
        loop = Loop([one(0)], policy, zeros(shapes), batched=False)
        loop.envs[0].episode = env.episode - 1
        loop.start()
        assert_follows(collector.next(), loop.rollout(T))


def test_private_states_reach_only_the_policy() -> None:
    policy = TensorDictModule(
        lambda x, h: (h.long() % 2, h + 1), ["observation", "_h"], ["action", ("next", "_h")]
    )
    with collecting(IN_PROCESS, one, policy, frames=T, policy_state={"_h": ()}) as collector:
        td = collector.next()
    assert td["action"].tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0]  # episodes of 3, 1 and 4 steps
    assert not any("_h" in str(key) for key in td.keys(True, True))


def test_frames_of_the_past_as_a_state() -> None:
    """The state is the observation itself, which the environment and the recorder overwrite."""
    policy = TensorDictModule(
        lambda x, before: ((x - before).sum(-1).gt(1).long(), x),
        ["observation", "before"],
        ["action", ("next", "before")],
    )
    with collecting(
        IN_PROCESS, three, policy, frames=3 * T, policy_state={"before": (3,)}
    ) as collector:
        td = collector.next()
    assert torch.equal(td["next", "before"], td["observation"])
    first = td["collector", "traj_ids"].diff(prepend=torch.full((3, 1), -1)) != 0
    assert (td["before"][first] == 0).all()
    assert torch.equal(td["before"][:, 1:][~first[:, 1:]], td["observation"][:, :-1][~first[:, 1:]])


def test_a_next_output_that_is_not_read_is_recorded_under_next() -> None:
    policy = TensorDictModule(
        lambda x: (x[..., 2].long() % 2, x.sum(-1)), ["observation"], ["action", ("next", "sum")]
    )
    with collecting(IN_PROCESS, three, policy, frames=3 * T) as collector:
        td = collector.next()
    assert torch.equal(td["next", "sum"], td["observation"].sum(-1))
    assert td.get("sum", None) is None


def test_act_returns_outputs_then_next_states() -> None:
    env = boxes(5)
    current = {("observation",): torch.rand(5, 3)}
    runner = PolicyRunner(plain("b", "a"), PolicyNeeds(env.spec, {"a": (), "b": (2,)}), current)
    assert [state.leaf.key for state in runner.states] == [("a",), ("b",)]
    with torch.no_grad():
        action, a, b = runner.act()
    assert torch.equal(action, current["observation",][:, :2])
    assert a.shape == (5,)
    assert b.shape == (5, 2)


VECTOR = ["SyncVectorEnv NEXT_STEP", "SyncVectorEnv SAME_STEP", "ignores masks"]


@pytest.mark.parametrize("kind", VECTOR)
def test_vector_environments(kind: str) -> None:
    """The state restarts after an episode, even if a dummy cell follows its end."""
    with collecting(
        IN_PROCESS, VECTOR_ENTRIES[kind], Counter(), frames=3 * T, policy_state={"count": (1,)}
    ) as collector:
        td = torch.cat([collector.next() for _ in range(3)], -1)
    ids = td["collector", "traj_ids"]
    for row, own in zip(ids, td["count"].squeeze(-1), strict=True):
        for number in row[row >= 0].unique():
            counted = own[row == number]
            assert torch.equal(counted, torch.arange(len(counted), dtype=torch.float32))
    dummies = ids < 0
    assert dummies.any() == (kind == "ignores masks")
    assert (td["count"][dummies] == 0).all()
    assert (td["next", "count"][dummies] == 0).all()


class PrivateEnv(EchoEnv):
    """An environment with one observation that only the policy reads."""

    def __init__(self) -> None:
        super().__init__()
        own = self.observation_space
        self.observation_space = gym.spaces.Dict(seen=own, _hidden=own)

    def observe(self) -> Any:
        seen = np.array([self.number, self.episode, self.steps], np.float32)
        return {"seen": seen, "_hidden": 2 * seen}


@pytest.mark.parametrize("entry", [PrivateEnv, [PrivateEnv, PrivateEnv]])
def test_private_observations_reach_only_the_policy(entry: Any) -> None:
    policy = TensorDictModule(
        lambda seen, hidden: ((hidden - seen)[..., 2].long() % 2, hidden.sum(-1)),
        ["seen", "_hidden"],
        ["action", ("deep", "_sum")],
    )
    with SyncDataCollector(entry, policy, frames_per_batch=2 * T) as collector:
        td = collector.next()
    assert torch.equal(td["action"], td["seen"][..., 2].long() % 2)
    assert not any("_" in part[:1] for key in td.keys(True, True) for part in parts(key))


def parts(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key
