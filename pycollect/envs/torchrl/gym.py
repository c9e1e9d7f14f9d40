"""Step TorchRL's GymEnv and GymWrapper through the Gymnasium environment inside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torchrl.data import Binary, Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import GymEnv, GymWrapper

from pycollect._core import Leaf
from pycollect.data.frame import FLAGS, ONE_REWARD
from pycollect.data.layout import Key
from pycollect.envs.base import Arrays, EnvBatch, EnvSpec, seed_each
from pycollect.envs.random_actions import Sampler
from pycollect.envs.single import SingleEnv, same, unwrap
from pycollect.envs.spaces import Array
from pycollect.envs.torchrl.specs import check_device, spec_leaves
from pycollect.errors import warn_user

Take = Callable[[Array], Any]
Decode = Callable[[Leaf], Take | None]
"""Returns a function from the policy's action, with the given leaf, to the inner action.

``None`` if no conversion is needed.
"""

Encode = Callable[[Any], Any]

_REPLACEABLE = ("_reset", "_step", "read_action", "read_done", "read_obs", "read_reward")


@dataclass(frozen=True)
class InnerSpec:
    """Actions and observations of a GymEnv's inner environment, in TorchRL's keys and encodings."""

    action: Leaf
    decode: Decode  # decodes actions of any shape and dtype, as `read_action` does
    observation: Sequence[tuple[Leaf, Encode | None]]  # in the order of its space, with encodings

    def applied_to(self, inner: EnvSpec) -> EnvSpec:
        """Return the EnvSpec of the inner environments, in TorchRL's keys and encodings."""
        observation = tuple(leaf for leaf, _ in self.observation)
        return replace(inner, observation=observation, action=(self.action,), casts_actions=False)

    def encoded(self, observe: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function like `observe` that also encodes the leaves."""
        encodings = [encode for _, encode in self.observation]
        return _encoder(observe, encodings) if any(encodings) else observe


def unwrapped(env: Any) -> EnvBatch | None:
    """Return an EnvBatch of the Gymnasium environment inside, or ``None`` if not possible."""
    spec = inner_spec(env)
    return None if spec is None else Unwrapped(env, spec)


def inner_spec(env: Any) -> InnerSpec | None:
    """Return the InnerSpec of a GymEnv or GymWrapper, or ``None`` if `env` must be stepped itself.

    The result is ``None`` if the inner environment could behave differently: for a subclass, a
    batch, frame skipping, info readers, replaced methods, or unsupported spaces. Supported are Box
    and Discrete, MultiBinary observations, and Dicts of these for observations.
    """
    if type(env) not in (GymEnv, GymWrapper):
        return None
    check_device(env)
    state, inner = vars(env), env._env
    plain = (
        isinstance(inner, gymnasium.Env)
        and not env.batch_size
        and env.wrapper_frame_skip == 1
        and not env.info_dict_reader
        and not env.run_type_checks
        and env._convert_actions_to_numpy
        and not any(name in state for name in _REPLACEABLE)
        and state.get("_compiled_step_and_maybe_reset") is None
    )
    if not plain or not _flags_and_reward_are_standard(env):
        return None
    action, observation = _action(env, inner.action_space), _observation(env, inner)
    if action is None or observation is None:
        return None
    return InnerSpec(*action, observation)


def _flags_and_reward_are_standard(env: Any) -> bool:
    flags = set(spec_leaves(env.full_done_spec, env.batch_size))
    has_flags = flags == {Leaf((flag,), "bool", (1,)) for flag in FLAGS}
    return has_flags and spec_leaves(env.full_reward_spec, env.batch_size) == (ONE_REWARD,)


def _action(env: Any, space: gymnasium.Space[Any]) -> tuple[Leaf, Decode] | None:
    """Return the action's leaf and decoder, or ``None`` if the encoding is not supported."""
    if list(env.action_keys) != ["action"]:
        return None
    spec = env.full_action_spec["action"]
    (leaf,) = spec_leaves(env.full_action_spec, env.batch_size)
    if isinstance(space, spaces.Box) and isinstance(spec, Bounded | Unbounded):
        return (leaf, lambda _: None) if _is_same(leaf, space) else None
    if not isinstance(space, spaces.Discrete) or space.start != 0 or spec.mask is not None:
        return None
    if isinstance(spec, OneHot) and leaf.shape == (space.n,):
        return leaf, partial(_from_one_hot, int(space.n))
    is_index = isinstance(spec, Categorical) and leaf.shape == ()
    return (leaf, _from_index) if is_index else None


def _from_one_hot(n: int, leaf: Leaf) -> Take:
    """Return a function from an action to the index of its maximum, after a cast to integers."""
    if leaf.shape[-1:] != (n,):
        warn_user(
            f"policy: 'action': expected a one-hot vector of shape [{n}], got {list(leaf.shape)}; "
            "TorchRL's GymEnv applies argmax, so every index becomes action 0. For indices, use "
            "GymEnv(..., categorical_action_encoding=True)"
        )
    is_whole = np.dtype(leaf.dtype).kind in "biu"
    if len(leaf.shape) < 2:
        if is_whole:
            return np.ndarray.argmax
        return lambda action: int(action.astype(np.int64).argmax())
    return lambda action: action.astype(np.int64, copy=False).argmax(-1)


def _from_index(leaf: Leaf) -> Take | None:
    """Return a function from an action of shape () to a scalar, or ``None`` for other shapes.

    Integers become numpy scalars, which Gymnasium's Discrete space checks faster than ints.
    """
    if leaf.shape != ():
        return None
    return unwrap if np.dtype(leaf.dtype).kind in "iu" else int


def _observation(env: Any, inner: Any) -> list[tuple[Leaf, Encode | None]] | None:
    """Return the leaves with their encodings in the order of the inner space, if supported."""
    space = inner.observation_space
    leaves = {leaf.key: leaf for leaf in spec_leaves(env.observation_spec, env.batch_size)}
    if isinstance(space, spaces.Dict):
        pairs = _flatten(space, ())
        if ("state",) in [key for key, _ in pairs]:  # TorchRL renames this key
            return None
    elif len(leaves) != 1:  # a text is not a leaf
        return None
    else:
        pairs = [(next(iter(leaves)), space)]
    if {key for key, _ in pairs} != set(leaves):
        return None
    encoded = [_encoding(env, leaves[key], child) for key, child in pairs]
    return None if None in encoded else [pair for pair in encoded if pair is not None]


def _flatten(space: spaces.Dict, root: Key) -> list[tuple[Key, gymnasium.Space[Any]]]:
    pairs = []
    for name, child in space.spaces.items():
        key = (*root, name)
        pairs += _flatten(child, key) if isinstance(child, spaces.Dict) else [(key, child)]
    return pairs


def _encoding(
    env: Any, leaf: Leaf, space: gymnasium.Space[Any]
) -> tuple[Leaf, Encode | None] | None:
    spec = env.observation_spec[leaf.key]
    is_same = _is_same(leaf, space)
    if isinstance(space, spaces.Box) and isinstance(spec, Bounded | Unbounded) and is_same:
        return leaf, None
    if isinstance(space, spaces.MultiBinary) and isinstance(spec, Binary) and is_same:
        return leaf, None
    if not isinstance(space, spaces.Discrete) or space.start != 0:
        return None
    if isinstance(spec, OneHot) and leaf.shape == (space.n,) and leaf.dtype == "int64":
        rows = np.eye(int(space.n), dtype=np.int64)
        return leaf, lambda value: rows[value]
    return (leaf, None) if isinstance(spec, Categorical) and is_same else None


def _is_same(leaf: Leaf, space: gymnasium.Space[Any]) -> bool:
    return leaf.shape == space.shape and leaf.dtype == str(space.dtype)


_IS_SLOW = (3, 11) <= sys.version_info < (3, 13)
_OWNERS = 3  # references to an unshared `__dict__`: object, `_quicken` and `getrefcount`


def quicken(env: Any) -> None:
    """Make attribute access faster by copying the `__dict__` of an environment and its wrappers.

    A dict that other code references is not replaced.
    """
    while _IS_SLOW and env is not None:
        _quicken(env)
        env = getattr(env, "__dict__", {}).get("env")


def _quicken(env: Any) -> None:
    attributes = getattr(env, "__dict__", None)
    if type(attributes) is dict and sys.getrefcount(attributes) == _OWNERS:
        object.__setattr__(env, "__dict__", {**attributes})


class Unwrapped(SingleEnv):
    """The Gymnasium environment inside a GymEnv, with TorchRL's encodings and seeds."""

    def __init__(self, env: Any, spec: InnerSpec) -> None:
        quicken(env._env)
        super().__init__(env._env)
        self._wrapper, self.owned = env, [env]
        self.spec = spec.applied_to(self.spec)
        self._decode = spec.decode
        self.bind_outputs(self.spec.action)
        self.to_arrays = spec.encoded(self.to_arrays)

    def bind_outputs(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        """Choose how to decode the policy's actions; see `EnvBatch.bind_outputs`."""
        step: Callable[[Any], Any] = self.env.step
        decode = self._decode(action_leaf(outputs))
        self.to_action = unwrap if decode is unwrap else same  # see `SingleEnv.fast_step`
        take = None if decode is unwrap else decode
        self.step_env = step if take is None else lambda action: step(take(action))
        return super().bind_outputs(outputs)

    def action_sampler(self) -> Sampler:
        return one_hot_sampler(super().action_sampler(), self.spec)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset the environment, after TorchRL's `set_seed` if there is a seed."""
        if seeds is not None:
            self._wrapper.set_seed(seed_each(seeds, 1)[0])
        return super().reset()


def action_leaf(outputs: Sequence[Leaf]) -> Leaf:
    """Return the leaf of the action among a policy's outputs."""
    return next(leaf for leaf in outputs if leaf.key == ("action",))


def one_hot_sampler(sampler: Sampler, spec: EnvSpec) -> Sampler:
    """Return a sampler that encodes drawn actions as one-hot vectors if the action requires it."""
    (leaf,) = spec.action
    if not isinstance(spec.action_space, spaces.Discrete) or not leaf.shape:
        return sampler
    rows = np.eye(leaf.shape[0], dtype=leaf.dtype)
    return lambda steps, rng: (rows[sampler(steps, rng)[0]],)


def _encoder(
    observe: Callable[[Any], Any], encodings: Sequence[Encode | None]
) -> Callable[[Any], Any]:
    """Return a function like `observe` that also encodes each leaf."""
    if len(encodings) == 1:
        (encode,) = encodings
        assert encode is not None
        return lambda value: encode(observe(value))
    return lambda value: tuple(
        leaf if encode is None else encode(leaf)
        for leaf, encode in zip(observe(value), encodings, strict=True)
    )
