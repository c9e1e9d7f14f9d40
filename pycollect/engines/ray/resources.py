"""What actors reserve, beside what the cluster has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.engines.ray.session import import_ray

_GIB = 1024**3


def check_amounts(argument: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError where what an actor is to reserve is not a number >= 0.

    Args:
        argument: is named in the error.
        options: of one actor.
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
    """Raise ValueError that names a resource of which the cluster has too little in total.

    Args:
        argument: is named in the error.
        options: of each actor.
    """
    total = import_ray().cluster_resources()
    wanted: dict[str, float] = {}
    for actor in options:
        for name, amount in _resources(actor).items():
            wanted[name] = wanted.get(name, 0.0) + amount
    for name, amount in wanted.items():
        if amount > total.get(name, 0.0):
            raise ValueError(
                f"{argument}: {_amount(name, amount)} of {name} are asked for in all "
                f"(actors: {len(options)}), the cluster has "
                f"{_amount(name, total.get(name, 0.0))}"
            )


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    resources = {name: float(options.get(key) or 0) for name, key in named.items()}
    for name, amount in (options.get("resources") or {}).items():
        resources[name] = float(amount)
    return {name: amount for name, amount in resources.items() if amount > 0}


def _amount(resource: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if resource == "memory" else f"{amount:g}"
