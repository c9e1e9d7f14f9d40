"""Checks of what is asked of a collector that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycollect.envs import EnvBatch


def check_open(closed: bool, failure: BaseException | None) -> None:
    """Raise where nothing can be asked of the workers any more."""
    if closed:
        raise RuntimeError("the collector was shut down")
    if failure is not None:
        raise failure


def no_weights_given() -> ValueError:
    """What an update without weights raises where the caller has no policy."""
    return ValueError(
        "policy_or_weights: expected a module or weights, got None; policy_factory builds the "
        "policy in the worker, so that there are none here to take"
    )


def check_worker_ids(
    worker_ids: int | Sequence[int] | None, known: Sequence[int], name: str = "worker_ids"
) -> list[int]:
    """The ids as a list, all of `known` for None; ValueError for an unknown one.

    Args:
        name: of the argument that they came in.
    """
    if worker_ids is None:
        return list(known)
    if not isinstance(worker_ids, int | Sequence) or isinstance(worker_ids, str):
        raise TypeError(f"{name}: expected an int, several or None, got {worker_ids!r}")
    ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
    unknown = [index for index in ids if isinstance(index, bool) or index not in known]
    if unknown:
        raise ValueError(f"{name}: expected ids among {list(known)}, got {unknown}")
    return ids


def rows_at(env: EnvBatch, index: Any) -> list[int]:
    """Which of P environments stand at an index into their batch dimensions.

    Raises:
        RuntimeError: they are no batch, or cannot be reset one by one.
        IndexError: it is out of their range.
    """
    if not env.batch_size:
        raise RuntimeError("index: expected None, as there is one environment alone")
    if not env.can_reset:
        raise RuntimeError(
            "index: expected None, as this vector environment does not honour reset_mask"
        )
    rows = torch.arange(env.num_envs).view(env.batch_size)
    return sorted(set(rows[index].reshape(-1).tolist()))
