"""Step one PettingZoo environment and write its results into arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.data.frame import FLAGS
from pycollect.envs.agents import AgentGroup
from pycollect.envs.base import observation_of, reset_env, step_values
from pycollect.envs.single import make_act, make_observe
from pycollect.envs.spaces import Array, describe

ROOT_FLAGS = tuple(Leaf((flag,), "bool", (1,)) for flag in FLAGS)
"""Leaves of an episode's flags."""

STEP_COUNT = Leaf(("step_count",), "int64", (1,))


class AgentsRow:
    """One environment that writes its observations, flags and rewards into given arrays.

    Args:
        env: The environment, with the parallel API.
        groups: Groups of its agents.
        memory: Arrays to write into, by key.
        limit: Number of steps after which an episode is truncated; 0 for no limit.

    Attributes:
        infos: Infos of the last step by agent.
    """

    def __init__(
        self, env: Any, groups: Sequence[AgentGroup], memory: Mapping[Any, Array], limit: int
    ) -> None:
        self._env, self._step, self._limit = env, env.step, limit
        places = accumulate([len(group.action) for group in groups], initial=0)
        self._groups = [
            _GroupRow(group, memory, place) for group, place in zip(groups, places, strict=False)
        ]
        self._count = sum(len(group.agents) for group in groups)
        self._agents: Sequence[Hashable] = ()
        in_groups = [agent for group in groups for agent in group.agents]
        self._reorders = in_groups != list(env.possible_agents)
        self._done, self._terminated, self._truncated = (memory[leaf.key] for leaf in ROOT_FLAGS)
        self._step_count = memory.get(STEP_COUNT.key)
        self._steps = 0
        self.infos: Any = {}
        self._is_plain = False  # all agents are present, and no flag is set

    def reset(self, seed: int | None) -> None:
        """Reset the environment and write its observations."""
        result = reset_env(self._env, seed)
        observations = observation_of(result)
        _check_by_agent("reset", "observations", observations)
        if isinstance(result[1], Mapping):
            for group in self._groups:
                group.check_masks(result[1])
        self._agents = list(self._env.agents)
        self._check_known(self._agents)
        self._steps = 0
        if self._step_count is not None:
            self._step_count[0] = 0
        for flag in (self._done, self._terminated, self._truncated):
            flag[0] = False
        for group in self._groups:
            group.write_observations(observations, self._agents)
            group.write_mask(self._agents)
            group.clear_flags()
        self._is_plain = len(self._agents) == self._count

    def step(self, action: Sequence[Array]) -> None:
        """Step the environment with the actions of the agents that are present."""
        result = step_values(self._step(self._actions_of(action)))
        observations, rewards, terminated, truncated, self.infos = result
        if not (type(observations) is type(terminated) is type(truncated) is dict):
            _check_by_agent("step", "observations", observations)
            _check_by_agent("step", "terminations", terminated)
            _check_by_agent("step", "truncations", truncated)
        self._steps += 1
        if self._step_count is not None:
            self._step_count[0] = self._steps
        self._agents = agents = self._env.agents
        for group in self._groups:
            group.write_observations(observations, agents)
            group.write_rewards(rewards)
        is_cut = self._steps == self._limit
        all_present = len(agents) == self._count == len(observations)
        none_ended = not (any(terminated.values()) or any(truncated.values()))
        is_plain = all_present and none_ended and not is_cut
        if not (is_plain and self._is_plain):
            self._write_flags(observations, terminated, truncated, is_cut)
        self._is_plain = is_plain

    def _actions_of(self, action: Sequence[Array]) -> dict[Hashable, Any]:
        actions: dict[Hashable, Any] = {}
        for group in self._groups:
            actions.update(zip(group.agents, group.actions_of(action), strict=True))
        if self._reorders or len(self._agents) < self._count:
            return {agent: actions[agent] for agent in self._agents}
        return actions

    def _write_flags(
        self, observations: Any, terminated: Any, truncated: Any, is_cut: bool
    ) -> None:
        agents = self._agents
        self._check_known(agents)
        done, all_terminated, all_truncated = True, True, True
        for group in self._groups:
            group.write_mask(agents)
            flags = group.write_flags(observations, terminated, truncated, is_cut)
            done &= flags[0]
            all_terminated &= flags[1]
            all_truncated &= flags[2]
        if not agents and not done:
            raise ValueError(
                f"step: {self._env} has no agents left, but some of them have neither terminated "
                "nor been truncated; set a flag of each agent when it leaves"
            )
        self._done[0] = done
        self._terminated[0] = all_terminated
        self._truncated[0] = all_truncated or (done and not all_terminated)

    def _check_known(self, agents: Sequence[Hashable]) -> None:
        known = [agent for group in self._groups for agent in group.agents]
        unknown = [agent for agent in agents if agent not in known]
        if unknown:
            raise ValueError(
                f"possible_agents: expected all agents of {self._env}, got {known} without "
                f"{unknown}; name every agent that may take part"
            )


