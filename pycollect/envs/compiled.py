"""C++ environments of somebody's extension module (`pycollect/python_env.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycollect._core import CompiledEnv, Leaf

from .base import Arrays, BoolArray, EnvBatch, Sampler, check_seeds
from .single import close_quietly
from .spaces import RESERVED_KEYS, action_leaves


def is_compiled_env(value: Any) -> bool:
    """Whether it is an object of a class that `python_env.h` made."""
    return hasattr(type(value), "__pycollect_env__")


class CompiledEnvBatch(EnvBatch):
    """P environments that a recorder steps itself, without Python; a batch, also if P is 1.

    Args:
        env: whose object; its environments have been reset.

    Raises:
        ValueError: its module was compiled against another form of the header; no environment, an
            observation with a key of the collector's own, no action, or an `action_space` of other
            leaves than the actions'.
    """

    def __init__(self, env: Any) -> None:
        self.compiled: CompiledEnv = CompiledEnv(env)
        self.num_envs = self.compiled.num_envs
        self.batched = True
        self.observation = tuple(self.compiled.observation)
        self.action = tuple(self.compiled.action)
        self.action_space = getattr(env, "action_space", None)
        self._check_leaves()
        arrays = self.compiled.observations
        self._arrays: Arrays = arrays[0] if len(arrays) == 1 else arrays
        self._outcome = self.compiled.outcome
        self._env = env
        self._closed = False

    def _check_leaves(self) -> None:
        for leaf in self.observation:
            if leaf.key[0] in RESERVED_KEYS:
                raise ValueError(
                    f"create_env_fn: the key {leaf.key[0]!r} belongs to the collector (reserved: "
                    f"{', '.join(sorted(RESERVED_KEYS))}), got it among the C++ environments' "
                    "observations"
                )
        if not self.action:
            raise ValueError("create_env_fn: expected C++ environments with an action, got none")
        if self.action_space is not None and action_leaves(self.action_space) != self.action:
            raise ValueError(
                f"action_space: expected a space of the C++ environments' actions "
                f"{list(self.action)}, got {self.action_space}"
            )

    @property
    def num_seeds(self) -> int:
        """P, or 1 where all environments are made from one seed."""
        return self.compiled.num_seeds

    def action_sampler(self) -> Sampler:
        """See `EnvBatch.action_sampler`; one that raises where there is no `action_space`."""
        return _NoSampler(self.action) if self.action_space is None else super().action_sampler()

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """See `EnvBatch.reset`."""
        if seeds is not None:
            self.compiled.seed(check_seeds(seeds, self.num_seeds))
        self.compiled.reset_all()
        return self._arrays

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """See `EnvBatch.step`."""
        self.compiled.step(action if isinstance(action, tuple) else (action,))
        return self._arrays, *self._outcome

    def reset_done(self, done: BoolArray) -> Arrays:
        """See `EnvBatch.reset_done`."""
        self.compiled.reset(done)
        return self._arrays

    def close(self) -> None:
        """Call the object's own `close`, if it has one; see `EnvBatch.close`."""
        if not self._closed:
            self._closed = True
            if hasattr(self._env, "close"):
                close_quietly(self._env)


class _NoSampler:
    """Says that nobody knows which actions there are."""

    def __init__(self, leaves: tuple[Leaf, ...]) -> None:
        self.leaves = leaves

    def draw(
        self, steps: int, rng: np.random.Generator | Sequence[np.random.Generator]
    ) -> tuple[npt.NDArray[Any], ...]:
        raise ValueError(
            "policy: expected one, since random actions of C++ environments are drawn from the "
            "attribute action_space of their class, a Gymnasium space, which is missing"
        )
