"""PettingZoo environments: the same frames as through TorchRL's PettingZooWrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agent_envs import Crowd
from tensordict.nn import TensorDictModule
from torchrl_support import IDS, assert_alike, collect

import pycollect

pytest.importorskip("torchrl")
pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv
from torchrl.collectors import Collector
from torchrl.envs import MarlGroupMapType, PettingZooWrapper

pytestmark = pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL is tested:UserWarning")


class ParallelCrowd(Crowd, ParallelEnv):  # type: ignore[misc]
    """A Crowd as a ParallelEnv; TorchRL also passes actions of agents that have left."""

    def step(self, actions: dict[str, Any]) -> Any:
        return super().step({agent: actions[agent] for agent in self.agents})


def policy_of(kind: str) -> Any:
    if kind == "masked":
        return TensorDictModule(
            lambda mask: mask.long().argmax(-1), [("agent", "action_mask")], [("agent", "action")]
        )
    return TensorDictModule(
        lambda seen: seen[..., 1:4].sum(-1).long() % 3,
        [("agent", "observation")],
        [("agent", "action")],
    )


class Truncating(ParallelCrowd):
    """Truncate agents that leave early; the others terminate at the end of the episode."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.agents:
            truncated, terminated = terminated, truncated
        return observations, rewards, terminated, truncated, infos


class Mixed(ParallelCrowd):
    """Truncate an agent in the step in which all others terminate."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if not self.agents:
            terminated, truncated = dict.fromkeys(terminated, True), dict.fromkeys(truncated, False)
            terminated["agent_1"], truncated["agent_1"] = False, True
        return observations, rewards, terminated, truncated, infos


def by_torchrl(kind: str, crowd: type[ParallelCrowd] = ParallelCrowd, **arguments: Any) -> Any:
    """Return the wrapper with options for agents that leave; its constructor resets."""
    inner = crowd(0, kind)
    env = PettingZooWrapper(inner, use_mask=True, done_on_any=False, **arguments)
    inner.episode = -1
    return env


def both(
    kind: str, policy: Any, crowd: type[ParallelCrowd] = ParallelCrowd, **arguments: Any
) -> tuple[list[Any], list[Any]]:
    theirs = collect(Collector, lambda: by_torchrl(kind, crowd), policy, **arguments)
    ours = collect(pycollect.SyncDataCollector, lambda: crowd(0, kind), policy, **arguments)
    return ours, theirs


@pytest.mark.parametrize("kind", ["alike", "masked"])
def test_frames(kind: str) -> None:
    assert_alike(*both(kind, policy_of(kind)))


def test_agents_that_leave() -> None:
    """TorchRL begins a trajectory after each frame in which an agent is done; pycollect does not.

    Episodes are the same.
    """
    ours, theirs = both("leaves", policy_of("leaves"))
    assert_alike(ours, theirs, (IDS,))
    done = torch.cat([batch["next", "done"].flatten() for batch in ours])
    ids = torch.cat([batch[IDS] for batch in ours])
    assert torch.equal(ids[1:] - ids[:-1], done[:-1].long())


def test_agents_that_are_truncated_before_the_others_terminate() -> None:
    """The agents of the last step decide: the episode has terminated."""
    ours, theirs = both("leaves", policy_of("leaves"), Truncating)
    assert_alike(ours, theirs, (IDS,))
    left = torch.cat([batch["next", "agent", "truncated"][..., 1, 0] for batch in ours])
    terminated = torch.cat([batch["next", "terminated"].flatten() for batch in ours])
    assert (left & terminated).any()


def test_agents_that_end_in_different_ways() -> None:
    """TorchRL sets neither flag of such an episode, pycollect sets "truncated"."""
    ours, theirs = both("alike", policy_of("alike"), Mixed)
    assert_alike(ours, theirs, (IDS, ("next", "truncated"), "truncated"))
    for our, their in zip(ours, theirs, strict=True):
        assert not (their["next", "terminated"] | their["next", "truncated"]).any()
        assert torch.equal(our["next", "truncated"], our["next", "done"])
    assert any(batch["next", "done"].any() for batch in ours)


class Informed(ParallelCrowd):
    """Return the step of each agent in its info."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        return observations, {agent: {"step": 0.0} for agent in infos}

    def step(self, actions: dict[str, Any]) -> Any:
        *values, infos = super().step(actions)
        return *values, {agent: {"step": float(self.steps)} for agent in infos}


def test_infos() -> None:
    """TorchRL records infos, pycollect does not."""
    infos = [(*at, "agent", "info") for at in ((), ("next",))]
    ours, theirs = both("alike", policy_of("alike"), Informed)
    assert all(key in theirs[0].keys(True) for key in infos)
    assert_alike(ours, [batch.exclude(*infos) for batch in theirs])


AGENTS_OWN = [
    (*at, "agent", flag) for at in ((), ("next",)) for flag in ("done", "terminated", "truncated")
]


def test_truncated_episodes() -> None:
    """TorchRL leaves the agents' flags unset; pycollect sets them."""
    ours, theirs = both("leaves", policy_of("leaves"), max_frames_per_traj=3)
    assert_alike(ours, theirs, (IDS, *AGENTS_OWN))
    for our, their in zip(ours, theirs, strict=True):
        for flag in ("done", "truncated"):
            cut = our["next", "truncated"].unsqueeze(-2)
            expected = their["next", "agent", flag] | cut
            assert torch.equal(our["next", "agent", flag], expected)


def test_groups_of_single_agents() -> None:
    """Discrete observations are integers, which TorchRL encodes as one-hot."""
    groups = MarlGroupMapType.ONE_GROUP_PER_AGENT
    theirs = by_torchrl("different", group_map=groups).rollout(7, break_when_any_done=False)
    with pycollect.SyncDataCollector(
        lambda: ParallelCrowd(0, "different"), None, frames_per_batch=7
    ) as collector:
        ours = collector.next()
    for at in ((), ("next",)):
        for group in ("scout", "tank_0", "tank_1"):
            our, their = ours[(*at, group)], theirs[(*at, group)]
            assert our.batch_size == their.batch_size == (7, 1)
            assert set(our.keys()) == set(their.keys())
            assert our["mask"].equal(their["mask"])
            assert our["done"].equal(their["done"])
        seen = ours[(*at, "tank_1", "observation")]
        assert torch.equal(seen, theirs[(*at, "tank_1", "observation")].long().argmax(-1))
        where = (*at, "scout", "observation", "where")
        assert torch.equal(ours[where], theirs[where])


@pytest.mark.slow
def test_particle_environments() -> None:
    """Both collectors have the same policy, and each episode begins in the same state."""
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    policy = TensorDictModule(
        lambda seen: (seen.sum(-1) * 10).long().abs() % 5,
        [("agent", "observation")],
        [("agent", "action")],
    )

    def make() -> Any:
        env = spread.parallel_env()
        reset = env.reset
        env.reset = lambda seed=None, options=None: reset(seed=7)
        return env

    theirs = collect(Collector, lambda: PettingZooWrapper(make(), use_mask=True), policy)
    assert_alike(collect(pycollect.SyncDataCollector, make, policy), theirs)
