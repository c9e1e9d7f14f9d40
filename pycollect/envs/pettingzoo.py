"""P PettingZoo environments as an EnvBatch, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.data.frame import FLAGS
from pycollect.data.layout import Key, show
from pycollect.envs.agents import AgentGroup, GroupRow, agent_groups
from pycollect.envs.base import (
    Arrays,
    BoolArray,
    EnvBatch,
    EnvSpec,
    observation_of,
    reset_env,
    seed_each,
    step_values,
)
from pycollect.envs.info_rows import stacked_entry
from pycollect.envs.random_actions import Rng, Sampler, make_sampler
from pycollect.envs.spaces import Array, describe

ROOT_FLAGS = tuple(Leaf((flag,), "bool", (1,)) for flag in FLAGS)
"""Leaves of an episode's flags."""

STEP_COUNT = Leaf(("step_count",), "int64", (1,))

_METHODS = ("reset", "step", "observation_space", "action_space")


def is_pettingzoo_env(value: Any) -> bool:
    """Return whether `value` has PettingZoo's parallel or AEC API, without importing PettingZoo."""
    kinds = (kind for kind in type(value).__mro__ if kind.__module__.startswith("pettingzoo."))
    if any(kind.__name__ in ("ParallelEnv", "AECEnv") for kind in kinds):
        return True
    return hasattr(value, "possible_agents") and all(
        callable(getattr(value, name, None)) for name in _METHODS
    )


def as_parallel(env: Any) -> Any:
    """Return the environment, or a turn-based one converted by PettingZoo to the parallel API."""
    if not callable(getattr(env, "agent_iter", None)):
        return env
    if not env.metadata.get("is_parallelizable", False):
        raise ValueError(
            f"create_env_fn: expected a parallel environment, got {env}, in which agents take "
            "turns; set metadata['is_parallelizable'] if its state changes only after the last "
            "agent's turn, else use TorchRL's PettingZooWrapper(env, use_mask=True)"
        )
    from pettingzoo.utils.conversions import aec_to_parallel

    parallel = aec_to_parallel(env)
    if hasattr(env, "group_map"):
        parallel.group_map = env.group_map
    return parallel


