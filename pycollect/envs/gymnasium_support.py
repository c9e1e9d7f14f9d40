"""Gymnasium's information about an environment: its registration, time limit and rewards.

The program's registrations are copied to workers. A worker imports nothing for one until it makes
the environment: entry points, and keyword arguments that are objects, are sent as bytes and
unpickled on first use.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import VectorRewardWrapper, VectorWrapper

from pycollect._core import Leaf

Registered = Mapping[str, EnvSpec]
"""Registrations by id."""


def program_registrations() -> Registered:
    """Return the program's registrations, in a form that imports nothing when it is unpickled.

    Gymnasium's own registrations are left out, unless they have changed since this module was
    imported.
    """
    return {
        name: _sendable(spec)
        for name, spec in gymnasium.registry.items()
        if name not in _GYMNASIUM_SPECS or _GYMNASIUM_SPECS[name] != _description(spec)
    }


def register(specs: Registered) -> None:
    """Add the program's registrations; replace registrations of this process that differ."""
    for name, spec in specs.items():
        local = gymnasium.registry.get(name)
        if local is None or (_description(local) != _description(spec) and _is_complete(spec)):
            point, vector_point = map(_imported_later, (spec.entry_point, spec.vector_entry_point))
            gymnasium.registry[name] = replace(
                spec, entry_point=point, vector_entry_point=vector_point
            )


def load_main_entry(point: Any) -> Any:
    """Load an entry point named ``__main__:...``, because workers have another ``__main__``."""
    is_named = isinstance(point, str) and point.startswith("__main__:")
    return load_env_creator(point) if is_named else point


def _imported_later(point: Any) -> Any:
    return _ImportedPoint(point) if isinstance(point, str) else point


def _sendable(spec: EnvSpec) -> EnvSpec:
    suffix = f"of {spec.id!r}"
    fields = {
        "entry_point": _sendable_point(f"the entry_point {suffix}", spec.entry_point),
        "vector_entry_point": _sendable_point(
            f"the vector_entry_point {suffix}", spec.vector_entry_point
        ),
        "kwargs": _sendable_kwargs(f"the kwargs {suffix}", spec.kwargs),
        "additional_wrappers": tuple(
            replace(
                wrapper,
                kwargs=_sendable_kwargs(f"the kwargs of {wrapper.name!r} {suffix}", wrapper.kwargs),
            )
            for wrapper in spec.additional_wrappers
        ),
    }
    is_same = all(getattr(spec, name) is value for name, value in fields.items())
    return spec if is_same else replace(spec, **fields)


def _sendable_point(name: str, point: Any) -> Any:
    point = load_main_entry(point)
    if isinstance(point, str):
        return str(point)  # an _ImportedPoint of a worker that starts workers is sent as its name
    return None if point is None else _EntryPoint(name, point)


def _sendable_kwargs(name: str, kwargs: Any) -> Any:
    return kwargs if _is_plain(kwargs) else _Kwargs(name, kwargs)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


def _is_complete(spec: EnvSpec) -> bool:
    """Return whether all of a sent registration could be pickled."""
    wrappers = (wrapper.kwargs for wrapper in spec.additional_wrappers)
    parts = (spec.entry_point, spec.vector_entry_point, spec.kwargs, *wrappers)
    return not any(isinstance(part, _LazyValue) and isinstance(part.data, str) for part in parts)


def _description(spec: EnvSpec) -> str:
    """Return a text that is equal for equal registrations in different processes."""
    names = ("entry_point", "vector_entry_point")
    points = {name: _place(getattr(spec, name)) or getattr(spec, name) for name in names}
    return repr({**vars(spec), **points})


def _place(point: Any) -> str:
    """Return the "module:name" by which an entry point is imported, "" if there is none."""
    if isinstance(point, str):
        return point
    if isinstance(point, _EntryPoint):
        return point.place
    module, name = getattr(point, "__module__", None), getattr(point, "__qualname__", "")
    with suppress(AttributeError, KeyError, TypeError):
        if attrgetter(name)(sys.modules[module]) is point:  # type: ignore[index] # KeyError
            return f"{'__main__' if module == '__mp_main__' else module}:{name}"
    return ""


class _LazyValue:
    """A value of the program that is pickled at once and unpickled on first use."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.data: bytes | str  # the pickled value, or the text of the error that pickling raised
        try:
            self.data = cloudpickle.dumps(value)
        except Exception as error:  # `__reduce__` of a user's class may raise anything
            self.data = f"{type(error).__name__}: {error}"

    @cached_property
    def value(self) -> Any:
        if isinstance(self.data, str):
            raise TypeError(
                f"create_env_fn: {self.name} cannot be pickled for workers ({self.data}); register "
                "the environment in a module that workers import, or in init_fn"
            )
        with _keeping_registrations():
            return cloudpickle.loads(self.data)

    def __getstate__(self) -> dict[str, Any]:
        return {name: state for name, state in vars(self).items() if name != "value"}


class _EntryPoint(_LazyValue):
    """Stands for an entry point of the program until it is called."""

    def __init__(self, name: str, point: Any) -> None:
        super().__init__(name, point)
        self.place = _place(point)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name != "metadata":  # which `gymnasium.make` reads
            raise AttributeError(name)
        return self.value.metadata

    def __deepcopy__(self, memo: Any) -> _EntryPoint:
        return self


class _ImportedPoint(str, _EntryPoint):
    """Stands for an entry point that the program has registered as a string.

    It is that string, too, because some packages compare an existing registration with their own.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    @cached_property
    def value(self) -> Any:
        with _keeping_registrations():
            return load_env_creator(self.place)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the string, because users read copies of specs and convert them to JSON."""
        with suppress(Exception):  # raised again when the entry point is used
            _ = self.value
        return self.place


class _Kwargs(_LazyValue, Mapping[str, Any]):
    """Stands for keyword arguments of the program until they are read."""

    def __getitem__(self, name: str) -> Any:
        return self.value[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a dict, because `gymnasium.make` adds arguments to it."""
        return copy.deepcopy(self.value, memo)


