"""C++ environments from an extension module (`pycollect/python_env.h`) as an EnvBatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from pycollect._core import CompiledEnv
from pycollect.envs.base import Arrays, BoolArray, EnvBatch, EnvSpec, seed_each
from pycollect.envs.random_actions import Rng, Sampler
from pycollect.envs.spaces import RESERVED_OBSERVATIONS, action_leaves


def is_compiled_env(value: Any) -> bool:
    """Return whether the class of `value` was made with `python_env.h`."""
    return hasattr(type(value), "__pycollect_env__")


class CompiledEnvBatch(EnvBatch):
    """P environments that a recorder steps without Python; batched even if P is 1."""

    def __init__(self, env: Any) -> None:
        self.compiled: CompiledEnv = CompiledEnv(env)
        self.spec = EnvSpec(
            batch_size=(self.compiled.num_envs,),
            observation=tuple(self.compiled.observation),
            action=tuple(self.compiled.action),
            action_space=getattr(env, "action_space", None),
        )
        self._check_leaves()
        arrays = self.compiled.observations
        self._arrays: Arrays = arrays[0] if len(arrays) == 1 else arrays
        self._outcome = self.compiled.outcome
        self.owned = [env]

    def _check_leaves(self) -> None:
        for leaf in self.spec.observation:
            if leaf.key[0] in RESERVED_OBSERVATIONS:
                raise ValueError(
                    f"create_env_fn: the C++ environments return an observation {leaf.key[0]!r}, "
                    "but that key is reserved for the collector; rename it (reserved keys: "
                    f"{', '.join(sorted(RESERVED_OBSERVATIONS))})"
                )
        if not self.spec.action:
            raise ValueError("create_env_fn: expected C++ environments with an action, got none")
        space, action = self.spec.action_space, self.spec.action
        if space is not None and action_leaves(space) != action:
            raise ValueError(
                "action_space: expected a space with the leaves of the C++ environments' action, "
                f"{list(action)}, got {space}"
            )

    @property
    def num_seeds(self) -> int:
        return self.compiled.num_seeds

    def action_sampler(self) -> Sampler:
        """See `EnvBatch.action_sampler`; drawing raises an error if there is no `action_space`."""
        if self.spec.action_space is None:
            return _no_actions
        return super().action_sampler()

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        if seeds is not None:
            self.compiled.seed(seed_each(seeds, self.num_seeds))
        self.compiled.reset_all()
        return self._arrays

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        self.compiled.step(action if isinstance(action, tuple) else (action,))
        return self._arrays, *self._outcome

    def reset_done(self, done: BoolArray) -> Arrays:
        self.compiled.reset(done)
        return self._arrays


def _no_actions(steps: int, rng: Rng) -> NoReturn:
    """Raise ValueError, because the action space is unknown."""
    raise ValueError(
        "policy: random actions cannot be drawn, because the C++ environments have no "
        "action_space. Pass a policy, or set the attribute action_space of their class to a "
        "Gymnasium space"
    )
