"""Choose the class that `Collector(...)` makes from `num_collectors`, `sync` and `backend`."""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pycollect
from pycollect import checks as check
from pycollect.api.arguments import env_entries
from pycollect.api.binding import call_error

_SELECTORS = ("backend", "backend_options", "num_collectors", "sync")
_ALIASES = {"multiprocessing": "process", "threading": "thread"}
_LAUNCHED = {
    "ray": "RayCollector",
    "rpc": "RPCDataCollector",
    "distributed": "DistributedDataCollector",
    "submitit": "DistributedDataCollector",
}
_BACKENDS = ("direct", "process", *_LAUNCHED)


class Choosing(ABCMeta):
    """Metaclass of a class whose method `_choose` may make a collector of another class.

    `_choose` gets the arguments, and returns None to let this class make the collector. It may
    remove keyword arguments that only it uses. Subclasses never choose.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature without `self`, which `__call__` would hide."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    if not TYPE_CHECKING:  # type checkers read the constructor instead

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make a collector of this class or of the class that `_choose` chooses."""
            other = cls._choose(args, kwargs) if "_choose" in vars(cls) else None
            return super().__call__(*args, **kwargs) if other is None else other


def choose_backend(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the collector that `num_collectors`, `sync` and `backend` choose; None for `cls`."""
    chosen = {name: kwargs.pop(name, None) for name in _SELECTORS}
    count = chosen["num_collectors"]
    if count is not None:
        count = check.check_positive("num_collectors", count)
    backend = _backend(chosen["backend"], count)
    sync = chosen["sync"]
    if backend == "direct":
        _check_direct(count, sync, chosen["backend_options"])
        return None
    if not isinstance(sync, bool | None):
        raise TypeError(f"sync: expected True, False or None, got {sync!r}")
    try:
        given = inspect.signature(cls).bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(call_error(cls.__name__, error)) from None
    given.update(given.pop("others", {}))
    options = _checked_options(chosen["backend_options"], given)
    if backend == "submitit":
        given["launcher"] = options.pop("launcher", given.get("launcher", backend))
        if given["launcher"] != backend:
            raise ValueError(
                f"launcher: expected 'submitit' with backend='submitit', got {given['launcher']!r}"
            )
    launched = _LAUNCHED.get(backend)
    target = _of_processes(sync) if launched is None else getattr(pycollect, launched)
    more = {**_without_defaults(cls, target, given), **options}
    if count is None and not isinstance(more.get("create_env_fn"), list | tuple):
        count = 1
    if launched is not None:
        return target(num_collectors=count, sync=bool(sync), **more)
    if "create_env_fn" in more:
        more["create_env_fn"] = env_entries(more["create_env_fn"], "num_collectors", count)
    return target(**more)


def choose_sync(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the collector with worker processes that `sync` chooses."""
    if len(args) > 2:
        raise TypeError(call_error(cls.__name__, TypeError("too many positional arguments")))
    sync = kwargs.pop("sync", None)
    if not isinstance(sync, bool):
        raise TypeError(f"sync: expected True or False, got {sync!r}")
    return _of_processes(sync)(*args, **kwargs)


def _of_processes(sync: bool | None) -> Any:
    """Return the class for worker processes, imported late because it uses this module."""
    return pycollect.MultiSyncDataCollector if sync else pycollect.MultiaSyncDataCollector


def check_none_chosen(cls: type, given: Mapping[str, Any]) -> None:
    """Raise TypeError if one of the four arguments reached the constructor itself."""
    for name in _SELECTORS:
        if given[name] is not None:
            raise TypeError(
                f"{name}: expected None for {cls.__name__}, got {given[name]!r}; only Collector "
                "uses this argument, to choose a class"
            )


def _backend(given: Any, count: int | None) -> str:
    """Return the backend's name from the argument, TorchRL's `service_backend` or the count."""
    ask = getattr(sys.modules.get("torchrl._comm.backends"), "_get_service_backend", None)
    backend = ask() if given is None and ask is not None else given
    if backend is None:
        return "direct" if count is None else "process"
    if isinstance(backend, str):
        backend = _ALIASES.get(backend, backend)
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ValueError(f"backend: expected None or one of {list(_BACKENDS)}, got {backend!r}")
    name: str = backend
    return name


def _checked_options(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `backend_options` as a dict; raise if they repeat an argument of the call."""
    options = check.check_named("backend_options", value)
    if reserved := sorted({*_SELECTORS[1:], "num_workers"} & options.keys()):
        raise ValueError(
            f"backend_options: cannot contain {reserved}; pass num_collectors and sync to Collector"
        )
    if twice := sorted(options.keys() & given.keys()):
        raise ValueError(
            f"backend_options: {twice} are also arguments of this call; pass each once"
        )
    return options


def _check_direct(count: int | None, sync: Any, options: Any) -> None:
    """Check that there is one collector and no option for workers."""
    if count not in (None, 1):
        raise ValueError(
            f"num_collectors: expected at most 1 with backend='direct', got {count}; use "
            "backend='process' for more"
        )
    for name, value in (("sync", sync), ("backend_options", options)):
        if value is not None and not check.is_one_of(value, ({},)):
            raise ValueError(
                f"{name}: expected None with backend='direct', the default without num_collectors, "
                f"got {value!r}"
            )


def _without_defaults(cls: type, other: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without defaults of `cls` that the other class does not share.

    Configs pass all defaults explicitly.
    """
    own, theirs = inspect.signature(cls).parameters, inspect.signature(other).parameters
    kept = {}
    for name, value in given.items():
        default = own[name].default if name in own else inspect.Parameter.empty
        is_default = value is default or (type(value) is type(default) and value == default)
        if not is_default or (name in theirs and theirs[name].default == default):
            kept[name] = value
    return kept
