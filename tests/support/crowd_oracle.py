"""Policies for crowds of agents, and a model that checks every frame of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agent_envs import (
    AGENTS,
    GROUPS,
    acts,
    choices,
    flags_of,
    is_shown,
    length_of,
    reward_of,
    several,
)
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

FLAGS = ("done", "terminated", "truncated")
Cursor = tuple[int, int]


def choose(observation: torch.Tensor) -> torch.Tensor:
    """Return (episode + step + agent) % 3."""
    return observation[..., 1:4].sum(-1).long() % 3


def choose_allowed(mask: torch.Tensor) -> torch.Tensor:
    return mask.long().argmax(-1)


def policy_of(kind: str) -> Any:
    if kind == "masked":
        return TensorDictModule(choose_allowed, [("agent", "action_mask")], [("agent", "action")])
    if kind == "different":
        return act_apart
    return TensorDictModule(choose, [("agent", "observation")], [("agent", "action")])


def act_apart(td: TensorDictBase) -> TensorDictBase:
    """Act on a TensorDict, as a plain function."""
    where, step = td["scout", "observation", "where"], td["tank_1", "observation"]
    td["scout", "action", "go"] = where[..., 1:3].double() / 100
    td["scout", "action", "turn"] = where[..., 2].long() % 2
    td["tank_0", "action"] = choose(td["tank_0", "observation"])
    td["tank_1", "action"] = torch.stack([step % 2, step % 3], -1)
    return td


class CrowdOracle:
    """Check every frame against a model of each environment.

    Args:
        kind: Kind of the environments.
        policy: Whether `policy_of` acts; otherwise actions are random.
        limit: Value of `max_frames_per_traj`.
    """

    def __init__(self, kind: str, policy: bool = True, limit: int = 0) -> None:
        self.kind, self.policy, self.limit = kind, policy, limit
        self.next: dict[int, Cursor] = {}  # environment number: (episode, step) of its next frame
        self.ids: dict[Cursor, int] = {}
        self.frames = 0

    def check(self, rows: Sequence[tuple[Any, int, Any]]) -> None:
        """Check one batch, in the form that `Way.rows` returns."""
        for _, _, td in rows:
            first = next(iter(GROUPS[self.kind]))
            number, episode, step = self._at(td[0], first)
            expected = self.next.get(number, (0, 0))
            assert (episode, step) == expected, f"env {number}"
            for frame in td.unbind(0):
                self._frame(number, frame, first)
        assert sorted(self.ids.values()) == list(range(len(self.ids)))

    def _at(self, frame: Any, group: str) -> Cursor | Any:
        shown = frame[group, "observation"]
        if self.kind in ("different", "masked"):
            shown = shown["where" if self.kind == "different" else "observation"]
        return tuple(int(x) for x in shown[0][:3])

    def _frame(self, number: int, frame: Any, first: str) -> None:
        episode, step = self.next.get(number, (0, 0))
        assert self._at(frame, first) == (number, episode, step)
        cut = step + 1 == self.limit
        for group, agents in GROUPS[self.kind].items():
            for i, agent in enumerate(agents):
                index = AGENTS[self.kind].index(agent)
                at, place = (number, episode, step), f"{agent} of {(number, episode, step)}"
                self._shown(frame[group][i], agent, index, at, False, place)
                self._shown(frame["next", group][i], agent, index, (*at[:2], step + 1), cut, place)
                self._reward(frame, group, i, index, (episode, step), place)
        self._root(number, frame, (episode, step), cut)
        over = step + 1 == length_of(episode) or cut
        self.next[number] = (episode + 1, 0) if over else (episode, step + 1)
        self.frames += 1

    def _shown(
        self, td: Any, agent: str, index: int, at: tuple[int, int, int], cut: bool, place: str
    ) -> None:
        number, episode, step = at
        there = is_shown(self.kind, index, episode, step)
        plain = [number, episode, step, index] if there else [0, 0, 0, 0]
        observation = td["observation"]
        if self.kind == "masked":
            assert observation["observation"].tolist() == plain, place
            allowed = choices(index, step) if acts(self.kind, index, episode, step) else [True] * 3
            assert td["action_mask"].tolist() == allowed, place
        elif agent == "scout":
            assert observation["where"].tolist() == plain, place
            assert int(observation["deep", "step"]) == step, place
        elif agent == "tank_1":
            assert int(observation) == step, place
        else:
            assert observation.tolist() == plain, place
        assert bool(td["mask"]) == acts(self.kind, index, episode, step), place
        terminated, truncated = flags_of(self.kind, index, episode, step)
        truncated |= cut
        assert td["terminated"].tolist() == [terminated], place
        assert td["truncated"].tolist() == [truncated], place
        assert td["done"].tolist() == [terminated or truncated], place

    def _reward(self, frame: Any, group: str, i: int, index: int, at: Cursor, place: str) -> None:
        episode, step = at
        expected = 0.0
        if is_shown(self.kind, index, episode, step + 1):
            acted = acts(self.kind, index, episode, step)
            action = frame[group, "action"][i]
            values = action.values(True, True) if isinstance(action, TensorDictBase) else [action]
            total = float(sum(value.sum() for value in values))
            expected = reward_of(index, step + 1, total if acted else 0.0)
            if acted and self.policy and group == "agent" and self.kind != "masked":
                assert int(action) == (episode + step + index) % 3, place
        rewards = several(expected) if self.kind == "objectives" else [expected]
        assert frame["next", group, "reward"][i].tolist() == pytest.approx(rewards), place

    def _root(self, number: int, frame: Any, at: Cursor, cut: bool) -> None:
        episode, step = at
        over = step + 1 == length_of(episode)
        terminated = over and episode % 2 == 0
        truncated = cut or (over and episode % 2 == 1)
        expected = {"terminated": terminated, "truncated": truncated, "done": over or cut}
        for flag in FLAGS:
            assert frame[flag].tolist() == [False]
            assert frame["next", flag].tolist() == [expected[flag]], (number, at, flag)
        if self.limit:
            assert frame["step_count"].tolist() == [step]
            assert frame["next", "step_count"].tolist() == [step + 1]
        own = int(frame["collector", "traj_ids"])
        assert self.ids.setdefault((number, episode), own) == own
