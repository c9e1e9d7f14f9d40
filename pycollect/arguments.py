"""Arguments as data: a field defines name, type, default, check and text of each."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

REQUIRED: Any = object()
"""The default of a required argument."""
T = TypeVar("T")


class Asked(NamedTuple):
    """An argument: its part of signatures and help().

    Attributes:
        accepts: Type of accepted values. Defaults to "": the type of the field, or None too if that
            is the default. Without it, an argument whose default is a bool is a flag.
        text: Description under "Args:", without the default. Defaults to "": no signature has this
            argument, or another dataclass describes it.
    """

    default: Any
    text: str = ""
    accepts: str = ""

    def read(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return the given value or the default; a flag as a bool."""
        value = given.get(name, self.default)
        is_flag = isinstance(self.default, bool) and not self.accepts
        return check_flag(name, value) if is_flag else value


@dataclass(frozen=True)
class _Source:
    """The origin of a field's value."""

    asked: Mapping[str, Asked]  # the arguments by name
    also: tuple[str, ...]  # names of other arguments that the check receives
    make: Callable[..., Any]  # makes the value from all of them, in order; errors name the argument
    in_kwargs: bool  # `collector_kwargs` may contain these arguments

    def made(self, given: Mapping[str, Any]) -> Any:
        values = [own.read(name, given) for name, own in self.asked.items()]
        with naming(*self.asked):
            return self.make(*values, *(given.get(name) for name in self.also))


