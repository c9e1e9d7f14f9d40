"""The arguments of `update_policy_weights_`, in all the forms that TorchRL has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from pycollect.checks import check_worker_ids


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
