"""The arguments of each worker: the collector's own values, and its `collector_kwargs`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pycollect import checks as check
from pycollect.collectors.arguments.names import check_others
from pycollect.collectors.arguments.workers import dict_each, of_each_worker

# Arguments that `collector_kwargs` must not contain.
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
    """Return the entries, or a batch of `envs` copies of each.

    Raises:
        ValueError: An entry cannot be repeated.
    """
    count = check.check_positive(name, envs)
    return [_batched(entry, name, count) for entry in entries]


def _batched(entry: Any, name: str, envs: int) -> Any:
    """Return the entry, or `envs` copies of its callable that are stepped as a batch."""
    if envs == 1:
        return entry
    if isinstance(entry, list):
        raise ValueError(
            f"{name}: expected 1 because create_env_fn contains lists of environments, got {envs}"
        )
    if not callable(entry):
        raise ValueError(
            f"{name}: expected 1 because create_env_fn contains an environment, got {envs}; pass a "
            "callable that makes one"
        )
    return [entry] * envs


def merged_arguments(
    values: Mapping[str, Any],
    passed: Collection[str],
    collector_kwargs: Any,
    workers: int,
    names: Sequence[str],
    runs: str,
) -> list[dict[str, Any]]:
    """Return the arguments of each worker.

    An argument that the caller passed wins, then `collector_kwargs`, then the default.

    Args:
        values: The collector's own values of WORKER_ARGUMENTS.
        passed: Names that the caller passed.
        collector_kwargs: None, a dict, or one per worker.
        names: Names that `collector_kwargs` may contain.
        runs: Class of the collector that each worker runs.
    """
    given = dict_each("collector_kwargs", collector_kwargs, workers)
    result = []
    for own, top in zip(given, of_each_worker(values, workers), strict=True):
        _check_names(own, names, runs)
        known = {name: value for name, value in own.items() if name in names}
        result.append({**top, **known, **{name: top[name] for name in passed if name in top}})
    return result


def _check_names(own: Mapping[str, Any], names: Sequence[str], runs: str) -> None:
    """Refuse unknown keys, and arguments that only the outer collector has."""
    for name in own:
        if name in _OURS_ALONE:
            raise ValueError(
                f"collector_kwargs: {name!r} cannot be set for each worker; pass it to the "
                "collector itself"
            )
    others = {name: value for name, value in own.items() if name not in names}
    try:
        check_others(runs, names, others)
    except (TypeError, ValueError) as error:
        raise type(error)(f"collector_kwargs: {error}") from None
