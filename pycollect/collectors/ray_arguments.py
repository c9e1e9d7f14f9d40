"""The arguments of a RayCollector, brought into one form per actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycollect.collectors import arguments as check
from pycollect.collectors.pickling import pickled_policies, pickled_spec
from pycollect.collectors.ray_engine import actor_options
from pycollect.collectors.remote_worker import WorkerSpec
from pycollect.collectors.workforce import WorkerPlan
from pycollect.envs.info import check_info_keys
from pycollect.policy import check_policy_state
from pycollect.worker import WorkerOptions

# What collector_kwargs may hold: the arguments that concern what an actor does.
WORKER_ARGUMENTS = (
    "device",
    "storing_device",
    "env_device",
    "policy_device",
    "create_env_kwargs",
    "autoreset_mode",
    "info_keys",
    "max_frames_per_traj",
    "init_random_frames",
    "reset_at_each_iter",
    "set_truncated",
    "policy_factory",
    "policy_state",
    "exploration_type",
    "track_traj_ids",
    "track_policy_version",
    "extend_buffer",
    "init_fn",
    "pre_collect_hook",
    "post_collect_hook",
    "compact_obs",
    "num_threads",
)
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
_DEVICES = ("device", "storing_device", "env_device", "policy_device")


def env_entries(create_env_fn: Any, num_collectors: Any, envs_per_collector: Any) -> list[Any]:
    """One entry of `create_env_fn` per actor.

    Raises:
        ValueError: neither a list nor `num_collectors`, or their lengths differ, or an entry that
            is a list together with `num_workers_per_collector`.
    """
    count = (
        None if num_collectors is None else check.check_positive("num_collectors", num_collectors)
    )
    if isinstance(create_env_fn, (list, tuple)):
        entries = list(create_env_fn)
        if not entries:
            raise ValueError("create_env_fn: expected at least one entry, got an empty list")
        if count is not None and count != len(entries):
            raise ValueError(
                f"num_collectors: expected {len(entries)}, the length of create_env_fn, got {count}"
            )
    else:
        check.check_entry(create_env_fn)
        if count is None:
            raise ValueError(
                "num_collectors: expected a number of actors, because create_env_fn is not a list"
            )
        entries = [create_env_fn] * count
    return [_batched(entry, envs_per_collector) for entry in entries]


def _batched(entry: Any, envs: Any) -> Any:
    """The entry itself, or so many copies of its callable that are stepped as a batch."""
    name = "num_workers_per_collector"
    entry = check.check_entry(entry)
    if check.check_positive(name, envs) == 1:
        return entry
    if isinstance(entry, list):
        raise ValueError(f"{name}: expected 1 where create_env_fn has lists as entries, got {envs}")
    if not callable(entry):
        raise ValueError(f"{name}: expected env callables in create_env_fn, got an environment")
    return [entry] * envs


def worker_arguments(
    values: Mapping[str, Any], passed: set[str], collector_kwargs: Any, actors: int
) -> list[dict[str, Any]]:
    """The arguments of each actor: defaults, then `collector_kwargs`, then what was passed.

    Args:
        values: the top-level values of WORKER_ARGUMENTS.
        passed: which of them the caller really gave.
        collector_kwargs: None, a dict, or one per actor.
    """
    given = per_actor("collector_kwargs", collector_kwargs, actors)
    result = []
    for index, own in enumerate(given):
        check_collector_kwargs(own)
        top = {name: _of_actor(name, value, index, actors) for name, value in values.items()}
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


def per_actor(name: str, value: Any, actors: int) -> list[dict[str, Any]]:
    """A dict, or one per actor, as a list of dicts of their own; None is an empty one."""
    if value is None or isinstance(value, Mapping):
        return [dict(value or {}) for _ in range(actors)]
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Mapping) for v in value):
        raise TypeError(f"{name}: expected a dict or a list of dicts, got {value!r}")
    if len(value) != actors:
        raise ValueError(f"{name}: expected one dict per actor ({actors}), got {len(value)}")
    return [dict(item) for item in value]


def _of_actor(name: str, value: Any, index: int, actors: int) -> Any:
    """This actor's entry where a top-level value has one per actor."""
    if not isinstance(value, (list, tuple)):
        return value
    if name in _DEVICES or name in ("create_env_kwargs", "policy_factory"):
        if len(value) != actors:
            raise ValueError(f"{name}: expected one per actor ({actors}), got {len(value)}")
        return value[index]
    return value


