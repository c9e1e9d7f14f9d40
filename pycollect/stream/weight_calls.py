"""The arguments of `update_policy_weights_`, in all the forms that TorchRL has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from pycollect.checks import check_worker_ids

_POLICY = "policy"


def source_of(given: Mapping[str, Any], model_id: Any, weights_dict: Any) -> Any:
    """Where an update has its weights from; None: from the collector's policy.

    Args:
        given: arguments of which one at most may be there, by name.
        model_id: which model they are of.
        weights_dict: sources by model, instead of both.

    Raises:
        ValueError: several of them, or another model than the policy.
        TypeError: `weights_dict` is no dict.
    """
    several = {name: value for name, value in given.items() if value is not None}
    if weights_dict is not None:
        if not isinstance(weights_dict, Mapping):
            raise TypeError(f"weights_dict: expected a dict, got {type(weights_dict).__name__}")
        if model_id is not None or several:
            others = [*several, *(["model_id"] if model_id is not None else [])]
            raise ValueError(f"weights_dict: expected None together with {', '.join(others)}")
        if list(weights_dict) != [_POLICY]:
            raise ValueError(f"weights_dict: expected 'policy' alone, got {list(weights_dict)}")
        return weights_dict[_POLICY]
    if model_id not in (None, _POLICY):
        raise ValueError(f"model_id: expected 'policy', got {model_id!r}")
    if len(several) > 1:
        raise ValueError(f"{list(several)[-1]}: expected None together with {next(iter(several))}")
    return next(iter(several.values()), None)


def by_worker(source: Any) -> dict[int, Any] | None:
    """A dict by worker id as such; None for any other source of weights."""
    if isinstance(source, TensorDictBase) or not isinstance(source, Mapping) or not source:
        return None
    ids = [key for key in source if isinstance(key, int) and not isinstance(key, bool)]
    return dict(source) if len(ids) == len(source) else None


def for_all(source: Any, worker_ids: int | Sequence[int] | None, workers: Sequence[int]) -> Any:
    """What there is for all workers, where one policy acts for all of them; None: the policy's.

    Args:
        workers: their ids.

    Raises:
        ValueError: some are to have other weights.
    """
    known = sorted(workers)
    ids = check_worker_ids(worker_ids, known)
    own = by_worker(source)
    if own is not None:
        ids = check_worker_ids(list(own), known, "policy_or_weights")
    if len(known) > 1 and sorted(set(ids)) != known:
        raise ValueError(
            f"worker_ids: expected all workers, as one policy acts for all of them, got {ids}"
        )
    if own is None:
        return source
    if len(own) > 1:
        raise ValueError(
            "policy_or_weights: expected the same weights for all workers, as one policy acts "
            "for all of them, got a dict by worker id"
        )
    return own[known[0]]
