"""An environment as a policy sees it: its leaves, in another process and for many workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycollect._core import Leaf
from pycollect.batch.layout import Key, Node
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.policy.program.steps import show_all


@dataclass(frozen=True)
class EnvForm:
    """What a policy has to know of the environments of one worker; pickles.

    Attributes:
        num_envs: P.
        others: EnvBatch's of the same names.
    """

    num_envs: int
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    action_space: Any
    ends: tuple[Key, ...]
    takes_tensors: bool
    casts_actions: bool
    passes_states_on: bool
    nodes: tuple[tuple[Key, Node], ...]

    @classmethod
    def of(cls, env: EnvBatch) -> EnvForm:
        """Return the form of a worker's environments.

        Raises:
            NotImplementedError: An observation or action is not a tensor on the host.
        """
        extras = [extra.key for extra in (*env.extras, *env.action_extras)]
        if extras:
            raise NotImplementedError(
                "inference: 'central' needs observations and actions that are tensors of fixed "
                f"shapes, but {show_all(extras)} are other data; use inference=None"
            )
        if env.staying:
            raise NotImplementedError(
                "inference: 'central' needs environments on the CPU, but these are on "
                f"{env.device}; use inference=None"
            )
        return cls(
            env.num_envs,
            env.observation,
            env.action,
            env.action_space,
            env.ends,
            env.takes_tensors,
            env.casts_actions,
            env.passes_states_on,
            tuple(env.nodes.items()),
        )


class FormedEnv(EnvBatch):
    """Environments of that form, of several workers side by side. They are never stepped."""

    batched = True

    def __init__(self, form: EnvForm, workers: int) -> None:
        self.num_envs = form.num_envs * workers
        self.observation, self.action = form.observation, form.action
        self.action_space, self.ends = form.action_space, form.ends
        self.takes_tensors, self.casts_actions = form.takes_tensors, form.casts_actions
        self.passes_states_on, self.nodes = form.passes_states_on, dict(form.nodes)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """They are elsewhere."""
        raise NotImplementedError

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """They are elsewhere."""
        raise NotImplementedError

    def reset_done(self, done: BoolArray) -> Arrays:
        """They are elsewhere."""
        raise NotImplementedError

    def close(self) -> None:
        """They are elsewhere."""
