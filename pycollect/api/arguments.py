"""Entries, devices and keyword arguments of workers: checked, with one value per worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from pycollect import checks as check
from pycollect.api.binding import check_others
from pycollect.arguments import arguments_of, naming
from pycollect.data.devices import CPU, Devices, check_available, named_device, with_index
from pycollect.data.weights import moved_to
from pycollect.driver.options import StreamOptions
from pycollect.envs.groups import group_entries
from pycollect.envs.make import check_entry
from pycollect.transport.pickling import pickled
from pycollect.worker.options import WorkerOptions

NAMES = ("device", "storing_device", "env_device", "policy_device")


def check_devices(given: Mapping[str, Any], *, other_machines: bool = False) -> Devices:
    """Check the device arguments of one worker.

    Args:
        other_machines: The worker may be on another machine, which checks the devices of its
            environments and policy itself. Otherwise, devices without an index get that of the
            calling thread's current device, because a worker process may have another one.

    Raises:
        ValueError: A value is not a device, or the device is not available; with the reason.
    """
    named = [_checked(name, given[name]) for name in NAMES]
    default, storing, *_ = named
    ours: tuple[str, ...] = NAMES
    if other_machines:  # only the device of the batches is in this process
        ours = ("storing_device" if storing else "device" if default else "env_device",)
    for name, device in zip(NAMES, named, strict=True):
        if device is not None and name in ours:
            check_available(name, device)
    if not other_machines:
        named = [device and with_index(device) for device in named]
    return Devices(*named)


def _checked(name: str, value: Any) -> torch.device | None:
    """Return a checked device, also of a list with the same device for each process."""
    if isinstance(value, (list, tuple)):
        devices = {_checked(name, item) for item in value}
        if len(devices) != 1:
            raise ValueError(
                f"{name}: expected one device for the processes of a worker, got {value}"
            )
        return devices.pop()
    return None if value is None else named_device(name, value)


# Arguments that may be a list with one value per worker.
ONE_EACH = (*NAMES, "create_env_kwargs", "policy_factory")

# Arguments that all workers share, although `collector_kwargs` may contain them.
_COMMON = tuple(arguments_of(StreamOptions, in_kwargs=True))

# Arguments of one worker.
WORKER_ARGUMENTS = (*ONE_EACH, *arguments_of(WorkerOptions), *_COMMON)


def env_entries(
    create_env_fn: Any, name: str, number: Any, check_entry: Callable[[Any], Any] = check_entry
) -> list[Any]:
    """Return one entry of `create_env_fn` per worker, each in the final form from `check_entry`.

    `name` is the argument with the number of workers; its value is ``None`` if it was not passed.
    """
    count = check.check_positive_or_none(name, number)
    if isinstance(create_env_fn, (list, tuple)):
        entries = list(create_env_fn)
        if not entries:
            raise ValueError("create_env_fn: expected at least one entry, got an empty list")
        if count is not None and count != len(entries):
            raise ValueError(
                f"{name}: expected {len(entries)}, the length of create_env_fn, got {count}"
            )
    else:
        if count is None:
            check_entry(create_env_fn)
            raise ValueError(
                f"{name}: expected a number of workers, because create_env_fn is not a list"
            )
        entries = [create_env_fn] * count
    return [check_entry(entry) for entry in entries]


def one_each(name: str, value: Any, count: int, of: str = "worker") -> list[Any]:
    """Return the value of each worker, from a list with one value per worker or a common value."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: expected one value per {of} ({count}), got {len(value)}")
    return list(value)


def dict_each(name: str, value: Any, count: int, of: str = "worker") -> list[dict[str, Any]]:
    """Return a copied dict per worker, from a dict, a list of dicts or None for empty dicts."""
    each = one_each(name, {} if value is None else value, count, of)
    if not all(isinstance(kwargs, Mapping) for kwargs in each):
        raise TypeError(f"{name}: expected a dict or a list of dicts, got {value!r}")
    if unnamed := [key for kwargs in each for key in kwargs if not isinstance(key, str)]:
        raise TypeError(f"{name}: expected strings as keys, got {unnamed}")
    return [dict(kwargs) for kwargs in each]