class _GroupRow:
    """The agents of one group in one environment.

    Attributes:
        agents: Names of the agents.
        actions_of: Returns the action of each agent from the arrays of all groups' actions.
    """

    def __init__(self, group: AgentGroup, memory: Mapping[Any, Array], place: int) -> None:
        self.agents = group.agents
        self.actions_of = _make_act(group, place)
        self._observe = [
            make_observe(group.observation_space, f"agent {agent!r}") for agent in group.agents
        ]
        self._views = [memory[leaf.key] for leaf in group.observation]
        self._view = self._views[0] if len(self._views) == 1 else None
        self._observe_mask = None
        if group.mask_space is not None:
            self._observe_mask = make_observe(group.mask_space, f"group {group.name!r}")
            self._action_mask = memory[group.name, "action_mask"]
        self._mask = memory[group.mask.key]
        self._flags = [memory[leaf.key][:, 0] for leaf in group.flags]
        self._reward = memory[group.reward.key][:, 0]

    def write_observations(self, observations: Any, alive: Sequence[Hashable]) -> None:
        """Write the observation of each agent, or zeros if it has none."""
        view, get = self._view, observations.get
        for i, (agent, observe) in enumerate(zip(self.agents, self._observe, strict=True)):
            value = get(agent)
            if value is None:
                self._write_none(i, agent, alive)
            elif view is not None:
                view[i] = observe(value)
            else:
                for rows, leaf in zip(self._views, observe(value), strict=True):
                    rows[i] = leaf
        if self._observe_mask is not None:
            self._write_action_mask(observations, alive)

    def check_masks(self, infos: Any) -> None:
        """Raise a ValueError if an info has an action mask but the observation has none."""
        for agent in self.agents if self._observe_mask is None else ():
            if "action_mask" in (infos.get(agent) or ()):
                raise ValueError(
                    f"action_mask: expected in the observation of {agent!r}, got it in its info; "
                    "return a Dict observation with the entry 'action_mask', or use TorchRL's "
                    "PettingZooWrapper(env, use_mask=True, done_on_any=False)"
                )

    def _write_none(self, i: int, agent: Hashable, alive: Sequence[Hashable]) -> None:
        if agent in alive:
            raise ValueError(
                f"observation: expected one of each agent in env.agents ({list(alive)}), got none "
                f"of {agent!r}; remove the agent from env.agents, or return its observation"
            )
        for view in self._views:
            view[i] = 0

    def _write_action_mask(self, observations: Any, alive: Sequence[Hashable]) -> None:
        """Write the action masks; absent agents allow all actions, so no distribution is empty."""
        assert self._observe_mask is not None
        for i, agent in enumerate(self.agents):
            acts = agent in alive
            self._action_mask[i] = (
                self._observe_mask(observations[agent]["action_mask"]) if acts else True
            )

    def write_rewards(self, rewards: Any) -> None:
        """Write the reward of each agent, or zero if it has none."""
        try:
            self._reward[:] = [rewards.get(agent, 0.0) for agent in self.agents]
        except (TypeError, ValueError, AttributeError):
            raise ValueError(
                f"reward: expected a dict with one number per agent, got {describe(rewards)}"
            ) from None

    def write_mask(self, alive: Sequence[Hashable]) -> None:
        """Write which agents act."""
        self._mask[:] = [agent in alive for agent in self.agents]

    def clear_flags(self) -> None:
        """Clear the flags of all agents after a reset."""
        for flag in self._flags:
            flag[:] = False

    def write_flags(
        self, observations: Any, terminated: Any, truncated: Any, is_cut: bool
    ) -> tuple[bool, bool, bool]:
        """Write the flags of each agent; return whether all are done, terminated, truncated.

        An absent agent has both flags, so that only present agents determine those of the episode.
        """
        ended = [bool(terminated.get(agent, agent not in observations)) for agent in self.agents]
        cut = [
            is_cut or bool(truncated.get(agent, agent not in observations)) for agent in self.agents
        ]
        done = [end or stop for end, stop in zip(ended, cut, strict=True)]
        for flag, values in zip(self._flags, (done, ended, cut), strict=True):
            flag[:] = values
        return all(done), all(ended), all(cut)


def _make_act(group: AgentGroup, place: int) -> Callable[[Sequence[Array]], Iterable[Any]]:
    """Return `_GroupRow.actions_of`.

    Args:
        group: The agents.
        place: Index of the group's first array.
    """
    space, count, end = group.action_space, len(group.agents), place + len(group.action)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        act = make_act(space)
        if end - place == 1:
            return lambda arrays: [act(arrays[place][i, ...]) for i in range(count)]
        return lambda arrays: [
            act([leaf[i, ...] for leaf in arrays[place:end]]) for i in range(count)
        ]
    if isinstance(space, spaces.Discrete) or space.shape:
        return lambda arrays: arrays[place]  # numpy scalars, or rows
    return lambda arrays: [arrays[place][i, ...] for i in range(count)]


def _check_by_agent(method: str, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{method}: expected a dict of {name} by agent, got {describe(value)}")
