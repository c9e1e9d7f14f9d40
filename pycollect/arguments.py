"""Arguments as data: a field says of which arguments it is made, their defaults and their check."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, cast

REQUIRED: Any = object()
"""The default of an argument that has to be given."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Source:
    """What a field is made of.

    Attributes:
        defaults: by the names of the arguments.
        beside: names of others that the check is told of.
        make: from the values of all these, in order; its errors name the argument.
        text: what the field is, in a line.
        in_kwargs: `collector_kwargs` may hold these arguments.
    """

    defaults: Mapping[str, Any]
    beside: tuple[str, ...]
    make: Callable[..., Any]
    text: str
    in_kwargs: bool

    def made(self, given: Mapping[str, Any]) -> Any:
        values = [given.get(name, default) for name, default in self.defaults.items()]
        with naming(*self.defaults):
            return self.make(*values, *(given.get(name) for name in self.beside))


@contextmanager
def naming(*names: str) -> Iterator[None]:
    """Name the arguments in an error of their check that names none of them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        if any(name in str(error) for name in names):
            raise
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{', '.join(names)}: the value cannot be used: {error}") from error


def argument(
    default: Any,
    check: Callable[..., Any],
    text: str = "",
    *,
    name: str = "",
    beside: tuple[str, ...] = (),
    in_kwargs: bool = False,
) -> Any:
    """A field that is one argument, checked.

    Args:
        check: is called with the argument's name and value, and returns the field's.
        text: what the argument does, in a line.
        name: the argument's, where the field has another.
        beside, in_kwargs: see `_Source`.
    """

    def source(field_name: str) -> _Source:
        own = name or field_name
        return _Source({own: default}, beside, functools.partial(check, own), text, in_kwargs)

    return _field(source, default is REQUIRED)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; raise TypeError if it has no truth value."""
    try:
        return bool(value)
    except Exception as error:  # an array of several numbers, for example
        raise TypeError(f"{name}: expected True or False, got {value!r}") from error


def flag(default: bool, text: str = "", **more: Any) -> Any:
    """A field that is one argument, as a bool."""
    return argument(default, check_flag, text, **more)


def made_of(
    make: Callable[..., Any],
    text: str = "",
    *,
    beside: tuple[str, ...] = (),
    in_kwargs: bool = False,
    **defaults: Any,
) -> Any:
    """A field that is made of these arguments.

    Args:
        make: is called with the values in this order; its errors name the argument.
        text, beside, in_kwargs: see `argument`.
    """
    return _field(lambda _: _Source(defaults, beside, make, text, in_kwargs), False)


def _field(source: Callable[[str], _Source], required: bool) -> Any:
    metadata = {"source": source}
    if required:
        return field(metadata=metadata)
    return field(default_factory=lambda: source("").made({}), metadata=metadata)


@functools.cache
def _sources(cls: Any) -> dict[str, _Source]:
    """Of the fields that are made of arguments, by name, in the order in which they are checked."""
    return {
        own.name: own.metadata["source"](own.name)
        for own in fields(cls)
        if "source" in own.metadata
    }


def checked(cls: type[T], given: Mapping[str, Any], **own: Any) -> T:
    """A dataclass from what was given, by the names of arguments; what is `own` is taken as it is.

    Raises:
        TypeError, ValueError: by the name of the argument.
    """
    values = {**given, **own}
    made = {
        name: source.made(values)
        for name, source in _sources(cast(Any, cls)).items()
        if name not in own
    }
    return cls(**made, **own)


def checked_kwargs(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields alone, by name, that `collector_kwargs` may tell."""
    sources = _sources(cast(Any, cls)).items()
    return {name: source.made(given) for name, source in sources if source.in_kwargs}


def defaults_of(cls: type, *, in_kwargs: bool = False) -> dict[str, Any]:
    """The defaults of all arguments that the fields are made of, by name.

    Args:
        in_kwargs: of those alone that `collector_kwargs` may hold.
    """
    sources = _sources(cast(Any, cls)).values()
    chosen = [own for own in sources if own.in_kwargs or not in_kwargs]
    return {name: default for own in chosen for name, default in own.defaults.items()}


def tells(options: type, at: str) -> Callable[[type[T]], type[T]]:
    """A class that tells arguments: what it declares under the name of one is a property.

    Args:
        options: a dataclass with a field for each.
        at: the name of the attribute that holds such options.
    """
    fields_of = {
        name: (field_name, source)
        for field_name, source in _sources(cast(Any, options)).items()
        for name in source.defaults
    }

    def decorated(cls: type[T]) -> type[T]:
        for name in fields_of.keys() & inspect.get_annotations(cls):
            field_name, source = fields_of[name]
            told: Any = property(attrgetter(f"{at}.{field_name}"), doc=source.text)
            setattr(cls, name, told)
            told.__set_name__(cls, name)  # for its errors
        return cls

    return decorated
