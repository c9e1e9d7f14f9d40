"""Whether the policy is called centrally, and who waits for whom: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect.arguments import argument


def _check_inference(name: str, value: Any) -> bool:
    if value not in (None, "central"):
        raise ValueError(f"{name}: expected None or 'central', got {value!r}")
    return value is not None


def _check_size(name: str, value: Any, central: Any) -> int | None:
    if value is not None and central is None:
        raise ValueError(f"{name}: expected None without inference='central', got {value!r}")
    return check.check_positive_or_none(name, value)


def _check_timeout(name: str, value: Any, central: Any) -> float | None:
    if value is not None and central is None:
        raise ValueError(f"{name}: expected None without inference='central', got {value!r}")
    return None if value is None else check.check_seconds(name, value)


@dataclass(frozen=True)
class InferenceOptions:
    """Where the policy is called.

    Attributes:
        central: in one place for all workers, which only step environments.
    """

    central: bool = argument(
        None, _check_inference, "where the policy is called; None: in each worker", name="inference"
    )
    min_batch_size: int | None = argument(
        None,
        _check_size,
        "environments that a call waits for; None: those of all workers that collect",
        beside=("inference",),
    )
    max_batch_size: int | None = argument(
        None, _check_size, "environments in one call at the most", beside=("inference",)
    )
    server_timeout: float | None = argument(
        None,
        _check_timeout,
        "seconds that a call waits for them; None: as long as it takes",
        beside=("inference",),
    )


@dataclass(frozen=True)
class ServerSettings:
    """How a server calls the policy, and for whom; pickles.

    Attributes:
        device: where; None: where it lies, nobody named one.
        exploration: how actions are drawn.
        workers: how many are expected at first.
        groups: of each worker's environments, which ask each for itself.
    """

    options: InferenceOptions
    device: torch.device | None
    exploration: InteractionType
    workers: int
    groups: int = 1
