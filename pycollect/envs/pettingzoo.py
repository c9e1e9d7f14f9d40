"""PettingZoo environments: P parallel environments with groups of agents, stepped one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.batch.frame import FLAGS

from .agents import AgentsSampler, Group, agent_groups
from .base import (
    Arrays,
    BoolArray,
    EnvBatch,
    Sampler,
    check_seeds,
    observation_of,
    reset_env,
    step_values,
)
from .single import close_quietly, make_act, make_observe
from .spaces import Array, describe

_ROOT_FLAGS = tuple(Leaf((flag,), "bool", (1,)) for flag in FLAGS)
_STEP_COUNT = Leaf(("step_count",), "int64", (1,))
_METHODS = ("reset", "step", "observation_space", "action_space")


def is_pettingzoo_env(value: Any) -> bool:
    """Whether it has PettingZoo's interface, parallel or AEC; PettingZoo is not imported."""
    if any(_is_base(kind) for kind in type(value).__mro__):
        return True
    return hasattr(value, "possible_agents") and all(
        callable(getattr(value, name, None)) for name in _METHODS
    )


def _is_base(kind: type) -> bool:
    return kind.__name__ in ("ParallelEnv", "AECEnv") and kind.__module__.startswith("pettingzoo.")


def as_parallel(env: Any) -> Any:
    """Return the environment, or a turn-based one converted by PettingZoo to the parallel API.

    Raises:
        ValueError: A turn-based environment that PettingZoo cannot convert.
    """
    if not callable(getattr(env, "agent_iter", None)):
        return env
    if not env.metadata.get("is_parallelizable", False):
        raise ValueError(
            f"create_env_fn: expected a parallel environment, got {env}, in which agents take "
            "turns; set metadata['is_parallelizable'] if its state changes only after the last "
            "agent's turn, else use TorchRL's PettingZooWrapper(env, use_mask=True)"
        )
    from pettingzoo.utils.conversions import aec_to_parallel

    return aec_to_parallel(env)


