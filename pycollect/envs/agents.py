"""Groups of agents of a PettingZoo environment: leaves, random actions, and rows of results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.data.frame import FLAGS, ONE_REWARD
from pycollect.data.layout import Key, Node, show
from pycollect.envs.base import is_wrapped, observation_of, reset_env, step_values
from pycollect.envs.single import make_act, make_observe
from pycollect.envs.spaces import RESERVED_KEYS, Array, Space, describe, extra_spaces, leaf_spaces

_ACTION_MASK = "action_mask"
_MASKS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)


@dataclass(frozen=True)
class AgentGroup:
    """Agents with equal leaves and action spaces, stacked in the first dimension of the leaves."""

    name: str  # first part of the keys
    agents: tuple[Hashable, ...]  # names of the agents, in the order of `possible_agents`
    observation_space: Space  # observation space of the first agent, without its action mask
    mask_space: Space | None  # of one agent's entry "action_mask", or ``None``
    action_space: Space
    reward_shape: tuple[int, ...]  # shape of one agent's reward

    @property
    def observation(self) -> tuple[Leaf, ...]:
        key = (self.name, "observation")
        return self._stacked(self.observation_space, key, "observation_space")

    @property
    def action_mask(self) -> tuple[Leaf, ...]:
        """The bool leaf of the action mask; empty if the observation space has no mask."""
        if self.mask_space is None:
            return ()
        key = (self.name, _ACTION_MASK)
        (leaf,) = self._stacked(self.mask_space, key, "observation_space")
        return (Leaf(key, "bool", leaf.shape),)

    @property
    def mask(self) -> Leaf:
        """The leaf that is ``True`` for agents that act."""
        return Leaf((self.name, "mask"), "bool", (len(self.agents),))

    @property
    def flags(self) -> tuple[Leaf, ...]:
        return tuple(Leaf((self.name, flag), "bool", (len(self.agents), 1)) for flag in FLAGS)

    @property
    def reward(self) -> Leaf:
        return Leaf((self.name, "reward"), "float32", (len(self.agents), *self.reward_shape))

    @property
    def action(self) -> tuple[Leaf, ...]:
        return self._stacked(self.action_space, (self.name, "action"), "action_space")

    @property
    def nodes(self) -> dict[Key, Node]:
        """The nested TensorDicts of the group by key; all have the dimension of the agents."""
        leaves = (*self.observation, *self.action)
        keys = {leaf.key[:depth] for leaf in leaves for depth in range(1, len(leaf.key))}
        return {key: Node((len(self.agents),)) for key in sorted(keys)}

    @property
    def signature(self) -> tuple[Any, ...]:
        """Properties that must be equal for the groups of all environments of a batch."""
        leaves = (self.observation, self.action_mask, self.action, self.reward)
        return self.name, self.agents, leaves, self.action_space

    @property
    def masked_choices(self) -> spaces.Discrete | None:
        """The action space, if it is discrete and the action mask has one entry per choice."""
        action, mask = self.action_space, self.mask_space
        if mask is None or not isinstance(action, spaces.Discrete) or mask.shape != (action.n,):
            return None
        return action

    def _stacked(self, space: Space, key: Key, what: str) -> tuple[Leaf, ...]:
        for extra, child in extra_spaces(space, key, what):
            raise ValueError(
                f"{what}: expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of "
                f"them, got {child} at {show(extra.key)}; encode it in the environment"
            )
        count = len(self.agents)
        return tuple(
            Leaf(leaf.key, leaf.dtype, (count, *leaf.shape))
            for leaf, _ in leaf_spaces(space, key, what)
        )


Shapes = Mapping[Hashable, tuple[int, ...]]
"""Shapes of rewards by agent; agents that are missing have one number."""


def agent_groups(env: Any) -> tuple[AgentGroup, ...]:
    """Return the groups of a PettingZoo environment, in the order of `possible_agents`.

    As in TorchRL, agents ``name_0``, ``name_1``, ... form the group ``name``, and any other agent
    forms its own group. If the action spaces, or the leaves of observations or rewards, of agents
    ``name_i`` differ, each of them also forms its own group. An attribute `group_map` of the
    environment, a dict from names of groups to lists of agents, replaces these groups.

    Raises:
        ValueError: `possible_agents` is missing or empty, a name is repeated or reserved, a space
            has no fixed shape and numeric dtype, or `group_map` does not have each agent once, or
            groups agents with different spaces.
    """
    agents = _possible_agents(env)
    rewards = _reward_shapes(env, agents)
    if getattr(env, "group_map", None) is not None:
        return _mapped_groups(env, agents, rewards)
    by_name: dict[str, list[Hashable]] = {}
    for agent in agents:
        by_name.setdefault(_group_name(str(agent)), []).append(agent)
    groups: list[AgentGroup] = []
    for name, members in by_name.items():
        groups += _groups_of(env, name, members, rewards)
    _check_names(list(map(str, agents)))
    _check_names([group.name for group in groups])
    return tuple(groups)


def _mapped_groups(env: Any, agents: list[Hashable], rewards: Shapes) -> tuple[AgentGroup, ...]:
    chosen = env.group_map
    is_map = isinstance(chosen, Mapping) and all(
        isinstance(name, str) and name and isinstance(members, list | tuple) and members
        for name, members in chosen.items()
    )
    mapped = [agent for members in chosen.values() for agent in members] if is_map else []
    if len(mapped) != len(agents) or not all(agent in mapped for agent in agents):
        raise ValueError(
            f"group_map: expected a dict from names of groups to lists with each agent of {agents} "
            f"once, got {chosen!r}"
        )
    groups = []
    for name, members in chosen.items():
        group, *others = _groups_of(env, name, list(members), rewards)
        if others:
            raise ValueError(
                f"group_map: the agents of {name!r} must have equal action spaces, and equal keys, "
                f"dtypes and shapes of observations and rewards, got {list(members)}; put them "
                "into other groups"
            )
        groups.append(group)
    _check_names(list(chosen), "group_map")
    return tuple(groups)


def _possible_agents(env: Any) -> list[Hashable]:
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise ValueError(
            f"create_env_fn: expected an environment with possible_agents, got {env}; set that "
            "attribute to the list of all agents that may take part"
        )
    return agents


def _group_name(agent: str) -> str:
    name, _, number = agent.rpartition("_")
    return name if name and number.isdecimal() else agent


def _groups_of(env: Any, name: str, agents: list[Hashable], rewards: Shapes) -> list[AgentGroup]:
    """Return one group if the spaces and rewards of the agents are equal, else a group for each."""
    groups = [_group(env, name, agents, agent, rewards) for agent in agents]
    if all(group.signature == groups[0].signature for group in groups):
        return groups[:1]
    return [_group(env, str(agent), [agent], agent, rewards) for agent in agents]


def _group(
    env: Any, name: str, agents: Iterable[Hashable], typical: Hashable, rewards: Shapes
) -> AgentGroup:
    """Return a group of agents with the spaces of a typical one."""
    observation, mask = env.observation_space(typical), None
    if isinstance(observation, spaces.Dict) and isinstance(observation.get(_ACTION_MASK), _MASKS):
        mask = observation[_ACTION_MASK]
        rest = {key: child for key, child in observation.items() if key != _ACTION_MASK}
        observation = spaces.Dict(rest)
    reward = rewards.get(typical, ONE_REWARD.shape)
    return AgentGroup(name, tuple(agents), observation, mask, env.action_space(typical), reward)


def _reward_shapes(env: Any, agents: Sequence[Hashable]) -> Shapes:
    """Return ``(k,)`` for each agent with a `reward_space(agent)` of this shape, k > 1.

    A wrapper may make one number of several rewards, so one step of a wrapped environment decides.
    """
    declare = getattr(env, "reward_space", None)
    declared = {agent: declare(agent) for agent in agents} if callable(declare) else {}
    shapes = {
        agent: space.shape
        for agent, space in declared.items()
        if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0] > 1
    }
    if shapes and is_wrapped(env):
        rewards = _random_rewards(env)
        shapes = {
            agent: shape
            for agent, shape in shapes.items()
            if np.ndim(rewards.get(agent, (0,))) == 1
        }
    return shapes


def _random_rewards(env: Any) -> Mapping[Hashable, Any]:
    """Return rewards of a step with random actions that are equal in every run.

    Results that are no dicts count as empty; the first step of the collector refuses them.
    """
    observations, actions = _mapping(observation_of(reset_env(env, None))), {}
    for agent in env.agents:
        space, observation = copy.deepcopy(env.action_space(agent)), observations.get(agent)
        space.seed(0)
        is_discrete = isinstance(space, spaces.Discrete)
        mask = _mapping(observation).get(_ACTION_MASK) if is_discrete else None
        actions[agent] = space.sample(None if mask is None else np.asarray(mask, np.int8))
    return _mapping(step_values(env.step(actions))[1])


def _mapping(value: Any) -> Mapping[Hashable, Any]:
    return value if isinstance(value, Mapping) else {}


def _check_names(names: list[str], argument: str = "possible_agents") -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{argument}: expected distinct names of agents and groups, got {name!r} more "
                "than once; rename an agent"
            )
        if name in RESERVED_KEYS or name.startswith("_"):
            raise ValueError(
                f"{argument}: the name {name!r} is reserved for the collector; choose another name "
                f"(reserved: {', '.join(sorted(RESERVED_KEYS))}, and names that begin with _)"
            )


class GroupRow:
    """Writes the results of one group's agents in one environment into given arrays."""

    def __init__(self, group: AgentGroup, memory: Mapping[Any, Array], place: int) -> None:
        self.agents = group.agents
        self.actions_of = _make_act(group, place)  # each agent's action from all groups' arrays
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
        reward = memory[group.reward.key]
        self._reward = reward[:, 0] if group.reward_shape == ONE_REWARD.shape else reward
        self._no_reward = np.zeros(self._reward.shape[1:], np.float32)

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
        shape = self._no_reward.shape
        try:
            values = [rewards.get(agent, self._no_reward) for agent in self.agents]
            if type(None) in map(type, values):
                raise TypeError("numpy would record NaN")
            if shape and any(np.shape(value) != shape for value in values):
                raise ValueError("they would be broadcast")
            try:
                self._reward[:] = values
            except ValueError:  # perhaps a declared reward of shape [1]
                self._reward[:] = [np.asarray(value).reshape(shape) for value in values]
        except (TypeError, ValueError, AttributeError):
            expected = f"{shape[0]} numbers" if shape else "one number"
            raise ValueError(
                f"reward: expected a dict with {expected} per agent, got {_described(rewards)}; "
                "for several, add a method reward_space(agent) that returns a Box of shape [k]"
            ) from None

    def write_mask(self, alive: Sequence[Hashable]) -> None:
        self._mask[:] = [agent in alive for agent in self.agents]

    def clear_flags(self) -> None:
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


def _described(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return describe(values)
    return {agent: describe(value) for agent, value in values.items()}


def _make_act(group: AgentGroup, place: int) -> Callable[[Sequence[Array]], Iterable[Any]]:
    """Return `GroupRow.actions_of`."""
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
