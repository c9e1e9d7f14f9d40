"""The names of arguments: which are known, what to use in place of others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

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

_STRAGGLERS = "use MultiSyncDataCollector or RayCollector(sync=True): only they wait for stragglers"

_CENTRAL = "use MultiSyncDataCollector or MultiaSyncDataCollector(inference='central')"

# Arguments of TorchRL's, and of other collectors, that have no meaning here, and what to use.
REFUSED = {
    "interruptor": "use preemptive_threshold",
    "backend": "the collector's class says where it runs",
    "num_collectors": "use a list, one entry per worker, and a collector that has several",
    "sync": "use MultiSyncDataCollector or MultiaSyncDataCollector: the class says it",
    "backend_options": "use ray_init_config and remote_configs",
    "cat_results": "it joins the rollouts of several workers",
    "preemptive_threshold": _STRAGGLERS,
    "min_fraction": _STRAGGLERS,
    "inference": _CENTRAL,
    "min_batch_size": _CENTRAL,
    "max_batch_size": _CENTRAL,
    "server_timeout": _CENTRAL,
}


def check_others(name: str, known: Iterable[str], others: Mapping[str, Any]) -> None:
    """Check the keyword arguments that are not in the signature of a collector's class.

    Args:
        name: of the class.
        known: the arguments that are there.

    Raises:
        ValueError: one of TorchRL's that has no meaning here; the text says what to use.
        TypeError: an unknown one; the text names the nearest known one.
    """
    for other, value in others.items():
        if other in HINTS or (other == "reset_when_done" and value in (None, True)):
            continue
        if other == "reset_when_done":
            raise ValueError(
                "reset_when_done: expected True, got False; finished environments are always reset"
            )
        if other in REFUSED:
            if value is not None:
                raise ValueError(f"{other}: not an argument of {name}; {REFUSED[other]}")
        else:
            raise TypeError(_unknown(name, list(known), other))


def _unknown(name: str, known: list[str], other: str) -> str:
    nearest = difflib.get_close_matches(other, known, n=1, cutoff=0.6)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    if other == "num_workers" and "num_collectors" in known:
        hint = (
            "; did you mean 'num_collectors'? MultiSyncDataCollector and MultiaSyncDataCollector "
            "have 'num_workers'"
        )
    return f"{name} got an unexpected keyword argument {other!r}{hint}"
