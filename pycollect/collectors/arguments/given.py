"""What a caller gave to a constructor, by the names of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from pycollect.collectors.arguments.names import call_error, check_others, unknown_argument

P = ParamSpec("P")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., None])


class Given(dict[str, Any]):
    """The value of each argument, and of what is in no signature.

    Attributes:
        passed: the names of those that came from the caller; the others have their defaults.
        others: what is in no signature.
        known: the names that are.
    """

    passed: frozenset[str]
    others: Mapping[str, Any]
    known: tuple[str, ...]

    @classmethod
    def bound(cls, signature: inspect.Signature, args: Any, kwargs: Any) -> Given:
        """What a call gives; TypeError where it does not fit a signature that ends in `others`."""
        call = signature.bind(*args, **kwargs)
        passed = call.arguments.keys() - {"others"}
        call.apply_defaults()
        others = call.arguments.pop("others")
        given = cls({**call.arguments, **others})
        given.others, given.known = others, tuple(call.arguments)
        given.passed = frozenset({*passed, *others})
        return given

    def instead(self, **values: Any) -> Given:
        """The same, as if the caller had passed these."""
        given = Given({**self, **values})
        given.others, given.known = self.others, self.known
        given.passed = self.passed | values.keys()
        return given


def telling(init: F) -> F:
    """A constructor with a signature of its own: of a misspelt argument it says what is meant."""
    own = inspect.signature(init)
    kinds = {name: one.kind for name, one in own.parameters.items() if name != "self"}
    passes_on = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(init)
    def wrapper(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            own.bind(self, *args, **kwargs)
        except TypeError as error:
            known = [*named, *(_of_base(type(self), wrapper) if passes_on else ())]
            unknown = [name for name in kwargs if name not in known]
            cls = type(self).__name__
            raise TypeError(
                unknown_argument(cls, known, unknown[0]) if unknown else call_error(cls, error)
            ) from None
        init(self, *args, **kwargs)

    return cast(F, wrapper)


def _of_base(cls: type, init: object) -> list[str]:
    """The arguments of the class above the one that has that constructor."""
    mro = cls.__mro__
    owner = next(at for at, own in enumerate(mro) if vars(own).get("__init__") is init)
    return [*inspect.signature(mro[owner + 1]).parameters]


def takes(
    signature: Callable[P, None], without: tuple[str, ...] = (), **annotations: str
) -> Callable[[Callable[[S, Given], None]], Callable[Concatenate[S, P], None]]:
    """A constructor with the signature of that function, which is handed all of it as one mapping.

    Args:
        without: arguments that this constructor does not have.
        annotations: of those with another type here.
    """
    parameters = inspect.signature(signature).parameters
    own = inspect.Signature(
        [
            one.replace(annotation=annotations.get(name, one.annotation))
            for name, one in parameters.items()
            if name not in without
        ]
    )
    self_too = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]

    def decorated(init: Callable[[S, Given], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def wrapper(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                given = Given.bound(own, args, kwargs)
            except TypeError as error:
                cls = type(self).__name__
                # What is misspelt is missing, too: its own error names both.
                unknown = {
                    name: value for name, value in kwargs.items() if name not in own.parameters
                }
                check_others(cls, own.parameters, unknown)
                raise TypeError(call_error(cls, error)) from None
            init(self, given)

        # Where inspect looks for it; a function's type does not know.
        wrapper.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*self_too, *own.parameters.values()], return_annotation="None"
        )
        return cast(Callable[Concatenate[S, P], None], wrapper)

    return decorated
