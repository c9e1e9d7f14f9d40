"""P PettingZoo environments as an EnvBatch, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.data.layout import Key
from pycollect.envs.agent_rows import ROOT_FLAGS, STEP_COUNT, AgentsRow
from pycollect.envs.agents import AgentGroup, agent_groups, agents_sampler
from pycollect.envs.base import Arrays, BoolArray, EnvBatch, EnvSpec, check_seeds
from pycollect.envs.info_rows import stacked_entry
from pycollect.envs.random_actions import Sampler
from pycollect.envs.single import close_quietly
from pycollect.envs.spaces import key_name

_METHODS = ("reset", "step", "observation_space", "action_space")


def is_pettingzoo_env(value: Any) -> bool:
    """Return whether `value` has PettingZoo's parallel or AEC API, without importing PettingZoo."""
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
        ValueError: The environment is turn-based, and PettingZoo cannot convert it.
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

    parallel = aec_to_parallel(env)
    if hasattr(env, "group_map"):
        parallel.group_map = env.group_map
    return parallel


class PettingZooEnvs(EnvBatch):
    """P environments with PettingZoo's parallel API and equal groups of agents.

    An episode ends when no agent is left. It has `terminated` if all agents of its last step have
    terminated, otherwise `truncated`. An absent agent has zero observations, all flags set, and a
    mask of ``False``.

    Args:
        envs: The environments, with the parallel or the AEC API.
        batched: Whether there is a dimension P.

    Raises:
        ValueError: The groups of the environments differ, or `as_parallel` or `agent_groups`
            raises.
    """

    def __init__(self, envs: Sequence[Any], batched: bool) -> None:
        self._envs = [as_parallel(env) for env in envs]
        self._groups = agent_groups(self._envs[0])
        _check_alike(self._envs, self._groups)
        groups = self._groups
        self.spec = EnvSpec(
            batch_size=(len(envs),) if batched else (),
            observation=(*(leaf for group in groups for leaf in _observed(group)), *ROOT_FLAGS),
            ends=tuple(leaf.key for leaf in ROOT_FLAGS),
            step_only=tuple(group.reward for group in groups),
            rewards=tuple(group.reward.key for group in groups),
            action=tuple(leaf for group in groups for leaf in group.action),
            nodes={key: node for group in groups for key, node in group.nodes.items()},
        )
        self._batched, self._one_action = batched, len(self.spec.action) == 1
        self._sampler = agents_sampler(groups, len(envs), batched)
        self._closed = False
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
                f"group of {list(by_name)}, got {key_name(key)}"
            )
        return by_name[key[0]]

    def info_shape(self, key: Key) -> tuple[int, ...]:
        """Return the dimension of the group's agents; see `EnvBatch.info_shape`."""
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
        """See `EnvBatch.action_sampler`."""
        return self._sampler

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """Return random actions that the current action masks allow."""
        rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        drawn = [leaf[0] for leaf in self._sampler(1, rng)]
        for place, (mask, start) in self._masked.items():
            drawn[place][...] = np.where(mask, rng.random(mask.shape), -1.0).argmax(-1) + start
        return tuple(map(torch.from_numpy, drawn))

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset every environment, with one seed each; see `EnvBatch.reset`."""
        each: Sequence[int | None] = [None] * len(self._envs)
        if seeds is not None:
            each = check_seeds(seeds, len(self._envs))
        for row, seed in zip(self._rows, each, strict=True):
            row.reset(seed)
        return self._buffers

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step every environment; the next call overwrites the returned buffers."""
        leaves = (action,) if self._one_action else action
        if not self._batched:
            self._rows[0].step(leaves)
        else:
            for p, row in enumerate(self._rows):
                row.step([leaf[p] for leaf in leaves])
        return self._buffers, None, None, None

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset the environments selected by `done` (bool [P])."""
        for p in np.flatnonzero(done):
            self._rows[p].reset(None)
        return self._buffers

    def close(self) -> None:
        """Close the environments; see `EnvBatch.close`."""
        if not self._closed:
            self._closed = True
            for env in self._envs:
                close_quietly(env)


def _observed(group: AgentGroup) -> tuple[Leaf, ...]:
    return (*group.observation, *group.action_mask, group.mask, *group.flags)


def _check_alike(envs: Sequence[Any], groups: tuple[AgentGroup, ...]) -> None:
    for i, env in enumerate(envs[1:], 1):
        others = agent_groups(env)
        if [group.signature for group in others] != [group.signature for group in groups]:
            raise ValueError(
                "create_env_fn: the environments of a list must have equal agents and spaces, got "
                f"{groups} from environment 0 and {others} from environment {i}"
            )
