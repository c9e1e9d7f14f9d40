"""TorchRL's helper functions, which make collectors from counts or from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.api.arguments import dict_each
from pycollect.api.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from pycollect.api.single import SyncDataCollector
from pycollect.arguments import completed_by
from pycollect.compat.torchrl import TorchRLCollector
from pycollect.data.multistep import MultiStep
from pycollect.envs.make import check_entry
from pycollect.errors import warn_user

C = TypeVar("C", bound=TorchRLCollector)
EnvFns = Callable[..., Any] | Sequence[Callable[..., Any]]
EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass
class OnPolicyCollectorConfig:
    """Config of `make_collector_onpolicy`.

    Attributes:
        collector_device: Device of collectors and batches: a device, a list of one, or a list with
            one device per collector (default: ["cpu"]).
        pin_memory: Return batches in pinned memory. Without CUDA this has no effect, with a warning
            (default: ``False``).
        frames_per_batch: Number of frames in a batch, as for collectors (default: 1000).
        total_frames: Stop after at least this many frames (default: 50,000,000).
        num_workers: Number of environments (default: 32).
        env_per_collector: Number of environments per collector; ``ceil(num_workers /
            env_per_collector)`` collectors are made (default: 8).
        seed: Argument of `set_seed` (default: 42).
        exploration_type: "deterministic", "random", "mode" or "mean" (default: "random").
        async_collection: Off-policy only: return each rollout as soon as it is ready (default:
            ``False``).
        max_frames_per_traj: Truncate and reset a trajectory after this many steps; -1 sets no limit
            (default: -1).
        gamma: Discount factor of `MultiStep` (default: 0.99).
    """

    collector_device: Any = field(default_factory=lambda: ["cpu"])
    pin_memory: bool = False
    frames_per_batch: int = 1000
    total_frames: int = 50_000_000
    num_workers: int = 32
    env_per_collector: int = 8
    seed: int = 42
    exploration_type: str = "random"
    async_collection: bool = False
    # TorchRL's dataclasses lack these, so they are keyword-only: positions keep their meaning.
    max_frames_per_traj: int = field(default=-1, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)


@dataclass
class OffPolicyCollectorConfig(OnPolicyCollectorConfig):
    """Config of `make_collector_offpolicy`, in addition to the on-policy one.

    Attributes:
        multi_step: Pass batches through `MultiStep` (default: ``False``).
        n_steps_return: `n_steps` of `MultiStep` (default: 3).
        init_random_frames: Number of frames with random actions before the policy acts (default:
            50,000).
    """

    multi_step: bool = False
    n_steps_return: int = 3
    init_random_frames: int = 50_000


_ADDED = ("pin_memory", "max_frames_per_traj", "gamma")  # optional: TorchRL's configs may lack them


def sync_sync_collector(
    env_fns: EnvFns,
    env_kwargs: EnvKwargs,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    **kwargs: Any,
) -> SyncDataCollector | MultiSyncDataCollector:
    """Make a sync collector, with a batch of environments in each worker.

    Args:
        env_fns: A callable that returns an environment, or a list with one callable per
            environment. Collectors get consecutive parts of the list.
        env_kwargs: Keyword arguments for the callables: a dict, or a list with one dict per
            environment.
        num_env_per_collector: Number of environments per collector; a single one is not batched.
            Required unless `env_fns` is a list. ``None`` with a list divides it by
            `num_collectors`, or means 1 (default: ``None``).
        num_collectors: Number of collectors. Required unless `env_fns` is a list. ``None`` with a
            list means as many as needed (default: ``None``).
        kwargs: Arguments of the collector, such as `policy` and `frames_per_batch` (default: 200).

    Returns:
        A SyncDataCollector if `num_collectors` is 1, else a MultiSyncDataCollector.

    Raises:
        ValueError: The counts do not match; no process was started.
    """
    entries, own_kwargs = _entries(env_fns, env_kwargs, num_env_per_collector, num_collectors)
    sizes = [len(entry) if isinstance(entry, list) else 1 for entry in entries]
    if len(set(sizes)) > 1:
        raise ValueError(
            "num_env_per_collector: a sync collector needs the same number of environments in "
            f"each worker, got {sizes}"
        )
    arguments = {"frames_per_batch": 200, **kwargs}
    if num_collectors == 1:
        only = own_kwargs[0] if own_kwargs is not None else None
        return SyncDataCollector(entries[0], create_env_kwargs=only, **arguments)
    return MultiSyncDataCollector(entries, create_env_kwargs=own_kwargs, **arguments)


@completed_by(sync_sync_collector)
def sync_async_collector(
    env_fns: EnvFns,
    env_kwargs: EnvKwargs,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    **kwargs: Any,
) -> MultiaSyncDataCollector:
    """Make an async collector, with a batch of environments in each worker.

    Args:
        ...: See sync_sync_collector.

    Returns:
        A MultiaSyncDataCollector.
    """
    entries, own_kwargs = _entries(env_fns, env_kwargs, num_env_per_collector, num_collectors)
    arguments = {"frames_per_batch": 200, **kwargs}
    return MultiaSyncDataCollector(entries, create_env_kwargs=own_kwargs, **arguments)


def make_collector_onpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: Any,
    cfg: Any,
    make_env_kwargs: EnvKwargs = None,
) -> SyncDataCollector | MultiSyncDataCollector:
    """Make a seeded sync collector from a config, with one trajectory per row.

    Args:
        make_env: Callable that returns the environment of one collector, which may be a batch.
        actor_model_explore: The policy.
        cfg: Object with the attributes of :class:`OnPolicyCollectorConfig`. It is not modified.
        make_env_kwargs: Keyword arguments of `make_env`: a dict, or a list with one dict per
            collector (default: ``None``).

    Returns:
        A SyncDataCollector for a single collector, else a MultiSyncDataCollector.

    Raises:
        AttributeError: `cfg` lacks an attribute.
        ValueError: A value in `cfg` is invalid; no process was started.
    """
    arguments = _arguments(make_env, actor_model_explore, cfg, make_env_kwargs)
    return _seeded(sync_sync_collector(**arguments, postproc=_postproc(cfg, None)), cfg)


@completed_by(make_collector_onpolicy)
def make_collector_offpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: Any,
    cfg: Any,
    make_env_kwargs: EnvKwargs = None,
) -> SyncDataCollector | MultiSyncDataCollector | MultiaSyncDataCollector:
    """Make a seeded collector from a config, for off-policy algorithms.

    The config may ask for async collection, n-step rewards and random actions at the start.

    Args:
        ...: See make_collector_onpolicy.
        cfg: Object with the attributes of :class:`OffPolicyCollectorConfig`. It is not modified.

    Returns:
        A MultiaSyncDataCollector with `async_collection`; otherwise a SyncDataCollector for a
        single collector, else a MultiSyncDataCollector.
    """
    multi_step = None
    if _read(cfg, "multi_step"):
        multi_step = MultiStep(gamma=_read(cfg, "gamma"), n_steps=_read(cfg, "n_steps_return"))
    arguments = {
        **_arguments(make_env, actor_model_explore, cfg, make_env_kwargs),
        "init_random_frames": _read(cfg, "init_random_frames"),
    }
    arguments["postproc"] = _postproc(cfg, multi_step)
    if _read(cfg, "async_collection"):
        return _seeded(sync_async_collector(**arguments), cfg)
    return _seeded(sync_sync_collector(**arguments), cfg)


# Counts


def _entries(
    env_fns: EnvFns, env_kwargs: EnvKwargs, per_collector: int | None, collectors: int | None
) -> tuple[list[Any], list[Any] | None]:
    """Return each collector's entry, and its keyword arguments if it is not batched.

    The callables of a batch have their keyword arguments bound, because these may differ.
    """
    per_collector = check.check_positive_or_none("num_env_per_collector", per_collector)
    collectors = check.check_positive_or_none("num_collectors", collectors)
    if isinstance(env_fns, (list, tuple)):
        envs = [check_entry(fn) for fn in env_fns]
        if not envs:
            raise ValueError("env_fns: expected at least one environment, got an empty list")
    elif per_collector is None or collectors is None:
        missing = "num_env_per_collector" if per_collector is None else "num_collectors"
        raise ValueError(f"{missing}: expected a count, because env_fns is not a list")
    else:
        envs = [check_entry(env_fns)] * (per_collector * collectors)
    kwargs = dict_each("env_kwargs", env_kwargs, len(envs), "environment")
    if per_collector is None:
        per_collector = 1 if collectors is None else -(len(envs) // -collectors)
    needed = -(len(envs) // -per_collector)
    if collectors is not None and needed != collectors:
        raise ValueError(
            f"num_collectors: expected {needed} for {len(envs)} environments, {per_collector} per "
            f"collector, got {collectors}"
        )
    if per_collector == 1:
        return envs, kwargs
    bound = [partial(env, **own) if own else env for env, own in zip(envs, kwargs, strict=True)]
    return [bound[i : i + per_collector] for i in range(0, len(bound), per_collector)], None


# Configs


def _read(cfg: Any, name: str) -> Any:
    """Return an attribute of a config, or the default of an optional one."""
    if name in _ADDED:
        return getattr(cfg, name, getattr(OnPolicyCollectorConfig, name))
    try:
        return getattr(cfg, name)
    except AttributeError:
        raise AttributeError(
            f"cfg: expected an attribute {name!r}, but {type(cfg).__name__} has none"
        ) from None


def _arguments(
    make_env: Callable[..., Any], policy: Any, cfg: Any, make_env_kwargs: EnvKwargs
) -> dict[str, Any]:
    """Return the arguments that both kinds of collectors share."""
    device = _device(_read(cfg, "collector_device"))
    workers = check.check_positive("num_workers", _read(cfg, "num_workers"))
    each = check.check_positive("env_per_collector", _read(cfg, "env_per_collector"))
    check.check_seed(_read(cfg, "seed"))
    names = ("max_frames_per_traj", "frames_per_batch", "total_frames", "exploration_type")
    return {
        "env_fns": make_env,
        "env_kwargs": make_env_kwargs,
        "num_env_per_collector": 1,  # `make_env` may return a batch itself
        "num_collectors": -(workers // -each),
        "policy": policy,
        "device": device,
        "storing_device": device,
        "split_trajs": True,
        **{name: _read(cfg, name) for name in names},
    }


def _device(value: Any) -> Any:
    """Return one device, or a list with one device per collector."""
    if value is None or isinstance(value, (str, torch.device)):
        return value
    devices = list(value)
    if not devices:
        raise ValueError("collector_device: expected at least one device, got an empty list")
    return devices if len(devices) > 1 else devices[0]


def _postproc(cfg: Any, first: MultiStep | None) -> Callable[[TensorDictBase], Any] | None:
    """Return the function for each batch: `first`, then pinning if requested and possible."""
    if not _read(cfg, "pin_memory"):
        return first
    if not torch.cuda.is_available():
        warn_user("pin_memory: has no effect, because CUDA is not available")
        return first

    def pinned(td: TensorDictBase) -> TensorDictBase:
        td = td if first is None else first(td)
        on_host = td.device is None or td.device.type == "cpu"
        return td.pin_memory() if on_host else td

    return pinned


def _seeded(collector: C, cfg: Any) -> C:
    try:
        collector.set_seed(_read(cfg, "seed"))
    except BaseException:
        collector.shutdown()
        raise
    return collector
