"""The arguments of `update_policy_weights_`, in all the forms that TorchRL has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from pycollect.checks import check_worker_ids

_POLICY = "policy"


def source_of(given: Mapping[str, Any], model_id: Any, weights_dict: Any) -> Any:
    """Return the weights of an update; None means the collector's policy.

    Args:
        given: Arguments by name, of which at most one may be set.
        model_id: Model of the weights.
        weights_dict: Weights by model; replaces both.

    Raises:
        ValueError: Several arguments are set, or the model is not the policy.
        TypeError: `weights_dict` is not a dict.
    """
    several = {name: value for name, value in given.items() if value is not None}
    if weights_dict is not None:
        if not isinstance(weights_dict, Mapping):
            raise TypeError(f"weights_dict: expected a dict, got {type(weights_dict).__name__}")
        if model_id is not None or several:
            others = [*several, *(["model_id"] if model_id is not None else [])]
            raise ValueError(
                f"weights_dict: expected None because of {', '.join(others)}; pass one"
            )
        if list(weights_dict) != [_POLICY]:
            raise ValueError(
                f"weights_dict: expected the only key 'policy', got {list(weights_dict)}"
            )
        return weights_dict[_POLICY]
    if model_id not in (None, _POLICY):
        raise ValueError(f"model_id: expected 'policy', got {model_id!r}")
    if len(several) > 1:
        raise ValueError(
            f"{list(several)[-1]}: expected None because {next(iter(several))} is given; pass one"
        )
    return next(iter(several.values()), None)


def by_worker(source: Any) -> dict[int, Any] | None:
    """A dict by worker id as such; None for any other source of weights."""
    if isinstance(source, TensorDictBase) or not isinstance(source, Mapping) or not source:
        return None
    ids = [key for key in source if isinstance(key, int) and not isinstance(key, bool)]
    return dict(source) if len(ids) == len(source) else None


def for_all(source: Any, worker_ids: int | Sequence[int] | None, workers: Sequence[int]) -> Any:
    """Return the weights for all workers if one policy acts for them; None means the policy's.

    Args:
        workers: Ids of all workers.

    Raises:
        ValueError: Different weights are requested for some workers.
    """
    known = sorted(workers)
    ids = check_worker_ids(worker_ids, known)
    own = by_worker(source)
    if own is not None:
        ids = check_worker_ids(list(own), known, "policy_or_weights")
    if len(known) > 1 and sorted(set(ids)) != known:
        raise ValueError(
            f"worker_ids: expected all workers because they share one policy, got {ids}"
        )
    if own is None:
        return source
    if len(own) > 1:
        raise ValueError(
            "policy_or_weights: expected the same weights for all workers because they share one "
            "policy, got a dict by worker id"
        )
    return own[known[0]]
