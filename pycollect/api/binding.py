"""Bind a constructor's call to its signature, and explain unknown or refused arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import pycollect

# Arguments of TorchRL that have no effect here.
HINTS = frozenset(
    {"use_buffers", "return_same_td", "no_cuda_sync", "use_env_creator", "worker_idx"}
)

_STRAGGLERS = "use MultiSyncDataCollector or RayCollector(sync=True), which stop slow workers"

_CENTRAL = (
    "use MultiSyncDataCollector, MultiaSyncDataCollector or RayCollector(inference='central')"
)

# Arguments of TorchRL and of other collectors that a class does not have, and replacements.
REFUSED = {
    "interruptor": "use preemptive_threshold",
    "backend": "choose another collector class, or use Collector(backend=...)",
    "num_collectors": "use a collector with several workers, and a list with one entry per worker",
    "sync": "use MultiSyncDataCollector (sync) or MultiaSyncDataCollector (async)",
    "backend_options": "use ray_init_config and remote_configs",
    "cat_results": "only collectors with several workers join rollouts",
    "preemptive_threshold": _STRAGGLERS,
    "min_fraction": _STRAGGLERS,
    "inference": _CENTRAL,
    "min_batch_size": _CENTRAL,
    "max_batch_size": _CENTRAL,
    "server_timeout": _CENTRAL,
}

_IN_STEP = {
    "sync": "it is always sync; DistributedDataCollector has this argument",
    "update_after_each_batch": "use update_interval; its default, 1, updates after each batch",
    "max_frames_per_update": "its ranks are updated automatically; use DistributedDataCollector",
}
"""Refused by a collector that updates its ranks at an interval."""

_CLASSES = (
    "SyncDataCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RayCollector",
    "DistributedDataCollector",
    "DistributedSyncDataCollector",
    "RPCDataCollector",
)


_MEANT = {
    **dict.fromkeys(("env", "envs", "env_fn", "env_fns"), "create_env_fn"),
    **dict.fromkeys(("create_env_fn", "create_env_fns"), "env"),
    "batch_size": "frames_per_batch",
    "num_collectors": "num_workers",
    "num_workers": "num_collectors",
    "policy_device": "device",
    "max_frames_per_traj": "max_steps",
}
"""Other names of arguments, in other libraries and in other classes here."""


def check_others(name: str, known: Iterable[str], others: Mapping[str, Any]) -> None:
    """Check the keyword arguments that are not in the signature of a collector's class.

    Raises:
        ValueError: An argument of TorchRL or another collector; the text names a replacement.
        TypeError: An unknown argument; the text names the nearest known one.
    """
    known = list(known)
    refused = {**REFUSED, **_IN_STEP} if "update_interval" in known else REFUSED
    for other, value in others.items():
        if other in HINTS or (other == "reset_when_done" and value in (None, True)):
            continue
        if other == "reset_when_done":
            raise ValueError(
                "reset_when_done: expected True, got False; finished environments are always reset"
            )
        if other in refused:
            if value is not None:
                raise ValueError(f"{other}: not an argument of {name}; {refused[other]}")
        else:
            raise TypeError(unknown_argument(name, known, other))


def unknown_argument(name: str, known: list[str], other: str) -> str:
    """Return the error text for an unknown argument of a class, with a suggestion if possible."""
    text = f"{other}: not an argument of {name}"
    if other == "num_envs":
        return f"{text}; pass several environments as a list of callables or a vector environment"
    classes = classes_by_argument()
    near = [] if other in classes else difflib.get_close_matches(other, known, n=1, cutoff=0.6)
    meant = [argument for argument in (_MEANT.get(other), *near) if argument in known][:1]
    near = [] if meant else difflib.get_close_matches(other, classes, n=1, cutoff=0.8)
    elsewhere = [argument for argument in (other, *near) if argument in classes][:1]
    for argument in meant:
        text += f"; did you mean {argument!r}?"
    for argument in elsewhere:
        text += f"; {argument!r} is an argument of {', '.join(classes[argument])}"
    return text


def call_error(name: str, error: TypeError) -> str:
    """Return the text for arguments that `inspect` cannot bind to the signature of a class."""
    missing = re.fullmatch(r"missing a required (?:keyword-only )?argument: '(\w+)'", str(error))
    if missing:
        return f"{missing[1]}: {name} requires this argument"
    twice = re.fullmatch(r"multiple values for argument '(\w+)'", str(error))
    if twice:
        return f"{twice[1]}: {name} got this argument twice, by position and by name"
    if str(error) == "too many positional arguments":
        return f"{name}: {error}; pass them by name, for example frames_per_batch=1000"
    return f"{name}: {error}"


def classes_by_argument() -> dict[str, list[str]]:
    """Return the names of the collectors that have an argument, for all their arguments."""
    classes: dict[str, list[str]] = {}
    for name in _CLASSES:
        for parameter in inspect.signature(getattr(pycollect, name)).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                classes.setdefault(parameter.name, []).append(name)
    return classes


F = TypeVar("F", bound=Callable[..., None])


class Arguments(dict[str, Any]):
    """The value of each argument by name."""

    passed: frozenset[str]  # names that the caller passed; the other arguments have their defaults

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
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
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