class AgentsRow:
    """One environment that writes its observations, flags and rewards into given arrays.

    Its episodes are truncated after `limit` steps unless that is 0. `infos` has the infos of the
    last step by agent.
    """

    def __init__(
        self, env: Any, groups: Sequence[AgentGroup], memory: Mapping[Any, Array], limit: int
    ) -> None:
        self._env, self._step, self._limit = env, env.step, limit
        places = accumulate([len(group.action) for group in groups], initial=0)
        self._groups = [
            GroupRow(group, memory, place) for group, place in zip(groups, places, strict=False)
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


def _check_by_agent(method: str, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{method}: expected a dict of {name} by agent, got {describe(value)}")


class PettingZooEnvs(EnvBatch):
    """P environments with PettingZoo's parallel API and equal groups of agents.

    An episode ends when no agent is left. It has `terminated` if all agents of its last step have
    terminated, otherwise `truncated`. An absent agent has zero observations, all flags set, and a
    mask of ``False``.
    """

    def __init__(self, envs: Sequence[Any], batched: bool) -> None:
        self._envs = [as_parallel(env) for env in envs]
        self._groups = agent_groups(self._envs[0])
        _check_alike(self._envs, self._groups)
        groups = self._groups
        observed = ((*g.observation, *g.action_mask, g.mask, *g.flags) for g in groups)
        self.spec = EnvSpec(
            batch_size=(len(envs),) if batched else (),
            observation=(*chain.from_iterable(observed), *ROOT_FLAGS),
            ends=tuple(leaf.key for leaf in ROOT_FLAGS),
            step_only=tuple(group.reward for group in groups),
            rewards=tuple(group.reward.key for group in groups),
            action=tuple(leaf for group in groups for leaf in group.action),
            nodes={key: node for group in groups for key, node in group.nodes.items()},
        )
        self._batched, self._one_action = batched, len(self.spec.action) == 1
        self._sampler = _agents_sampler(groups, len(envs), batched)
        self.owned = self._envs
        self._make_rows(0)

    def _make_rows(self, limit: int) -> None:
        leaves = (*self.spec.observation, *self.spec.step_only)
        rows = self.spec.rows
        self._buffers = tuple(np.zeros((*rows, *leaf.shape), leaf.dtype) for leaf in leaves)
        places = {leaf.key: place for place, leaf in enumerate(leaves)}
        self._rows = [
            AgentsRow(
                env,
                self._groups,
                {
                    key: self._buffers[place][p] if rows else self._buffers[place]
                    for key, place in places.items()
                },
                limit,
            )
            for p, env in enumerate(self._envs)
        ]
        actions = [leaf.key for leaf in self.spec.action]
        self._masked = {  # index of the action: its mask, and the first choice
            actions.index((group.name, "action")): (
                self._buffers[places[group.name, "action_mask"]],
                choices.start,
            )
            for group in self._groups
            if (choices := group.masked_choices) is not None
        }

    def _group_of(self, key: Key) -> AgentGroup:
        by_name = {group.name: group for group in self._groups}
        if len(key) < 2 or key[0] not in by_name:
            raise ValueError(
                "info_keys: expected tuples of a group and a key of its agents' infos, with a "
                f"group of {list(by_name)}, got {show(key)}"
            )
        return by_name[key[0]]

    def info_shape(self, key: Key) -> tuple[int, ...]:
        return (len(self._group_of(key).agents),)

    def tap_info(self) -> Callable[[Key], list[Any]]:
        """See `EnvBatch.tap_info`; the entry (group, k) stacks k of the infos of its agents."""

        def read(key: Key) -> list[Any]:
            agents = self._group_of(key).agents
            return [stacked_entry(row.infos, agents, key[1:]) for row in self._rows]

        return read

    def truncate_after(self, frames: int) -> bool:
        """Truncate all agents of an episode after `frames` steps; add "step_count"."""
        self.spec = replace(self.spec, observation=(*self.spec.observation, STEP_COUNT))
        self._make_rows(frames)
        return True

    @property
    def draws_ahead(self) -> bool:
        """Whether there are no action masks, which random actions must respect."""
        return not self._masked

    def action_sampler(self) -> Sampler:
        return self._sampler

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """Return random actions that the current action masks allow."""
        rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        drawn = [leaf[0] for leaf in self._sampler(1, rng)]
        for place, (mask, start) in self._masked.items():
            drawn[place][...] = np.where(mask, rng.random(mask.shape), -1.0).argmax(-1) + start
        return tuple(map(torch.from_numpy, drawn))

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        each = seed_each(seeds, len(self._envs))
        for row, seed in zip(self._rows, each, strict=True):
            row.reset(seed)
        return self._buffers

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        leaves = (action,) if self._one_action else action
        if not self._batched:
            self._rows[0].step(leaves)
        else:
            for p, row in enumerate(self._rows):
                row.step([leaf[p] for leaf in leaves])
        return self._buffers, None, None, None

    def reset_done(self, done: BoolArray) -> Arrays:
        for p in np.flatnonzero(done):
            self._rows[p].reset(None)
        return self._buffers


def _agents_sampler(groups: Sequence[AgentGroup], num_envs: int, batched: bool) -> Sampler:
    samplers = [make_sampler(group.action_space, len(group.agents), True) for group in groups]

    def draw(steps: int, rng: Rng) -> tuple[Array, ...]:
        each = [rng] * num_envs if isinstance(rng, np.random.Generator) else rng
        rows = [
            [leaf for sampler in samplers for leaf in sampler(steps, generator)]
            for generator in each
        ]
        if not batched:
            return tuple(rows[0])
        return tuple(np.stack(leaf, axis=1) for leaf in zip(*rows, strict=True))

    return draw


def _check_alike(envs: Sequence[Any], groups: tuple[AgentGroup, ...]) -> None:
    for i, env in enumerate(envs[1:], 1):
        others = agent_groups(env)
        if [group.signature for group in others] != [group.signature for group in groups]:
            raise ValueError(
                "create_env_fn: the environments of a list must have equal agents and spaces, got "
                f"{groups} from environment 0 and {others} from environment {i}"
            )
