"""TorchRL's helper functions: collectors from counts, or from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from pycollect.collectors.single import SyncDataCollector
from pycollect.envs import check_entry
from pycollect.errors import warn_user
from pycollect.stream.collector import CollectorBase
from pycollect.trajectories.multistep import MultiStep

C = TypeVar("C", bound=CollectorBase)
EnvFns = Callable[..., Any] | Sequence[Callable[..., Any]]
EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass
class OnPolicyCollectorConfig:
    """What `make_collector_onpolicy` reads.

    Attributes:
        collector_device: where collectors and batches lie: a device, a list of one, or one per
            collector.
        pin_memory: batches lie in pinned memory.
        frames_per_batch: frames in one batch; see the collectors.
        total_frames: a lower bound of what is collected in all.
        num_workers: the number of environments.
        env_per_collector: environments of one collector: ``ceil(num_workers / env_per_collector)``
            collectors are made.
        seed: what `set_seed` is given.
        exploration_type: "deterministic", "random", "mode" or "mean".
        async_collection: off-policy: batches come first ready, first served.
        max_frames_per_traj: truncate and reset after so many steps; -1: off.
        gamma: the discount of `MultiStep`.
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
    # TorchRL's helpers read these and its dataclasses lack them: by keyword, so that positions
    # mean the same here.
    max_frames_per_traj: int = field(default=-1, kw_only=True)
    gamma: float = field(default=0.99, kw_only=True)


@dataclass
class OffPolicyCollectorConfig(OnPolicyCollectorConfig):
    """What `make_collector_offpolicy` reads beside that.

    Attributes:
        multi_step: whether batches go through `MultiStep`.
        n_steps_return: its steps.
        init_random_frames: frames of random actions before the policy acts.
    """

    multi_step: bool = False
    n_steps_return: int = 3
    init_random_frames: int = 50_000


_ADDED = ("pin_memory", "max_frames_per_traj", "gamma")  # not there in every config for TorchRL


def sync_sync_collector(
    env_fns: EnvFns,
    env_kwargs: EnvKwargs,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    **kwargs: Any,
) -> SyncDataCollector | MultiSyncDataCollector:
    """Collectors that deliver together, each with environments that it steps as a batch.

    Args:
        env_fns: a callable that returns an environment, for all of them; or a list with one per
            environment, which go to the collectors in order.
        env_kwargs: keyword arguments of the callables: a dict, or one per environment.
        num_env_per_collector: environments per collector; one is not batched. None with a list:
            what `num_collectors` leaves to each, else 1.
        num_collectors: None with a list: as many as it takes.
        kwargs: arguments of the collector: `policy`, `frames_per_batch` (200 if it is not given),
            and so on.

    Returns:
        A SyncDataCollector where `num_collectors` is 1, else a MultiSyncDataCollector.

    Raises:
        ValueError: the counts do not fit together, before any process starts.
    """
    entries, own_kwargs = _entries(env_fns, env_kwargs, num_env_per_collector, num_collectors)
    sizes = [len(entry) if isinstance(entry, list) else 1 for entry in entries]
    if len(set(sizes)) > 1:
        raise ValueError(
            "num_env_per_collector: expected as many environments for each collector of a sync "
            f"collector, got {sizes}"
        )
    arguments = {"frames_per_batch": 200, **kwargs}
    if num_collectors == 1:
        only = own_kwargs[0] if own_kwargs is not None else None
        return SyncDataCollector(entries[0], create_env_kwargs=only, **arguments)
    return MultiSyncDataCollector(entries, create_env_kwargs=own_kwargs, **arguments)


