"""A counting environment with PettingZoo's parallel API, and functions that compute its frames.

Number, episode and step determine the acting agents, observations and flags. A test can therefore
check any frame without access to the environment, which may run in another process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

LENGTHS = (3, 1, 4)
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
REWARDS = spaces.Box(-np.inf, np.inf, (2,), np.float32)

AGENTS = {
    "alike": ("agent_0", "agent_1", "agent_2"),
    "leaves": ("agent_0", "agent_1", "agent_2"),
    "joins": ("agent_0", "agent_1", "agent_2"),
    "different": ("scout", "tank_0", "tank_1"),
    "masked": ("agent_0", "agent_1", "agent_2"),
    "objectives": ("agent_0", "agent_1", "agent_2"),  # as "leaves", with two rewards per agent
}
ALIKE = ("alike", "leaves", "joins", "masked", "objectives")
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    **{kind: {"agent": AGENTS[kind]} for kind in ALIKE},
    "different": {name: (name,) for name in AGENTS["different"]},
}
KINDS = tuple(AGENTS)


def length_of(episode: int) -> int:
    return LENGTHS[episode % len(LENGTHS)]


def acts(kind: str, index: int, episode: int, step: int) -> bool:
    """Return whether the agent acts in the state after `step` steps."""
    if step >= length_of(episode):
        return False
    if kind in ("leaves", "objectives") and index == 1:
        return step < 2
    return step >= 1 if kind == "joins" and index == 2 else True


def is_shown(kind: str, index: int, episode: int, step: int) -> bool:
    """Return whether the dicts that lead to this state contain the agent."""
    return acts(kind, index, episode, step) or (step > 0 and acts(kind, index, episode, step - 1))


def flags_of(kind: str, index: int, episode: int, step: int) -> tuple[bool, bool]:
    """Return (terminated, truncated): even episodes terminate, odd ones are truncated."""
    if step == 0:
        return False, False
    if not is_shown(kind, index, episode, step):
        return True, True
    if acts(kind, index, episode, step):
        return False, False
    is_last = step == length_of(episode)
    return (False, True) if is_last and episode % 2 else (True, False)


class Crowd:
    """Three agents that observe (number, episode, step, agent); step and action give the reward."""

    render_mode = None

    def __init__(self, number: int = 0, kind: str = "alike") -> None:
        self.number, self.kind = number, kind
        self.metadata = {"name": f"crowd {number}"}
        self.possible_agents = list(AGENTS[kind])
        self.agents: list[str] = []
        self.episode, self.steps, self.closed = -1, 0, 0
        self.seeds: list[int | None] = []

    def observation_space(self, agent: str) -> Any:
        if self.kind == "masked":
            return spaces.Dict({"observation": BOX, "action_mask": spaces.MultiBinary(3)})
        if agent == "scout":
            return spaces.Dict({"where": BOX, "deep": spaces.Dict({"step": spaces.Discrete(9)})})
        return spaces.Discrete(9) if agent == "tank_1" else BOX

    def action_space(self, agent: str) -> Any:
        if agent == "scout":
            return spaces.Dict(
                {"go": spaces.Box(-1.0, 1.0, (2,), np.float64), "turn": spaces.Discrete(2)}
            )
        return spaces.MultiDiscrete([2, 3]) if agent == "tank_1" else spaces.Discrete(3)

    def reward_space(self, agent: str) -> Any:
        return REWARDS if self.kind == "objectives" else None

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        self.agents = self._acting()
        return self._shown(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert list(actions) == self.agents, "only present agents may act"
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
            if self.kind == "masked":
                assert choices(self.possible_agents.index(agent), self.steps)[action]
        self.steps += 1
        observations = self._shown()
        self.agents = self._acting()
        rewards = {
            agent: self._reward(i, total(actions[agent]) if agent in actions else 0.0)
            for i, agent in enumerate(self.possible_agents)
            if agent in observations
        }
        flags = {
            agent: flags_of(self.kind, i, self.episode, self.steps)
            for i, agent in enumerate(self.possible_agents)
            if agent in observations
        }
        terminated = {agent: own[0] for agent, own in flags.items()}
        truncated = {agent: own[1] for agent, own in flags.items()}
        return observations, rewards, terminated, truncated, {agent: {} for agent in flags}

    def _reward(self, index: int, action: float) -> Any:
        reward = reward_of(index, self.steps, action)
        return several(reward) if self.kind == "objectives" else reward

    def close(self) -> None:
        self.closed += 1

    def _acting(self) -> list[str]:
        return [
            agent
            for i, agent in enumerate(self.possible_agents)
            if acts(self.kind, i, self.episode, self.steps)
        ]

    def _shown(self) -> dict[str, Any]:
        return {
            agent: self._observation(i, agent)
            for i, agent in enumerate(self.possible_agents)
            if is_shown(self.kind, i, self.episode, self.steps)
        }

    def _observation(self, index: int, agent: str) -> Any:
        plain = np.array([self.number, self.episode, self.steps, index], np.float32)
        if self.kind == "masked":
            mask = np.array(choices(index, self.steps), np.int8)
            return {"observation": plain, "action_mask": mask}
        if agent == "scout":
            return {"deep": {"step": np.int64(self.steps)}, "where": plain}
        return np.int64(self.steps) if agent == "tank_1" else plain


def choices(index: int, step: int) -> list[bool]:
    """Return which of the three actions are allowed."""
    return [(index + step + choice) % 3 != 0 for choice in range(3)]


def total(action: Any) -> float:
    """Return the sum of all numbers in an action."""
    parts = action.values() if isinstance(action, dict) else [action]
    return float(sum(np.asarray(part).sum() for part in parts))


def reward_of(index: int, step: int, action: float) -> float:
    return step + 10.0 * index + 100.0 * action


def several(reward: float) -> Any:
    return np.array([reward, -reward / 2])


def crowd_fns(kind: str, worker: int, count: int = 3) -> list[Callable[[], Crowd]]:
    return [partial(Crowd, 10 * worker + p, kind) for p in range(count)]


class Informed(Crowd):
    """A crowd whose infos have numbers: a float, two ints, and a text."""

    def step(self, actions: Any) -> Any:
        *values, infos = super().step(actions)
        for agent in infos:
            place = self.possible_agents.index(agent)
            infos[agent] = {
                "note": self.steps + 10.0 * place,
                "deep": {"pair": np.array([self.episode, place])},
                "name": agent,
            }
            if not self.agents:
                infos[agent]["last"] = self.steps
        return *values, infos
