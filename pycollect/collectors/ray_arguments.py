"""The arguments that only a RayCollector has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.collectors import arguments as check
from pycollect.collectors.worker_arguments import WORKER_ARGUMENTS, of_each_worker, per_worker

# What collector_kwargs may not hold.
_OURS_ALONE = (
    "create_env_fn",
    "policy",
    "frames_per_batch",
    "total_frames",
    "postproc",
    "split_trajs",
    "replay_buffer",
    "sync",
)


def batched(
    entries: Sequence[Any], envs: Any, name: str = "num_workers_per_collector"
) -> list[Any]:
    """The entries, or of each so many copies that are stepped as a batch.

    Raises:
        ValueError: an entry that cannot be repeated, by the name of the argument.
    """
    return [_batched(entry, name, envs) for entry in entries]


def _batched(entry: Any, name: str, envs: Any) -> Any:
    """The entry itself, or so many copies of its callable that are stepped as a batch."""
    if check.check_positive(name, envs) == 1:
        return entry
    if isinstance(entry, list):
        raise ValueError(f"{name}: expected 1 where create_env_fn has lists as entries, got {envs}")
    if not callable(entry):
        raise ValueError(f"{name}: expected env callables in create_env_fn, got an environment")
    return [entry] * envs


def actor_arguments(
    values: Mapping[str, Any], passed: set[str], collector_kwargs: Any, actors: int
) -> list[dict[str, Any]]:
    """The arguments of each actor: defaults, then `collector_kwargs`, then what was passed.

    Args:
        values: the top-level values of WORKER_ARGUMENTS.
        passed: which of them the caller really gave.
        collector_kwargs: None, a dict, or one per actor.
    """
    given = per_worker("collector_kwargs", collector_kwargs, actors)
    result = []
    for own, top in zip(given, of_each_worker(values, actors), strict=True):
        check_collector_kwargs(own)
        known = {name: value for name, value in own.items() if name in WORKER_ARGUMENTS}
        result.append({**top, **known, **{name: top[name] for name in passed if name in top}})
    return result


def check_collector_kwargs(own: Mapping[str, Any]) -> None:
    """Refuse keys that are the RayCollector's own, and unknown ones."""
    from pycollect.collectors.single import SyncDataCollector

    for name in own:
        if name in _OURS_ALONE:
            raise ValueError(
                f"collector_kwargs: {name!r} belongs to the RayCollector itself; pass it there"
            )
    others = {name: value for name, value in own.items() if name not in WORKER_ARGUMENTS}
    check.check_others(SyncDataCollector, others)


def check_init_config(value: Any) -> dict[str, Any] | None:
    """None or the arguments of ``ray.init`` as a dict of its own."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"ray_init_config: expected a dict or None, got {type(value).__name__}")
    return dict(value)


def check_remote_configs(value: Any, actors: int) -> list[dict[str, Any]]:
    """One dict of actor options per actor."""
    configs = per_worker("remote_configs", value, actors)
    for config in configs:
        for name in ("max_restarts", "max_task_retries"):
            if name in config:
                raise ValueError(
                    f"remote_configs: {name!r} is not taken; the collector replaces workers itself"
                )
        custom = config.get("resources")
        if not isinstance(custom, Mapping | None):
            raise ValueError(f"remote_configs: expected a dict for 'resources', got {custom!r}")
        amounts = {name: config.get(name) for name in ("num_cpus", "num_gpus", "memory")}
        for name, amount in {**amounts, **(custom or {})}.items():
            if amount is not None and (
                isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0
            ):
                raise ValueError(
                    f"remote_configs: expected a number >= 0 for {name!r}, got {amount!r}"
                )
    return configs


def check_collector_class(value: Any) -> None:
    """What each actor runs: only the collector of one process so far."""
    name = value if isinstance(value, str) else getattr(value, "__name__", None)
    if name in ("single", "SyncDataCollector", "Collector"):
        return
    multi = ("sync", "async", "MultiSyncDataCollector", "MultiaSyncDataCollector")
    if name in (*multi, "MultiSyncCollector", "MultiAsyncCollector"):
        raise NotImplementedError(f"collector_class={value!r} is not implemented yet")
    raise ValueError(
        "collector_class: expected SyncDataCollector, a multi-process collector, or one of "
        f"'single', 'sync', 'async', got {value!r}"
    )
