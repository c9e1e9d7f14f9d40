"""Copy the program's environment registrations to workers.

A worker imports nothing for a registration until it makes the environment: entry points, and
keyword arguments that are objects, are sent as bytes and unpickled on first use.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

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
    return point if point is None or isinstance(point, str) else _EntryPoint(name, point)


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
    """A value of the program that is pickled at once and unpickled on first use.

    Attributes:
        data: The pickled value, or the text of the error that pickling raised.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.data: bytes | str
        try:
            self.data = cloudpickle.dumps(value)
        except Exception as error:  # `__reduce__` of a user's class may raise anything
            self.data = f"{type(error).__name__}: {error}"

    @cached_property
    def value(self) -> Any:
        """The value; TypeError if it could not be pickled."""
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


class _ImportedPoint(_EntryPoint):
    """Stands for an entry point that the program has registered as a string."""

    def __init__(self, place: str) -> None:
        self.place = place

    @cached_property
    def value(self) -> Any:
        """The entry point."""
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
