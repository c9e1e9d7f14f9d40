"""Resources that actors reserve, compared with those of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.engines.ray.session import import_ray

_GIB = 1024**3


def check_amounts(argument: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless all amounts that an actor reserves are numbers >= 0.

    Args:
        argument: Name of the argument, for the error.
        options: Options of one actor.
    """
    custom = options.get("resources")
    if not isinstance(custom, Mapping | None):
        raise ValueError(f"{argument}: expected a dict for 'resources', got {custom!r}")
    amounts = {name: options.get(name) for name in ("num_cpus", "num_gpus", "memory")}
    for name, amount in {**amounts, **(custom or {})}.items():
        if amount is not None and (
            isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0
        ):
            raise ValueError(f"{argument}: expected a number >= 0 for {name!r}, got {amount!r}")


def check_resources(argument: str, options: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the cluster has too little of a resource in total.

    Args:
        argument: Name of the argument, for the error.
        options: Options of each actor.
    """
    total = import_ray().cluster_resources()
    wanted: dict[str, float] = {}
    for actor in options:
        for name, amount in _resources(actor).items():
            wanted[name] = wanted.get(name, 0.0) + amount
    for name, amount in wanted.items():
        if amount > total.get(name, 0.0):
            raise ValueError(
                f"{argument}: all actors ({len(options)}) together need {name}: "
                f"{_amount(name, amount)}, but the cluster has "
                f"{_amount(name, total.get(name, 0.0))}; reserve less or use fewer workers"
            )


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    resources = {name: float(options.get(key) or 0) for name, key in named.items()}
    for name, amount in (options.get("resources") or {}).items():
        resources[name] = float(amount)
    return {name: amount for name, amount in resources.items() if amount > 0}


def _amount(resource: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if resource == "memory" else f"{amount:g}"