@contextmanager
def naming(*names: str) -> Iterator[None]:
    """Add the arguments' names to an error of their check that contains none of them."""
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
    accepts: str = "",
    also: tuple[str, ...] = (),
    in_kwargs: bool = False,
) -> Any:
    """Return a field for one argument.

    Args:
        check: Called with the argument's name and value; returns the field's value.
        text, accepts: See `Asked`.
        name: Name of the argument if the field has another.
        also, in_kwargs: See `_Source`.
    """

    def source(field_name: str) -> _Source:
        own = name or field_name
        one = {own: Asked(default, text, accepts)}
        return _Source(one, also, functools.partial(check, own), in_kwargs)

    return _field(source, default is REQUIRED)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` as a bool, ``False`` for None; raise TypeError unless it equals 0 or 1."""
    try:
        is_flag = value is None or value in (0, 1)
    except Exception:  # an array of several numbers, for example
        is_flag = False
    if not is_flag:
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def positive(text: str) -> int:
    """Return an int of at least 1 with at most 64 bits, for argparse."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """Return an int of at least 0 with at most 64 bits, for argparse."""
    return _at_least(0, int(text))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {value}")
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of at most 64 bits, got {value}")
    return value


def flag(default: bool, text: str = "", **more: Any) -> Any:
    """Return a field for one argument, as a bool."""
    return argument(default, lambda _, value: value, text, **more)


def asked(default: Any, text: str = "", accepts: str = "Any") -> Any:
    """Return one of the arguments of `made_of`. Arguments as for `Asked`."""
    return Asked(default, text, "" if isinstance(default, bool) else accepts)


def made_of(
    make: Callable[..., Any], *, also: tuple[str, ...] = (), in_kwargs: bool = False, **asked: Asked
) -> Any:
    """Return a field that `make` makes of several arguments; its errors name the argument.

    `make` gets the values in this order; for `also` and `in_kwargs` see `argument`.
    """
    return _field(lambda _: _Source(asked, also, make, in_kwargs), False)


def _field(source: Callable[[str], _Source], required: bool) -> Any:
    metadata = {"source": source}
    if required:
        return field(metadata=metadata)
    return field(default_factory=lambda: source("").made({}), metadata=metadata)


@functools.cache
def _sources(cls: Any) -> dict[str, _Source]:
    """Return the sources of all fields made of arguments, in the order of their checks."""
    return {
        own.name: own.metadata["source"](own.name)
        for own in fields(cls)
        if "source" in own.metadata
    }


def checked(cls: type[T], given: Mapping[str, Any], **own: Any) -> T:
    """Make a dataclass from arguments by name; values in `own` are used unchecked.

    Raises:
        TypeError, ValueError: An argument is invalid; the message starts with its name.
    """
    values = {**given, **own}
    made = {
        name: source.made(values)
        for name, source in _sources(cast(Any, cls)).items()
        if name not in own
    }
    return cls(**made, **own)


def checked_kwargs(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the fields that `collector_kwargs` may set, by name."""
    sources = _sources(cast(Any, cls)).items()
    return {name: source.made(given) for name, source in sources if source.in_kwargs}


def arguments_of(cls: type, *, in_kwargs: bool = False) -> dict[str, Asked]:
    """Return the arguments, or only the ones of `collector_kwargs`, by name with their types."""
    types = {own.name: str(own.type) for own in fields(cast(Any, cls))}
    return {
        name: own._replace(accepts=own.accepts or _accepted(types[field_name], own.default))
        for field_name, source in _sources(cast(Any, cls)).items()
        if source.in_kwargs or not in_kwargs
        for name, own in source.asked.items()
    }


def _accepted(checked_type: str, default: Any) -> str:
    is_enough = default is not None or "None" in checked_type or checked_type == "Any"
    return checked_type if is_enough else f"{checked_type} | None"


def exposes(options: type, at: str) -> Callable[[type[T]], type[T]]:
    """Turn attributes that a class declares into properties that read the same field at `at`."""
    fields_of = {
        name: (field_name, own.text)
        for field_name, source in _sources(cast(Any, options)).items()
        for name, own in source.asked.items()
    }

    def decorated(cls: type[T]) -> type[T]:
        for name in fields_of.keys() & inspect.get_annotations(cls):
            field_name, text = fields_of[name]
            own: Any = property(attrgetter(f"{at}.{field_name}"), doc=text)
            setattr(cls, name, own)
            own.__set_name__(cls, name)  # for its errors
        return cls

    return decorated


_SECTION = re.compile(r"^(Args|Returns|Yields|Raises):\n", re.M)
_ENTRY = re.compile(r"^ {4}(?=\S)", re.M)


def completed_by(base: Any = None, *, raises: bool = True) -> Callable[[T], T]:
    """Complete a docstring by another one, of a function or class.

    "Args:" of a class is that of its constructor, if this has one. Otherwise "Args:" gets an entry
    for each parameter, in order: its own, else the other's. "Raises:" gets its own entries and the
    other's for further types. "Returns:", "Yields:" and the text before all sections are its own,
    else the other's. An entry named "..." is removed; it shows readers of the source that entries
    are added.

    Args:
        base: Object with the other docstring, if any.
        raises: Whether to add the other's "Raises:".
    """

    def decorated(own: T) -> T:
        given, other = own.__doc__, getattr(base, "__doc__", None)
        if given is not None:  # as with -OO
            parameters = inspect.signature(own).parameters  # type: ignore[arg-type]
            rest = _parts(other) if base is not None and other is not None else {}
            init = own.__init__.__doc__ if isinstance(own, type) else None  # type: ignore[misc]
            parts = {**_parts(given), **{k: v for k, v in _parts(init or "").items() if k}}
            own.__doc__ = _merged(parts, rest if raises else {**rest, "Raises": ""}, parameters)
        return own

    return decorated


def _parts(docstring: str) -> dict[str, str]:
    """Return the sections by name, still indented, and the text before them as ""."""
    text, *others = _SECTION.split(inspect.cleandoc(docstring))
    return {"": text.strip(), **dict(zip(others[::2], others[1::2], strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Return the text of each entry by the names before its colon."""
    entries = (entry.partition(":") for entry in _ENTRY.split(section)[1:])
    return {names: text.rstrip() for names, _, text in entries}


def _merged(own: dict[str, str], base: dict[str, str], parameters: Iterable[str]) -> str:
    known = {**_entries(base.get("Args", "")), **_entries(own.get("Args", ""))}
    by_name = {name.strip(): names for names in known for name in names.split(",")}
    arguments = dict.fromkeys(by_name[name] for name in parameters if name in by_name)
    raised = {**_entries(own.get("Raises", "")), **_entries(base.get("Raises", ""))}
    raised.update(_entries(own.get("Raises", "")))
    parts = [
        own[""] or base.get("", ""),
        _section("Args", {names: known[names] for names in arguments}),
    ]
    for name in ("Returns", "Yields"):
        text = own.get(name) or base.get(name)
        parts.append(f"{name}:\n{text.rstrip()}" if text else "")
    parts.append(_section("Raises", raised))
    return "\n\n".join(part for part in parts if part)


def _section(name: str, entries: dict[str, str]) -> str:
    lines = "\n".join(f"    {names}:{text}" for names, text in entries.items())
    return f"{name}:\n{lines}" if lines else ""
