"""The program's registrations of environments, on their way to workers.

A worker imports nothing of a registration until its environment is made: entry points, and keyword
arguments that are objects, travel as bytes that are unpickled when they are used.
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


def registered_here() -> Registered:
    """Return the program's registrations, in a form that imports nothing when it is unpickled.

    Gymnasium's own are left out, unless they have changed since this module was imported.
    """
    return {
        name: _sent(spec)
        for name, spec in gymnasium.registry.items()
        if name not in _GYMNASIUMS or _GYMNASIUMS[name] != _description(spec)
    }


def register(specs: Registered) -> None:
    """Add the program's registrations; replace registrations of this process that differ."""
    for name, spec in specs.items():
        own = gymnasium.registry.get(name)
        if own is None or (_description(own) != _description(spec) and _is_complete(spec)):
            point, vector_point = map(_arrived, (spec.entry_point, spec.vector_entry_point))
            gymnasium.registry[name] = replace(
                spec, entry_point=point, vector_entry_point=vector_point
            )


def of_main(point: Any) -> Any:
    """Load an entry point that is named by ``__main__``, which is another module in workers."""
    is_named = isinstance(point, str) and point.startswith("__main__:")
    return load_env_creator(point) if is_named else point


def _arrived(point: Any) -> Any:
    return _ImportedPoint(point) if isinstance(point, str) else point


def _sent(spec: EnvSpec) -> EnvSpec:
    of = f"of {spec.id!r}"
    sent = {
        "entry_point": _sent_point(f"the entry_point {of}", spec.entry_point),
        "vector_entry_point": _sent_point(f"the vector_entry_point {of}", spec.vector_entry_point),
        "kwargs": _sent_kwargs(f"the kwargs {of}", spec.kwargs),
        "additional_wrappers": tuple(
            replace(own, kwargs=_sent_kwargs(f"the kwargs of {own.name!r} {of}", own.kwargs))
            for own in spec.additional_wrappers
        ),
    }
    is_same = all(getattr(spec, name) is value for name, value in sent.items())
    return spec if is_same else replace(spec, **sent)


def _sent_point(name: str, point: Any) -> Any:
    point = of_main(point)
    return point if point is None or isinstance(point, str) else _EntryPoint(name, point)


def _sent_kwargs(name: str, kwargs: Any) -> Any:
    return kwargs if _is_plain(kwargs) else _Kwargs(name, kwargs)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)


def _is_complete(spec: EnvSpec) -> bool:
    """Return whether all of a sent registration could be pickled."""
    wrappers = (own.kwargs for own in spec.additional_wrappers)
    parts = (spec.entry_point, spec.vector_entry_point, spec.kwargs, *wrappers)
    return not any(isinstance(part, _Later) and isinstance(part.data, str) for part in parts)


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


class _Later:
    """A value of the program that is pickled at once and unpickled when it is used.

    Args:
        name: of the value, for errors.
        value: the value.

    Attributes:
        data: the pickled value, or the reason why it could not be pickled.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.data: bytes | str
        try:
            self.data = cloudpickle.dumps(value)
        except Exception as error:  # an object's own pickling may raise anything
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
        return {name: own for name, own in vars(self).items() if name != "value"}


class _EntryPoint(_Later):
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
        """Return the string: copies of specs are shown to users, and become JSON."""
        with suppress(Exception):  # raised again when the entry point is used
            _ = self.value
        return self.place


class _Kwargs(_Later, Mapping[str, Any]):
    """Stands for keyword arguments of the program until they are read."""

    def __getitem__(self, name: str) -> Any:
        return self.value[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the dict, which `gymnasium.make` adds its own arguments to."""
        return copy.deepcopy(self.value, memo)


@contextmanager
def _keeping_registrations() -> Iterator[None]:
    """Keep registrations that an import would replace by the defaults of its package."""
    before = dict(gymnasium.registry)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding environment")
        try:
            yield
        finally:
            gymnasium.registry.update(before)


_GYMNASIUMS = {
    name: _description(spec)
    for name, spec in gymnasium.registry.items()
    if _place(spec.entry_point or spec.vector_entry_point).startswith("gymnasium.")
}
