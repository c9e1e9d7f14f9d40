"""The names of arguments: which are known, what to use in place of others, which were passed."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
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


# TorchRL's arguments that have no meaning here, and what to use.
REFUSED = {
    "interruptor": "use preemptive_threshold",
    "backend": "the collector's class says where it runs",
    "num_collectors": "use a list, one entry per worker, and a collector that has several",
    "sync": "use MultiSyncDataCollector or MultiaSyncDataCollector: the class says it",
    "backend_options": "use ray_init_config and remote_configs",
    "cat_results": "it joins the rollouts of several workers",
    "preemptive_threshold": _STRAGGLERS,
    "min_fraction": _STRAGGLERS,
}


def check_others(cls: type, others: Mapping[str, Any]) -> None:
    """Check the keyword arguments that are not in the signature of `cls`.

    Raises:
        ValueError: one of TorchRL's that has no meaning here; the text says what to use.
        TypeError: an unknown one; the text names the nearest known one.
    """
    for name, value in others.items():
        if name in HINTS or (name == "reset_when_done" and value in (None, True)):
            continue
        if name == "reset_when_done":
            raise ValueError(
                "reset_when_done: expected True, got False; finished environments are always reset"
            )
        if name in REFUSED:
            if value is not None:
                raise ValueError(f"{name}: not an argument of {cls.__name__}; {REFUSED[name]}")
        else:
            raise TypeError(_unknown(cls, name))


def _unknown(cls: type, name: str) -> str:
    known = [known for known in inspect.signature(cls).parameters if known != "others"]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if name == "num_workers" and "num_collectors" in known:  # the word of the Multi classes
        nearest = ["num_collectors"]
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}"


def remembers_passed(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the names of the arguments that the caller really gave in `_passed`."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self._passed = set(kwargs)
        init(self, *args, **kwargs)

    return wrapper
