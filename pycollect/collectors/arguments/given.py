"""What a caller gave to a constructor, by the names of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from pycollect.collectors.arguments.names import check_others

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
    """A constructor with a signature of its own, whose misspelt arguments are told as those are."""
    own = inspect.signature(init)
    passes_on = any(one.kind is one.VAR_KEYWORD for one in own.parameters.values())

    @functools.wraps(init)
    def wrapper(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            own.bind(self, *args, **kwargs)
        except TypeError as error:
            cls = type(self)
            of_base = inspect.signature(cls.__mro__[1]).parameters if passes_on else {}
            known = [*(name for name in own.parameters if name != "self"), *of_base]
            raise _misfit(cls.__name__, known, kwargs, error) from None
        init(self, *args, **kwargs)

    return cast(F, wrapper)


def _misfit(
    cls: str, known: Collection[str], given: Mapping[str, Any], error: TypeError
) -> TypeError:
    """The error of a call that does not fit; raises another one for an argument that is unknown.

    What is misspelt is missing, too: that one's own error names both.
    """
    check_others(cls, known, {name: value for name, value in given.items() if name not in known})
    return TypeError(f"{cls}: {error}")


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
                raise _misfit(type(self).__name__, own.parameters, kwargs, error) from None
            init(self, given)

        # Where inspect looks for it; a function's type does not know.
        wrapper.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*self_too, *own.parameters.values()], return_annotation="None"
        )
        return cast(Callable[Concatenate[S, P], None], wrapper)

    return decorated