class PettingZooEnvs(EnvBatch):
    """P environments with PettingZoo's parallel API, of equal groups of agents.

    An episode ends when no agent is left. Its `terminated` is set if all agents have terminated,
    otherwise `truncated` is. Agents that are absent have zeros, all flags and an unset mask.

    Args:
        envs: The environments, not converted yet.
        batched: Whether there is a dimension P.

    Raises:
        ValueError: See `as_parallel` and `agent_groups`; or the environments' groups differ.
    """

    def __init__(self, envs: Sequence[Any], batched: bool) -> None:
        self.num_envs, self.batched = len(envs), batched
        self.action_space = None
        self._envs = [as_parallel(env) for env in envs]
        self._groups = agent_groups(self._envs[0])
        _check_alike(self._envs, self._groups)
        self.observation = (
            *(leaf for group in self._groups for leaf in _shown(group)),
            *_ROOT_FLAGS,
        )
        self.ends = tuple(leaf.key for leaf in _ROOT_FLAGS)
        self.step_only = tuple(group.reward for group in self._groups)
        self.rewards = tuple(leaf.key for leaf in self.step_only)
        self.action = tuple(leaf for group in self._groups for leaf in group.action)
        self.nodes = {key: node for group in self._groups for key, node in group.nodes.items()}
        self._sampler = AgentsSampler(self._groups, self.num_envs, batched)
        self._closed = False
        self._make_rows(0)

    def _make_rows(self, limit: int) -> None:
        leaves = (*self.observation, *self.step_only)
        lead = (self.num_envs,) if self.batched else ()
        self._buffers = tuple(np.zeros((*lead, *leaf.shape), leaf.dtype) for leaf in leaves)
        places = {leaf.key: place for place, leaf in enumerate(leaves)}
        self._rows = [
            _Row(
                env,
                self._groups,
                {
                    key: self._buffers[place][p] if self.batched else self._buffers[place]
                    for key, place in places.items()
                },
                limit,
            )
            for p, env in enumerate(self._envs)
        ]
        actions = [leaf.key for leaf in self.action]
        self._masked = {  # by the place of the action: its mask, and the first choice
            actions.index((group.name, "action")): (
                self._buffers[places[group.name, "action_mask"]],
                choices.start,
            )
            for group in self._groups
            if (choices := group.masked_choices) is not None
        }

    def truncate_after(self, frames: int) -> bool:
        """Truncate episodes, and all agents in them; "step_count" is part of the observation."""
        self.observation = (*self.observation, _STEP_COUNT)
        self._make_rows(frames)
        return True

    @property
    def draws_ahead(self) -> bool:
        """Whether no observation has a mask of actions, which random actions respect."""
        return not self._masked

    def action_sampler(self) -> Sampler:
        """See `EnvBatch.action_sampler`."""
        return self._sampler

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """Random actions among those that the current action masks allow."""
        rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        drawn = [leaf[0] for leaf in self._sampler.draw(1, rng)]
        for place, (mask, start) in self._masked.items():
            drawn[place][...] = np.where(mask, rng.random(mask.shape), -1.0).argmax(-1) + start
        return tuple(map(torch.from_numpy, drawn))

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset every environment, with one seed each; see `EnvBatch.reset`."""
        each: Sequence[int | None] = [None] * self.num_envs
        if seeds is not None:
            each = check_seeds(seeds, self.num_envs)
        for row, seed in zip(self._rows, each, strict=True):
            row.reset(seed)
        return self._buffers

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step every environment; the buffers are written again by the next call."""
        leaves = action if len(self.action) > 1 else (action,)
        if not self.batched:
            self._rows[0].step(leaves)
        else:
            for p, row in enumerate(self._rows):
                row.step([leaf[p] for leaf in leaves])
        return self._buffers, None, None, None

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset the environments whose `done` (bool [P]) is set."""
        for p in np.flatnonzero(done):
            self._rows[p].reset(None)
        return self._buffers

    def close(self) -> None:
        """Close the environments; see `EnvBatch.close`."""
        if not self._closed:
            self._closed = True
            for env in self._envs:
                close_quietly(env)


def _shown(group: Group) -> tuple[Leaf, ...]:
    return (*group.observation, *group.action_mask, group.mask, *group.flags)


def _check_alike(envs: Sequence[Any], groups: tuple[Group, ...]) -> None:
    for i, env in enumerate(envs[1:], 1):
        own = agent_groups(env)
        if [group.form for group in own] != [group.form for group in groups]:
            raise ValueError(
                "create_env_fn: the environments of a list must have equal agents and spaces, got "
                f"{groups} from environment 0 and {own} from environment {i}"
            )


class _Row:
    """One environment, and the memory that its observations, flags and rewards are written into.

    Args:
        env: The environment, parallel.
        groups: Its agents.
        memory: Arrays by key.
        limit: Number of steps after which an episode is truncated; 0 for never.
    """

    def __init__(
        self, env: Any, groups: Sequence[Group], memory: Mapping[Any, Array], limit: int
    ) -> None:
        self._env, self._step, self._limit = env, env.step, limit
        places = accumulate([len(group.action) for group in groups], initial=0)
        self._groups = [
            _GroupRow(group, memory, place) for group, place in zip(groups, places, strict=False)
        ]
        self._count = sum(len(group.agents) for group in groups)
        self._agents: Sequence[Hashable] = ()
        self._done, self._terminated, self._truncated = (memory[leaf.key] for leaf in _ROOT_FLAGS)
        self._step_count = memory.get(_STEP_COUNT.key)
        self._steps = 0
        self._is_plain = False  # all agents are there, and no flag is set

    def reset(self, seed: int | None) -> None:
        """Reset the environment and write its observations."""
        observations = observation_of(reset_env(self._env, seed))
        _check_by_agent("reset", "observations", observations)
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
        """Step the environment with the actions of the agents that are there."""
        result = step_values(self._step(self._actions_of(action)))
        observations, rewards, terminated, truncated, _ = result
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
        all_there = len(agents) == self._count == len(observations)
        none_ended = not (any(terminated.values()) or any(truncated.values()))
        is_plain = all_there and none_ended and not is_cut
        if not (is_plain and self._is_plain):
            self._write_flags(observations, terminated, truncated, is_cut)
        self._is_plain = is_plain

    def _actions_of(self, action: Sequence[Array]) -> dict[Hashable, Any]:
        actions: dict[Hashable, Any] = {}
        for group in self._groups:
            actions.update(zip(group.agents, group.actions_of(action), strict=True))
        if len(self._agents) < self._count:
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
        agents: The agents.
        actions_of: Returns the action of each agent, from the arrays of all groups' actions.
    """

    def __init__(self, group: Group, memory: Mapping[Any, Array], place: int) -> None:
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
        """Write the observation of each agent, zeros if it has none."""
        view, get = self._view, observations.get
        for i, (agent, observe) in enumerate(zip(self.agents, self._observe, strict=True)):
            value = get(agent)
            if value is None:
                self._write_none(i, agent, alive)
            elif view is not None:
                view[i] = observe(value)
            else:
                for own, leaf in zip(self._views, observe(value), strict=True):
                    own[i] = leaf
        if self._observe_mask is not None:
            self._write_action_mask(observations, alive)

    def _write_none(self, i: int, agent: Hashable, alive: Sequence[Hashable]) -> None:
        if agent in alive:
            raise ValueError(
                f"observation: expected one of each agent in env.agents ({list(alive)}), got none "
                f"of {agent!r}; remove the agent from env.agents, or return its observation"
            )
        for view in self._views:
            view[i] = 0

    def _write_action_mask(self, observations: Any, alive: Sequence[Hashable]) -> None:
        """Agents that do not act may do anything, so that no distribution is empty."""
        assert self._observe_mask is not None
        for i, agent in enumerate(self.agents):
            acts = agent in alive
            self._action_mask[i] = (
                self._observe_mask(observations[agent]["action_mask"]) if acts else True
            )

    def write_rewards(self, rewards: Any) -> None:
        """Write the reward of each agent, zero if it has none."""
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
        """Write the flags of agents that were reset."""
        for flag in self._flags:
            flag[:] = False

    def write_flags(
        self, observations: Any, terminated: Any, truncated: Any, is_cut: bool
    ) -> tuple[bool, bool, bool]:
        """Write the flags of each agent; return whether all are done, terminated, truncated.

        Agents that are absent have both flags, so that only the others decide about an episode.
        """
        ended = [bool(terminated.get(agent, agent not in observations)) for agent in self.agents]
        cut = [
            is_cut or bool(truncated.get(agent, agent not in observations)) for agent in self.agents
        ]
        done = [end or own for end, own in zip(ended, cut, strict=True)]
        for flag, values in zip(self._flags, (done, ended, cut), strict=True):
            flag[:] = values
        return all(done), all(ended), all(cut)


def _make_act(group: Group, place: int) -> Callable[[Sequence[Array]], Iterable[Any]]:
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
            act([own[i, ...] for own in arrays[place:end]]) for i in range(count)
        ]
    if isinstance(space, spaces.Discrete) or space.shape:
        return lambda arrays: arrays[place]  # numpy scalars, or rows
    return lambda arrays: [arrays[place][i, ...] for i in range(count)]


def _check_by_agent(method: str, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{method}: expected a dict of {name} by agent, got {describe(value)}")
