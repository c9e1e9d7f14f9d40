"""Options of central inference and of its server, with checks."""

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
    """Options of central inference; if `central`, one policy acts for all workers."""

    central: bool = argument(
        None,
        _check_inference,
        """With "central", workers only step environments and one policy acts for all of them. It
        runs in this process, in the thread that waits for the batch, so its weights are live as in
        `SyncDataCollector`. Requests of ready workers form one policy batch, ``[B * P, *obs]``, or
        ``[B, *obs]`` for single environments. ``None`` gives each worker a copy of the policy.""",
        name="inference",
        accepts="str | None",
    )
    min_batch_size: int | None = argument(
        None,
        _check_size,
        """With central inference, minimum number of environments in a policy call. ``None`` means
        the environments of all collecting workers if sync, which makes actions reproducible from a
        seed. If async, it lets the server decide from the measured times of calls and steps.""",
        also=("inference",),
    )
    max_batch_size: int | None = argument(
        None,
        _check_size,
        """With central inference, maximum number of environments in a policy call; only whole
        workers are served. ``None`` sets no limit.""",
        also=("inference",),
    )
    server_timeout: float | None = argument(
        None,
        _check_timeout,
        """With central inference, maximum number of seconds that a policy call waits for more
        requests. ``None`` means no limit, or 0.01 with `preemptive_threshold`, or if async with
        `min_batch_size`.""",
        also=("inference",),
    )


@dataclass(frozen=True)
class ServerSettings:
    """Settings of an inference server; can be pickled."""

    options: InferenceOptions
    device: torch.device | None  # of the policy; ``None``: its own
    exploration: InteractionType  # how actions are drawn
    workers: int
    groups: int = 1  # number of groups of each worker's environments, which send separate requests
    measures: bool = False  # whether the server decides from measurements how long a call waits
