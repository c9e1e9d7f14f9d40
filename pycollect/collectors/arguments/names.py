"""The names of arguments: which are known, what to use in place of others."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pycollect

# TorchRL's arguments that only hint at how to go about it.
HINTS = frozenset(
    {
        "use_buffers",
        "return_same_td",
        "no_cuda_sync",
        "use_env_creator",
        "worker_idx",
        "auto_register_policy_transforms",
    }
)

_STRAGGLERS = "use MultiSyncDataCollector or RayCollector(sync=True), which stop slow workers"

_CENTRAL = (
    "use MultiSyncDataCollector, MultiaSyncDataCollector or RayCollector(inference='central')"
)

# Arguments of TorchRL and of other collectors that a class does not have, and what to use instead.
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
    "policy_device": "device",
    "max_frames_per_traj": "max_steps",
}
"""What other libraries, and other classes here, call what is meant."""


def check_others(name: str, known: Iterable[str], others: Mapping[str, Any]) -> None:
    """Check the keyword arguments that are not in the signature of a collector's class.

    Args:
        name: Name of the class.
        known: Names of its arguments.

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
    nearest = difflib.get_close_matches(other, known, n=1, cutoff=0.6)
    takers = _takers(other)
    hint = ""
    if (meant := _MEANT.get(other)) in known:
        hint = f"; did you mean {meant!r}?"
    elif other == "num_envs":
        hint = "; pass several environments as a list of callables, or as one vector environment"
    elif other == "num_workers" and "num_collectors" in known:
        hint = (
            "; did you mean 'num_collectors'? MultiSyncDataCollector and MultiaSyncDataCollector "
            "have 'num_workers'"
        )
    elif takers:
        hint = f"; it is an argument of {takers}"
    elif nearest:
        hint = f"; did you mean {nearest[0]!r}?"
    elif others := difflib.get_close_matches(other, all_arguments(), n=1, cutoff=0.8):
        hint = f"; did you mean {others[0]!r}, an argument of {_takers(others[0])}?"
    return f"{other}: not an argument of {name}{hint}"


def call_error(name: str, error: TypeError) -> str:
    """Return the text for arguments that `inspect` cannot bind to the signature of a class."""
    missing = re.fullmatch(r"missing a required (?:keyword-only )?argument: '(\w+)'", str(error))
    if missing:
        return f"{missing[1]}: {name} requires this argument"
    if str(error) == "too many positional arguments":
        return f"{name}: {error}; pass them by name, for example frames_per_batch=1000"
    return f"{name}: {error}"


def _takers(argument: str) -> str:
    """The collectors that have it; empty where none has."""
    return ", ".join(name for name, arguments in _arguments().items() if argument in arguments)


def all_arguments() -> set[str]:
    """Return the names of the arguments of all collectors."""
    return {name for arguments in _arguments().values() for name in arguments}


def _arguments() -> dict[str, list[str]]:
    """The names of its arguments, by collector."""
    return {name: [*inspect.signature(getattr(pycollect, name)).parameters] for name in _CLASSES}