def policy_sources(arguments: Sequence[Mapping[str, Any]], policy: Any) -> tuple[list[Any], bool]:
    """What each actor has its policy from, and whether that is a factory."""
    factories = [own["policy_factory"] for own in arguments]
    for factory in factories:
        check.check_factories(factory, policy, 1)
    given = [factory is not None for factory in factories]
    if not any(given):
        return [check.check_policy(policy)] * len(arguments), False
    if not all(given):
        raise ValueError(
            f"policy_factory: expected one for every actor, got none for {given.index(False)}"
        )
    return factories, True


def worker_options(arguments: Mapping[str, Any], frames: int) -> WorkerOptions:
    """The checked options of one actor's worker, which collects `frames` frames per rollout."""
    check.check_devices(arguments)
    return WorkerOptions(
        frames=frames,
        autoreset_mode=check.check_autoreset_mode(arguments["autoreset_mode"]),
        info_keys=check_info_keys(arguments["info_keys"]),
        max_frames_per_traj=check.check_count(
            "max_frames_per_traj", arguments["max_frames_per_traj"]
        ),
        reset_at_each_iter=bool(arguments["reset_at_each_iter"]),
        set_truncated=bool(arguments["set_truncated"]),
        policy_state=check_policy_state(arguments["policy_state"]),
        exploration_type=check.check_exploration(arguments["exploration_type"]),
        track_policy_version=bool(arguments["track_policy_version"]),
        num_threads=check.check_threads(arguments["num_threads"]),
        compact_obs=bool(arguments["compact_obs"]),
        **{
            name: check.check_callable(name, arguments[name])
            for name in ("init_fn", "pre_collect_hook", "post_collect_hook")
        },
    )


def one_for_all(given: Any, before: Any) -> Any:
    """What is given; else what the collector was given, unless that is one per actor."""
    if given is not None or isinstance(before, (list, tuple)):
        return given
    return before


def worker_plans(
    entries: Sequence[Any],
    arguments: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
    sources: Sequence[Any],
    built_by_workers: bool,
    share: int,
    first: int = 0,
) -> list[WorkerPlan]:
    """What each actor is made from; TypeError by the argument's name for what does not pickle.

    Args:
        share: frames of one rollout.
        first: the id of the first one.
    """
    specs = [
        WorkerSpec(
            index,
            entry,
            check.check_env_kwargs(own["create_env_kwargs"]),
            worker_options(own, share),
            builds_policy=built_by_workers,
        )
        for index, (entry, own) in enumerate(zip(entries, arguments, strict=True), first)
    ]
    for spec in specs:
        pickled_spec(spec)
    policies = pickled_policies(sources, built_by_workers)
    return [
        WorkerPlan(spec, policy, actor_options(config))
        for spec, policy, config in zip(specs, policies, configs, strict=True)
    ]


def common_value(name: str, arguments: Sequence[Mapping[str, Any]]) -> Any:
    """The value that all actors share; ValueError if they differ."""
    first = arguments[0][name]
    if any(other[name] != first for other in arguments):
        values = [other[name] for other in arguments]
        raise ValueError(f"{name}: expected one value for all actors, got {values}")
    return first


def storing_device(arguments: Sequence[Mapping[str, Any]], sync: bool) -> torch.device | None:
    """Where batches lie: one device for all workers where batches are joined."""
    devices = [check.check_devices(own) for own in arguments]
    if sync and any(device != devices[0] for device in devices):
        raise ValueError(
            "storing_device: expected one device for all workers of a sync collector, got "
            f"{[str(device) for device in devices]}"
        )
    return devices[0]


def check_init_config(value: Any) -> dict[str, Any] | None:
    """None or the arguments of ``ray.init`` as a dict of its own."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"ray_init_config: expected a dict or None, got {type(value).__name__}")
    return dict(value)


def check_remote_configs(value: Any, actors: int) -> list[dict[str, Any]]:
    """One dict of actor options per actor."""
    configs = per_actor("remote_configs", value, actors)
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


def check_cat_results(value: Any, sync: bool) -> str | int:
    """How sync results are joined; "stack" for None."""
    if value is not None and not sync:
        raise ValueError(f"cat_results: expected None without sync=True, got {value!r}")
    choice: str | int = check.check_choice(
        "cat_results", "stack" if value is None else value, ("stack", 0, -1)
    )
    return choice


def check_prefetch(value: Any, sync: bool) -> int:
    """Rollouts per worker beyond the one being consumed: by default 2, and 0 where sync."""
    if value is None:
        return 0 if sync else 2
    number = check.check_integer("prefetch", value)
    if number < 0:
        raise ValueError(f"prefetch: expected an int >= 0, got {number}")
    return number
