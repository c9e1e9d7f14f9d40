"""Bind the call of a constructor to its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pycollect.collectors.arguments.names import (
    call_error,
    check_others,
    classes_by_argument,
    unknown_argument,
)

F = TypeVar("F", bound=Callable[..., None])


class Arguments(dict[str, Any]):
    """The value of each argument by name.

    Attributes:
        passed: Names that the caller passed; the other arguments have their defaults.
    """

    passed: frozenset[str]

    def instead(self, **values: Any) -> Arguments:
        """Return other arguments, as if the caller had passed these values."""
        given = Arguments({**self, **values})
        given.passed = self.passed | values.keys()
        return given


def bound(init: F) -> F:
    """Make a constructor of a signature: it passes all arguments to the method `_make`.

    Editors, type checkers and `help` still see the signature.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        known = [name for name in signature.parameters if name not in ("self", "others")]
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        check_others(type(self).__name__, known, unknown)
        call = _call(signature, self, args, kwargs)
        passed = frozenset({*call.arguments, *unknown}) - {"self", "others"}
        call.apply_defaults()
        values = {name: call.arguments[name] for name in known}
        given = Arguments({**values, **unknown})
        given.passed = passed
        self._make(given)

    return cast(F, wrapper)


def explained(init: F) -> F:
    """Explain calls that do not fit the signature of a constructor with a body of its own."""
    signature = inspect.signature(init)
    named = [
        name
        for name, own in signature.parameters.items()
        if own.kind is not own.VAR_KEYWORD and name != "self"
    ]
    passes_on = len(named) + 1 < len(signature.parameters)

    @functools.wraps(init)
    def wrapper(self: object, *args: Any, **kwargs: Any) -> None:
        known = [*named, *(classes_by_argument() if passes_on else ())]
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_argument(type(self).__name__, known, name))
        _call(signature, self, args, kwargs)
        init(self, *args, **kwargs)

    return cast(F, wrapper)


def _call(
    signature: inspect.Signature, self: object, args: Any, kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(self, *args, **kwargs)
    except TypeError as error:
        raise TypeError(call_error(type(self).__name__, error)) from None
