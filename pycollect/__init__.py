"""A compiled-core data collector for reinforcement learning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycollect.collectors.helpers import (
        OffPolicyCollectorConfig,
        OnPolicyCollectorConfig,
        make_collector_offpolicy,
        make_collector_onpolicy,
        sync_async_collector,
        sync_sync_collector,
    )
    from pycollect.collectors.multi import (
        AsyncCollector,
        MultiaSyncDataCollector,
        MultiCollector,
        MultiSyncDataCollector,
    )
    from pycollect.collectors.multi import MultiaSyncDataCollector as MultiAsyncCollector
    from pycollect.collectors.multi import MultiSyncDataCollector as MultiSyncCollector
    from pycollect.collectors.ray import RayCollector
    from pycollect.collectors.single import SyncDataCollector
    from pycollect.collectors.single import SyncDataCollector as Collector
    from pycollect.collectors.stats_writer import StatsWriter
    from pycollect.errors import WorkerError
    from pycollect.trajectories.multistep import MultiStep
    from pycollect.trajectories.split import split_trajectories

__version__ = "0.1.0"
__all__ = [
    "AsyncCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiStep",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "OffPolicyCollectorConfig",
    "OnPolicyCollectorConfig",
    "RayCollector",
    "StatsWriter",
    "SyncDataCollector",
    "WorkerError",
    "make_collector_offpolicy",
    "make_collector_onpolicy",
    "split_trajectories",
    "sync_async_collector",
    "sync_sync_collector",
]

# Names are looked up when they are first asked for: the core alone needs no torch, splitting no
# Gymnasium, and `import pycollect` takes no time.
_HOMES = {
    "AsyncCollector": ("pycollect.collectors.multi", "AsyncCollector"),
    "Collector": ("pycollect.collectors.single", "SyncDataCollector"),
    "MultiAsyncCollector": ("pycollect.collectors.multi", "MultiaSyncDataCollector"),
    "MultiCollector": ("pycollect.collectors.multi", "MultiCollector"),
    "MultiStep": ("pycollect.trajectories.multistep", "MultiStep"),
    "MultiSyncCollector": ("pycollect.collectors.multi", "MultiSyncDataCollector"),
    "MultiSyncDataCollector": ("pycollect.collectors.multi", "MultiSyncDataCollector"),
    "MultiaSyncDataCollector": ("pycollect.collectors.multi", "MultiaSyncDataCollector"),
    "OffPolicyCollectorConfig": ("pycollect.collectors.helpers", "OffPolicyCollectorConfig"),
    "OnPolicyCollectorConfig": ("pycollect.collectors.helpers", "OnPolicyCollectorConfig"),
    "RayCollector": ("pycollect.collectors.ray", "RayCollector"),
    "StatsWriter": ("pycollect.collectors.stats_writer", "StatsWriter"),
    "SyncDataCollector": ("pycollect.collectors.single", "SyncDataCollector"),
    "WorkerError": ("pycollect.errors", "WorkerError"),
    "make_collector_offpolicy": ("pycollect.collectors.helpers", "make_collector_offpolicy"),
    "make_collector_onpolicy": ("pycollect.collectors.helpers", "make_collector_onpolicy"),
    "split_trajectories": ("pycollect.trajectories.split", "split_trajectories"),
    "sync_async_collector": ("pycollect.collectors.helpers", "sync_async_collector"),
    "sync_sync_collector": ("pycollect.collectors.helpers", "sync_sync_collector"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        value = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise ImportError(f"{name} needs Gymnasium: pip install gymnasium") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]