@contextmanager
def _keeping_registrations() -> Iterator[None]:
    """Restore registrations that an import replaces by the defaults of its package."""
    before = dict(gymnasium.registry)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding environment")
        try:
            yield
        finally:
            gymnasium.registry.update(before)


_GYMNASIUM_SPECS = {
    name: _description(spec)
    for name, spec in gymnasium.registry.items()
    if _place(spec.entry_point or spec.vector_entry_point).startswith("gymnasium.")
}


def maker(name: str, target: str | EnvSpec) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return a callable that makes a registered environment, in any process."""
    try:
        spec = target if isinstance(target, EnvSpec) else _spec(target)
        spec = replace(spec, entry_point=load_main_entry(spec.entry_point))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected a Gymnasium id, got {target!r}: {error}") from None
    module = target.rpartition(":")[0] if isinstance(target, str) else ""
    return partial(make_importing, module, spec) if module else partial(gymnasium.make, spec)


def make_importing(module: str, spec: EnvSpec, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make the environment of ``module:id`` after an import of the module, also in a worker."""
    importlib.import_module(module)
    return gymnasium.make(spec, **kwargs)


def _spec(env_id: str) -> EnvSpec:
    """Return a spec as `gymnasium.make` does: import ``module:``, default to the newest version."""
    module, colon, local_id = env_id.rpartition(":")
    if colon:
        importlib.import_module(module)
    if local_id in gymnasium.registry:
        return gymnasium.spec(local_id)
    namespace, name, version = registration.parse_env_id(local_id)
    newest = registration.find_highest_version(namespace, name)
    if version is not None or newest is None:
        return gymnasium.spec(local_id)
    found = registration.get_env_id(namespace, name, newest)
    gymnasium.logger.warn(
        f"Using the latest versioned environment `{found}` instead of `{local_id}`."
    )
    return gymnasium.spec(found)


def has_time_limit(env: Any) -> bool:
    """Return whether every episode is known to end after a limited number of steps.

    Evidence is Gymnasium's `spec.max_episode_steps`, of each environment in a vector environment,
    or EnvPool's `config`.
    """
    spec, config = getattr(env, "spec", None), getattr(env, "config", None)
    if getattr(spec, "max_episode_steps", None):
        return True
    if isinstance(config, dict) and config.get("max_episode_steps"):
        return True
    inner = getattr(env, "envs", None)
    if isinstance(inner, list | tuple) and inner:
        return all(map(has_time_limit, inner))
    with suppress(Exception):  # only vector environments with processes have `get_attr`
        specs = env.get_attr("spec")
        return bool(specs) and all(getattr(s, "max_episode_steps", None) for s in specs)
    return False


SEVERAL_REWARDS = (
    "; for a vector of rewards, give the environment a reward_space, a Box of shape [k]"
)


def declared_reward(env: Any, draw: Callable[[], Any], num_envs: int | None = None) -> Leaf | None:
    """Return the leaf of one environment's reward, or ``None`` if the environment declares none.

    A `reward_space` that is a Box of shape ``[k]`` declares a vector, as in MO-Gymnasium. A vector
    environment, with `num_envs`, may also have `single_reward_space`, or a `reward_space` of shape
    ``[P, k]``. Other values are ignored. If a wrapper may reduce the vector to one number, one step
    decides, of which `draw` returns the reward.
    """
    may_change = False
    for layer in _layers(env):
        if (shape := _declared(layer, num_envs)) is not None:
            is_number = may_change and np.ndim(draw()) == (num_envs is not None)
            return None if is_number else Leaf(("reward",), "float32", shape)
        may_change = may_change or _may_change_rewards(layer)
    return None


def _layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers, the outermost first, and the environment inside."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
    yield env


def _declared(layer: Any, num_envs: int | None) -> tuple[int, ...] | None:
    """Return the shape that this layer itself declares for one environment's reward."""
    names = ("reward_space",) if num_envs is None else ("single_reward_space", "reward_space")
    for name in names:
        # Not via `__dict__`: reading it slows the environment down, see `quicken`.
        space = getattr(layer, name, None)
        shape = space.shape if isinstance(space, spaces.Box) else ()
        if len(shape) == 2 and name == "reward_space" and shape[0] == num_envs:
            shape = shape[1:]
        if len(shape) == 1 and shape[0] > 0:
            return shape
    return None


def _may_change_rewards(layer: Any) -> bool:
    """Return whether a wrapper may change rewards: a reward wrapper, or one of another package."""
    if isinstance(layer, gymnasium.RewardWrapper | VectorRewardWrapper):
        return True
    module: str = type(layer).step.__module__
    return module.partition(".")[0] != "gymnasium"
