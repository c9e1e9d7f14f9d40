"""Check the arguments that only AsyncBatchedCollector has, as in TorchRL."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pycollect import checks as check
from pycollect.api import arguments as parse
from pycollect.arguments import naming
from pycollect.compat.weight_options import check_schemes

_PROCESSES = (None, "threading", "multiprocessing")
_CONFIGURED = ("max_batch_size", "min_batch_size", "timeout")
_LEAST_CHUNK = 64  # steps, as in TorchRL
_MOST_IN_A_CALL = 64  # number of environments, as in TorchRL


def check_backends(
    transport: Any, backend: Any, env_backend: Any, policy_backend: Any, driver_affinity: Any
) -> None:
    """Raise ValueError for values that are not supported; supported ones have no effect."""
    if not check.is_one_of(transport, (None, "auto", "driver")):
        raise ValueError(
            f"transport: expected None, 'auto' or 'driver', got {transport!r}; environments always "
            "communicate through shared memory"
        )
    named = {"backend": backend, "env_backend": env_backend, "policy_backend": policy_backend}
    for name, value in named.items():
        if not check.is_one_of(value, _PROCESSES):
            raise ValueError(
                f"{name}: expected None, 'threading' or 'multiprocessing', got {value!r}; to use "
                "several machines, use RayCollector"
            )
    if driver_affinity is not None:
        raise ValueError(
            f"driver_affinity: expected None, got {driver_affinity!r}; to bind this process to "
            "CPUs, call os.sched_setaffinity"
        )


def server_arguments(
    config: Any, devices: Any, device: Any, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the server and of devices under MultiaSyncDataCollector's names.

    Args:
        config: TorchRL's InferenceServerConfig, or an object with its attributes.
        devices: TorchRL's InferenceDeviceConfig, or an object with its attributes.
        sizes: Values of min_batch_size, max_batch_size and server_timeout.
    """
    if config is not None and any(value is not None for value in sizes.values()):
        given = next(name for name, value in sizes.items() if value is not None)
        raise ValueError(f"server_config: expected None because {given} is given; pass one of them")
    if config is not None and not all(hasattr(config, name) for name in _CONFIGURED):
        raise TypeError(
            f"server_config: expected an object with {', '.join(_CONFIGURED)}, such as TorchRL's "
            f"InferenceServerConfig, got {config!r}"
        )
    if devices is not None and device is not None:
        raise ValueError(
            "device_config: expected None because device is given; pass one of the two"
        )
    if config is not None:
        sizes = {
            "max_batch_size": config.max_batch_size,
            "min_batch_size": config.min_batch_size,
            "server_timeout": config.timeout,
        }
    if sizes["max_batch_size"] is None:
        sizes = {**sizes, "max_batch_size": _MOST_IN_A_CALL}
    names = ("policy_device", "env_device", "storing_device")
    places = {name: getattr(devices, name, None) for name in names}
    return {**sizes, **places} if devices is not None else {**sizes, "policy_device": device}


def receiver(model: Any, scheme: Any) -> dict[str, Any] | None:
    """Return `weight_sync` and its model as a value of `weight_recv_schemes`."""
    if not isinstance(model, str):
        raise TypeError(f"weight_sync_model_id: expected a string, got {model!r}")
    return None if scheme is None else check_schemes("weight_sync", {model: scheme})


def check_version_key(key: Any) -> Any:
    """Return None, or the key of the policy version in batches."""
    names = key if isinstance(key, tuple) and key else (key,)
    if key is not None and not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"policy_version_key: expected a string, a tuple of strings or None, got {key!r}"
        )
    return key


def workers_entries(
    create_env_fn: Any, create_env_kwargs: Any, envs_per_worker: int, worker_affinity: Any
) -> list[Any]:
    """Return each worker's entry: a callable, or a list of the callables that it steps."""
    if not isinstance(create_env_fn, (list, tuple)):
        raise TypeError(
            "create_env_fn: expected a list with one entry per environment, got "
            f"{type(create_env_fn).__name__}"
        )
    entries = parse.env_entries(create_env_fn, "num_workers", None)
    kwargs = parse.dict_each("create_env_kwargs", create_env_kwargs, len(entries), "environment")
    bound = [
        partial(make, **more) if more else make for make, more in zip(entries, kwargs, strict=True)
    ]
    if envs_per_worker > 1:
        starts = range(0, len(bound), envs_per_worker)
        bound = [bound[at : at + envs_per_worker] for at in starts]
    masks = _masks(worker_affinity, len(bound))
    return [_with_affinity(*pair) for pair in zip(bound, masks, strict=True)]


def _masks(affinity: Any, workers: int) -> Sequence[Sequence[int] | None]:
    if affinity is None:
        return [None] * workers
    is_list = isinstance(affinity, Sequence) and not isinstance(affinity, str | bytes)
    if not callable(affinity) and not is_list:
        raise TypeError(
            "worker_affinity: expected a list with the CPUs of each worker, or a function of the "
            f"worker's index, got {affinity!r}"
        )
    with naming("worker_affinity"):
        masks = [affinity(n) for n in range(workers)] if callable(affinity) else list(affinity)
    if len(masks) != workers:
        raise ValueError(
            f"worker_affinity: expected one list of CPUs per worker ({workers}), got {len(masks)}"
        )
    here = os.sched_getaffinity(0)
    for mask in masks:
        is_mask = isinstance(mask, Collection) and len(mask) > 0
        if not is_mask or not all(isinstance(cpu, int) and cpu in here for cpu in mask):
            raise ValueError(
                f"worker_affinity: expected a list of CPUs among {sorted(here)} for each worker, "
                f"got {mask!r}"
            )
    return masks


def _with_affinity(entry: Any, mask: Sequence[int] | None) -> Any:
    """Return an entry that binds its process to CPUs before the environments are made."""
    if mask is None:
        return entry
    if isinstance(entry, list):
        return [partial(_make_on_cpus, tuple(mask), make) for make in entry]
    return partial(_make_on_cpus, tuple(mask), entry)


def _make_on_cpus(mask: tuple[int, ...], make: Callable[[], Any]) -> Any:
    os.sched_setaffinity(0, mask)
    return make()


@dataclass(frozen=True)
class Chunks:
    """The rollouts of a batch; each has `frames` frames."""

    frames: int
    number: int

    @property
    def batch_frames(self) -> int:
        """Frames in a batch."""
        return self.frames * self.number

    @classmethod
    def of(cls, steps: Any, batch: int, envs: int, per_worker: int) -> Chunks:
        """Return the rollouts for a batch of at least `batch` frames.

        Args:
            steps: Number of steps in a rollout. "auto" gives each environment an equal share of the
                batch, but at least 64 steps. It prefers a length that divides the batch evenly,
                unless that more than halves the rollouts.
        """
        if not check.is_one_of(steps, ("auto",)):
            frames = check.check_positive("transition_chunk_size", steps) * per_worker
            return cls(frames, -(-batch // frames))
        wanted = max(batch // envs, _LEAST_CHUNK) * per_worker
        least = max(batch // wanted, 1)
        whole = (n for n in range(least, 2 * least + 1) if batch % (n * per_worker) == 0)
        number = next(whole, least)
        return cls(-(-batch // (number * per_worker)) * per_worker, number)
