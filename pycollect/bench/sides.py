"""Ways to collect as streams: generators that yield the number of frames of each batch.

A call imports the collector's library, so that the process of one side imports no other side.
The first `next` makes the collector, and `close` shuts it down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import TensorDictBase

FOREVER = 10**12
"""Frames that no run reaches; TorchRL's RayCollector yields nothing for its default, -1."""

Stream = Generator[int, None, None]
Read = Callable[[TensorDictBase], int]
"""Reads a batch and returns its number of frames."""

_TORCHRLS = {
    "SyncDataCollector": "Collector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "DistributedDataCollector": "DistributedCollector",
}
"""Names of collectors since TorchRL 0.13, by the earlier ones."""


def count(batch: TensorDictBase) -> int:
    """Return the number of frames; cells outside of the mask hold none."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def read_tensors(*tensors: torch.Tensor) -> None:
    """Read every element."""
    for tensor in tensors:
        tensor.sum()


def read(batch: TensorDictBase) -> int:
    """Read observations, actions and rewards; return the number of frames."""
    read_tensors(batch["observation"], batch["action"], batch["next", "reward"])
    return count(batch)


def ours(
    collector: str, env: Any, policy: Any = None, *, read: Read = read, **arguments: Any
) -> Stream:
    """Collect with a collector of this package.

    Args:
        collector: Name of the class.
        env: Its `create_env_fn`.
        policy: Makes the policy. ``None`` means random actions.
        read: Reads each batch.
        arguments: Its other arguments.
    """
    import pycollect

    return _batches(getattr(pycollect, collector), env, policy, read, arguments)


def torchrls(
    collector: str, env: Any, policy: Any = None, *, read: Read = read, **arguments: Any
) -> Stream:
    """Collect with TorchRL's collector of the same name; wrap Gymnasium's environments for it."""
    return _batches(torchrls_class(collector), for_torchrl(env), policy, read, arguments)


def _batches(kind: Any, env: Any, policy: Any, read: Read, arguments: dict[str, Any]) -> Stream:
    made = None if policy is None else policy()
    collector = kind(env, policy=made, **{"total_frames": FOREVER, **arguments})
    try:
        for batch in collector:
            yield read(batch)
    finally:
        collector.shutdown()


def torchrls_class(name: str) -> Any:
    """Return a collector class of TorchRL by its name in this package."""
    for module in ("torchrl.collectors", "torchrl.collectors.distributed"):
        for known in (_TORCHRLS.get(name, name), name):
            if found := getattr(import_module(module), known, None):
                return found
    raise ValueError(f"collector: TorchRL has no {name}")


def for_torchrl(env: Any) -> Any:
    """Return the callable, or each of a list, so that it makes environments of TorchRL."""
    if isinstance(env, list):
        return [for_torchrl(own) for own in env]
    return partial(_wrapped, env)


def _wrapped(make: Callable[[], Any]) -> Any:
    from torchrl.envs import EnvBase, GymWrapper

    env = make()
    return env if isinstance(env, EnvBase) else GymWrapper(env, categorical_action_encoding=True)


def lacks(module: str) -> str:
    """Return why a row cannot be measured, or "" if the module is installed."""
    return "" if find_spec(module) is not None else f"{module} is not installed"
