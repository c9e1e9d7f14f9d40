"""The arguments that only a RayCollector has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollect.collectors.arguments.workers import dict_each
from pycollect.engines.ray.resources import check_amounts


def check_init_config(value: Any) -> dict[str, Any] | None:
    """None or the arguments of ``ray.init`` as a dict of its own."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"ray_init_config: expected a dict or None, got {type(value).__name__}")
    return dict(value)


def check_remote_configs(value: Any, actors: int) -> list[dict[str, Any]]:
    """Return one dict of actor options per actor."""
    configs = dict_each("remote_configs", value, actors)
    for config in configs:
        for name in ("max_restarts", "max_task_retries"):
            if name in config:
                raise ValueError(
                    f"remote_configs: {name!r} cannot be set; the collector replaces dead workers "
                    "itself"
                )
        check_amounts("remote_configs", config)
    return configs
