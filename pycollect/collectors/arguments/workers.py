"""The arguments of a collector with several workers, brought into one form per worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollect import checks as check
from pycollect.collectors.arguments import devices as device_arguments
from pycollect.devices import CPU, Devices
from pycollect.engines.messages import WorkerSpec, pickled, pickled_for_child, pickled_spec
from pycollect.envs.info import check_info_keys
from pycollect.envs.vector_api import parse_autoreset
from pycollect.policy import Calling, check_policy_state, placed
from pycollect.scheduler.workers import WorkerPlan
from pycollect.worker.options import WorkerOptions

# The arguments that concern what one worker does.
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
    "compile_policy",
    "cudagraph_policy",
    "trust_policy",
    "observation_dtype",
    "observation_scale",
    "num_threads",
)


def env_entries(
    create_env_fn: Any,
    name: str,
    number: Any,
    check_entry: Callable[[Any], Any] = check.check_entry,
) -> list[Any]:
    """One entry of `create_env_fn` per worker.

    Args:
        name: of the argument that tells how many workers there are.
        number: its value, None if it was not given.
        check_entry: returns an entry in the form that it has from then on, or raises.

    Raises:
        ValueError: neither a list nor a number, or the list has another length.
    """
    count = None if number is None else check.check_positive(name, number)
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


def of_each_worker(values: Mapping[str, Any], workers: int) -> list[dict[str, Any]]:
    """The arguments of each worker: its own entry where there is one per worker."""
    return [
        {name: _of_worker(name, value, index, workers) for name, value in values.items()}
        for index in range(workers)
    ]


def per_worker(name: str, value: Any, workers: int) -> list[dict[str, Any]]:
    """A dict, or one per worker, as a list of dicts of their own; None is an empty one."""
    if value is None or isinstance(value, Mapping):
        return [dict(value or {}) for _ in range(workers)]
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, Mapping) for v in value):
        raise TypeError(f"{name}: expected a dict or a list of dicts, got {value!r}")
    if len(value) != workers:
        raise ValueError(f"{name}: expected one dict per worker ({workers}), got {len(value)}")
    return [dict(item) for item in value]


def _of_worker(name: str, value: Any, index: int, workers: int) -> Any:
    """This worker's entry where a top-level value has one per worker."""
    if not isinstance(value, (list, tuple)):
        return value
    if name in device_arguments.NAMES or name in ("create_env_kwargs", "policy_factory"):
        if len(value) != workers:
            raise ValueError(f"{name}: expected one per worker ({workers}), got {len(value)}")
        return value[index]
    return value


def policy_sources(
    arguments: Sequence[Mapping[str, Any]], policy: Any, beside: bool = False
) -> tuple[list[Any], bool]:
    """What each worker has its policy from, and whether that is a factory.

    Args:
        policy: goes to workers, unless they have factories.
        beside: there may be a policy, too, where they have factories.
    """
    factories = [own["policy_factory"] for own in arguments]
    for factory in factories:
        check.check_factories(factory, None if beside else policy, 1)
    check.check_policy(policy)
    given = [factory is not None for factory in factories]
    if not any(given):
        return [check.check_policy(policy)] * len(arguments), False
    if not all(given):
        raise ValueError(
            f"policy_factory: expected one for every worker, got none for {given.index(False)}"
        )
    return factories, True


def worker_options(
    arguments: Mapping[str, Any], frames: int, devices: Devices, mask: bool
) -> WorkerOptions:
    """The checked options of one worker, which collects `frames` frames per rollout.

    Args:
        devices: what was made of the arguments that name them.
        mask: record ("collector", "mask") whatever the environment.
    """
    return WorkerOptions(
        frames=frames,
        devices=devices,
        autoreset_mode=check_autoreset_mode(arguments["autoreset_mode"]),
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
        mask=mask,
        compact_obs=bool(arguments["compact_obs"]),
        calling=Calling.checked(
            arguments["compile_policy"], arguments["cudagraph_policy"], arguments["trust_policy"]
        ),
        **{
            name: check.check_callable(name, arguments[name])
            for name in ("init_fn", "pre_collect_hook", "post_collect_hook")
        },
    )


def one_for_all(given: Any, before: Any) -> Any:
    """What is given; else what the collector was given, unless that is one per worker."""
    if given is not None or isinstance(before, (list, tuple)):
        return given
    return before


def worker_plans(
    entries: Sequence[Any],
    arguments: Sequence[Mapping[str, Any]],
    sources: Sequence[Any],
    built_by_workers: bool,
    shares: Sequence[int],
    options: Sequence[Mapping[str, Any]],
    devices: Sequence[Devices],
    first: int = 0,
    mask: bool = False,
    elsewhere: bool = True,
) -> list[WorkerPlan]:
    """What each worker is made from; TypeError by the argument's name for what does not pickle.

    Args:
        shares: frames of one rollout of each.
        options: of the engine, for each worker.
        devices: of each.
        first: the id of the first one.
        mask: record ("collector", "mask") whatever the environments.
        elsewhere: they are no children of this process, which inherit what it shares.
    """
    specs = [
        WorkerSpec(
            index,
            entry,
            check.check_env_kwargs(own["create_env_kwargs"]),
            worker_options(own, share, places, mask),
            builds_policy=built_by_workers,
            hides_gpus=_hides_gpus(places, settings),
        )
        for index, (entry, own, share, places, settings) in enumerate(
            zip(entries, arguments, shares, devices, options, strict=True), first
        )
    ]
    for spec in specs:
        _ = pickled_spec(spec) if elsewhere else pickled_for_child(spec)
    policies = pickled_policies(sources, built_by_workers)
    return [
        WorkerPlan(spec, policy, own)
        for spec, policy, own in zip(specs, policies, options, strict=True)
    ]


def _hides_gpus(devices: Devices, options: Mapping[str, Any]) -> bool:
    """Whether a worker is not to see GPUs, of which each process that looks takes some memory.

    Not where nobody told what it works with, unless the engine counts GPUs and gives it none.
    """
    return devices.of_worker == {"cpu"} or (
        not devices.of_worker and options.get("num_gpus", 1) == 0
    )


def common_value(name: str, arguments: Sequence[Mapping[str, Any]]) -> Any:
    """The value that all workers share; ValueError if they differ."""
    first = arguments[0][name]
    if any(other[name] != first for other in arguments):
        values = [other[name] for other in arguments]
        raise ValueError(f"{name}: expected one value for all workers, got {values}")
    return first


def pickled_policies(sources: Sequence[Any], are_factories: bool) -> list[bytes]:
    """Each actor's policy or factory, pickled; those that are the same object share their bytes."""
    name = "policy_factory" if are_factories else "policy"
    known = {id(source): source for source in sources}
    if not are_factories:  # a worker may lack the device that the caller's lies on
        known = {key: placed(source, CPU) for key, source in known.items()}
    data = {key: pickled(name, source) for key, source in known.items()}
    return [data[id(source)] for source in sources]


def check_autoreset_mode(value: Any) -> Any:
    """None, or NEXT_STEP, SAME_STEP or DISABLED: Gymnasium's enum or its name in any case."""
    parse_autoreset(value, "autoreset_mode")
    return value