def sync_async_collector(
    env_fns: EnvFns,
    env_kwargs: EnvKwargs,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    **kwargs: Any,
) -> MultiaSyncDataCollector:
    """Collectors that deliver first ready, first served, each with environments as a batch.

    Args:
        env_fns, env_kwargs, num_env_per_collector, num_collectors, kwargs: as those of
            :func:`sync_sync_collector`.

    Raises:
        ValueError: the counts do not fit together, before any process starts.
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
    """A sync collector from a config, with trajectories in rows and a seed.

    Args:
        make_env: returns the environment of one collector, which may itself be a batch.
        actor_model_explore: the policy.
        cfg: has the attributes of :class:`OnPolicyCollectorConfig`; it is not changed.
        make_env_kwargs: keyword arguments of `make_env`: a dict, or one per collector.

    Raises:
        AttributeError: one that `cfg` does not have.
        ValueError: before any process starts.
    """
    arguments = _arguments(make_env, actor_model_explore, cfg, make_env_kwargs)
    return _seeded(sync_sync_collector(**arguments, postproc=_postproc(cfg, None)), cfg)


def make_collector_offpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: Any,
    cfg: Any,
    make_env_kwargs: EnvKwargs = None,
) -> SyncDataCollector | MultiSyncDataCollector | MultiaSyncDataCollector:
    """A collector from a config: async, random at first and with n-step rewards where it says so.

    Args:
        make_env, actor_model_explore, make_env_kwargs: as those of
            :func:`make_collector_onpolicy`.
        cfg: has the attributes of :class:`OffPolicyCollectorConfig`; it is not changed.

    Raises:
        AttributeError: one that `cfg` does not have.
        ValueError: before any process starts.
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
    """The entry of each collector, and the keyword arguments of each, where they are not batched.

    A batch's callables have theirs bound, since each may have others.
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
    kwargs = _kwargs_of_each(env_kwargs, len(envs))
    if per_collector is None:
        per_collector = 1 if collectors is None else -(len(envs) // -collectors)
    needed = -(len(envs) // -per_collector)
    if collectors is not None and needed != collectors:
        raise ValueError(
            f"num_collectors: {len(envs)} environments with {per_collector} for each make "
            f"{needed} collectors, got {collectors}"
        )
    if per_collector == 1:
        return envs, kwargs
    bound = [partial(env, **own) if own else env for env, own in zip(envs, kwargs, strict=True)]
    return [bound[i : i + per_collector] for i in range(0, len(bound), per_collector)], None


def _kwargs_of_each(value: EnvKwargs, envs: int) -> list[dict[str, Any]]:
    if value is None or isinstance(value, Mapping):
        return [dict(value or {}) for _ in range(envs)]
    if not isinstance(value, (list, tuple)) or not all(isinstance(own, Mapping) for own in value):
        raise TypeError(f"env_kwargs: expected a dict or one per environment, got {value!r}")
    if len(value) != envs:
        raise ValueError(f"env_kwargs: expected one per environment ({envs}), got {len(value)}")
    return [dict(own) for own in value]


# Configs


def _read(cfg: Any, name: str) -> Any:
    """An attribute of a config; the default for those that not every config for TorchRL has."""
    if name in _ADDED:
        return getattr(cfg, name, getattr(OnPolicyCollectorConfig, name))
    try:
        return getattr(cfg, name)
    except AttributeError:
        raise AttributeError(
            f"cfg: expected an attribute {name!r}, got {type(cfg).__name__} without it"
        ) from None


def _arguments(
    make_env: Callable[..., Any], policy: Any, cfg: Any, make_env_kwargs: EnvKwargs
) -> dict[str, Any]:
    """What both kinds of collectors are made with."""
    device = _device(_read(cfg, "collector_device"))
    workers = check.check_positive("num_workers", _read(cfg, "num_workers"))
    each = check.check_positive("env_per_collector", _read(cfg, "env_per_collector"))
    check.check_seed(_read(cfg, "seed"))
    names = ("max_frames_per_traj", "frames_per_batch", "total_frames", "exploration_type")
    return {
        "env_fns": make_env,
        "env_kwargs": make_env_kwargs,
        "num_env_per_collector": 1,  # `make_env` makes the batch, where there is one
        "num_collectors": -(workers // -each),
        "policy": policy,
        "device": device,
        "storing_device": device,
        "split_trajs": True,
        **{name: _read(cfg, name) for name in names},
    }


def _device(value: Any) -> Any:
    """A device for all collectors, or a list with one for each."""
    if value is None or isinstance(value, (str, torch.device)):
        return value
    devices = list(value)
    if not devices:
        raise ValueError("collector_device: expected at least one device, got an empty list")
    return devices if len(devices) > 1 else devices[0]


def _postproc(cfg: Any, first: MultiStep | None) -> Callable[[TensorDictBase], Any] | None:
    """What batches go through: `first`, and pinned memory where that is asked for and to be had."""
    if not _read(cfg, "pin_memory"):
        return first
    if not torch.cuda.is_available():
        warn_user(
            "pin_memory: CUDA is not available; batches are in ordinary memory",
        )
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