def of_each_worker(values: Mapping[str, Any], workers: int) -> list[dict[str, Any]]:
    """Return the arguments of each worker."""
    lists = {
        name: one_each(name, value, workers) for name, value in values.items() if name in ONE_EACH
    }
    return [
        {**values, **{name: own[index] for name, own in lists.items()}} for index in range(workers)
    ]


def common_values(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments that all workers must share; raise ValueError if they differ."""
    for name in _COMMON:
        values = [each[name] for each in arguments]
        with naming(name):
            differs = any(value is not values[0] and bool(value != values[0]) for value in values)
        if differs:
            raise ValueError(f"{name}: expected one value for all workers, got {values}")
    return {name: arguments[0][name] for name in _COMMON}


def policy_sources(
    arguments: Sequence[Mapping[str, Any]], policy: Any, with_policy: bool = False
) -> tuple[list[Any], bool]:
    """Return the policy or policy factory of each worker, and whether they are factories."""
    factories = [each["policy_factory"] for each in arguments]
    for factory in factories:
        check.check_factory(factory, None if with_policy else policy)
    check.check_policy(policy)
    given = [factory is not None for factory in factories]
    if not any(given):
        return [policy] * len(arguments), False
    if not all(given):
        raise ValueError(
            f"policy_factory: expected one per worker, got None for worker {given.index(False)}"
        )
    return factories, True


def one_for_all(given: Any, before: Any) -> Any:
    """Return `given`, or if it is None the collector's value, unless that has one per worker."""
    if given is not None or isinstance(before, (list, tuple)):
        return given
    return before


def check_groups(
    entry: Any, groups: Any, *, server: int | None = None, is_nest: bool = False
) -> None:
    """Raise ValueError if the environments of a worker cannot be divided into these groups.

    Args:
        server: Number of groups of each worker with central inference; None without it.
        is_nest: The entry is a list with one entry per process.
    """
    count = check.check_env_groups("env_groups", groups)
    if server not in (None, count):
        raise ValueError(
            f"env_groups: expected {server}, the collector's own number, got {count}; "
            "inference='central' serves the same group of all workers together"
        )
    if count == 1:
        return
    for item in entry if is_nest else [entry]:
        group_entries(item, count, remote_policy=server is not None)


def pickled_policies(sources: Sequence[Any], are_factories: bool) -> list[bytes]:
    """Return each worker's policy or factory, pickled; equal objects share their bytes."""
    name = "policy_factory" if are_factories else "policy"
    known = {id(source): source for source in sources}
    if not are_factories:  # a worker may lack the device of the caller's policy
        known = {key: moved_to(source, CPU) for key, source in known.items()}
    data = {key: pickled(name, source) for key, source in known.items()}
    return [data[id(source)] for source in sources]


# Arguments that `collector_kwargs` must not contain.
_OURS_ALONE = (
    "create_env_fn",
    "policy",
    "frames_per_batch",
    "total_frames",
    "postproc",
    "split_trajs",
    "replay_buffer",
    "replay_write_mode",
    "trajs_per_batch",
    "sync",
)


def merged_arguments(
    values: Mapping[str, Any],
    passed: Collection[str],
    collector_kwargs: Any,
    workers: int,
    names: Sequence[str],
    runs: str,
) -> list[dict[str, Any]]:
    """Return the arguments of each worker, from the collector's own values of WORKER_ARGUMENTS.

    An argument that the caller passed wins, then `collector_kwargs`, then the default.
    """
    given = dict_each("collector_kwargs", collector_kwargs, workers)
    result = []
    for kwargs, own in zip(given, of_each_worker(values, workers), strict=True):
        _check_names(kwargs, names, runs)
        known = {name: value for name, value in kwargs.items() if name in names}
        result.append({**own, **known, **{name: own[name] for name in passed if name in own}})
    return result


def _check_names(kwargs: Mapping[str, Any], names: Sequence[str], runs: str) -> None:
    """Refuse unknown keys, and arguments that only the outer collector has."""
    for name in kwargs:
        if name in _OURS_ALONE:
            raise ValueError(
                f"collector_kwargs: {name!r} cannot be set for each worker; pass it to the "
                "collector itself"
            )
    others = {name: value for name, value in kwargs.items() if name not in names}
    try:
        check_others(runs, names, others)
    except (TypeError, ValueError) as error:
        raise type(error)(f"collector_kwargs: {error}") from None
