"""Collectors of both libraries, and environments with methods for remote calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from torchrl.envs import GymEnv, SerialEnv

import pycollect

BOTH = (torchrl.collectors, pycollect)


def pendulum(**kwargs: Any) -> Any:
    return GymEnv("Pendulum-v1", **kwargs)


def three() -> Any:
    return SerialEnv(3, pendulum)


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@contextmanager
def made(home: Any, name: str, env: Any = pendulum, **kwargs: Any) -> Iterator[Any]:
    given: dict[str, Any] = {"policy": linear(), "frames_per_batch": 12, "total_frames": 24}
    collector = getattr(home, name)(env, **{**given, **kwargs})
    try:
        yield collector
    finally:
        collector.shutdown()


def plain(value: Any) -> Any:
    """Return a value of either side in a form that can be compared."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.device):
        return str(value)
    return value if isinstance(value, (int, float, str, bool, dict, type(None))) else type(value)


def plain_tensor(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Probed(GymEnv):
    """An environment with methods that die, hang, raise or return an unpicklable value."""

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(600)

    def raise_it(self) -> None:
        raise LookupError("the environment's own")

    def lock(self) -> Any:
        return threading.Lock()


def probed() -> Any:
    return Probed("Pendulum-v1")


class Slow(GymEnv):
    """An environment whose rollouts of 12 steps take more than two seconds."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(0.2)
        return super()._step(tensordict)


def slow() -> Any:
    return Slow("Pendulum-v1")


SEVERAL = [  # one of them runs by default
    pytest.param(name, marks=pytest.mark.processes)
    for name in ("MultiSyncCollector", "MultiAsyncCollector")
]


def write_seven(td: Any) -> None:
    td["next", "reward"].fill_(7.0)
